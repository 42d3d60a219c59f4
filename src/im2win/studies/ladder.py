"""Measures the CPU's ablation ladder: every rung of schedules/studies/cpu_ladder.py on the same layers, in one run.

The ladder is that of the im2win papers (arXiv 2306.14320 and the thesis behind it). Each rung is a subject as in the benchmark
(harness.py): a separate process, checked against the float64 reference, warmed up by time, timed in interleaved rounds. Rungs without
`parallel` use one thread, in the transform too. A result is a benchmark result whose "ours" is the last rung and whose "peers" are the
rungs before it. It has no ratio, since there is no other library.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial

import numpy as np

from im2win.bench import ceilings
from im2win.bench.cpu import checked, new_result, spreads
from im2win.bench.harness import SAMPLE_SECONDS, Worker, WorkerError
from im2win.bench.peers.subject import Tensors, Trial
from im2win.bench.results import Result, Row
from im2win.builder.build import build_tile, load_compiled
from im2win.codegen.llvm import Compiled, compile_module, kernel_module
from im2win.compute import im2win
from im2win.device.cpu import Machine
from im2win.numerics.tolerance import tolerance
from im2win.registry.ranking import default_tile
from im2win.runtime.op import Op
from im2win.schedules.studies import cpu_ladder as ladder
from im2win.schedules.studies.cpu_ladder import RUNGS, Rung
from im2win.spec.conv2d import Conv2d
from im2win.spec.suites import Layer
from im2win.studies.entries import LADDER as SUITE

SEED = 0

Progress = Callable[[int, int, Row], None]


def compile_rung(conv: Conv2d, rung: Rung, machine: Machine) -> Compiled:
    """Compiles a rung of the ladder. LLVM's vectorizers are off for scalar rungs, so that vector code first appears on its rung."""
    scheduled = ladder.schedule(conv, im2win.define(conv, ladder.pack(conv, rung, machine)), rung, machine)
    scalar = [] if rung.vector else ["-vectorize-loops:bool=0", "-vectorize-slp:bool=0"]
    return compile_module(kernel_module(conv, scheduled), machine, scalar)


def build_rung(conv: Conv2d, rung: Rung, threads: int | None = None) -> Op:
    """Compiles and loads a rung for a problem.

    Raises:
        ValueError: `threads` is not between 1 and the number of usable CPUs.
    """
    machine = Machine.host(threads)
    if rung.production:
        return build_tile(conv, "im2win", default_tile(conv, "im2win", machine)[1], machine)
    compiled = compile_rung(conv, rung, machine)
    return load_compiled(compiled, conv, "im2win", asdict(rung), ladder.pack(conv, rung, machine), machine)


@dataclass(frozen=True)
class RungKernel:
    """A rung as a subject, with filters bound and output preallocated."""

    name: str
    rung: Rung

    def prepare(self, conv: Conv2d, tensors: Tensors, threads: int) -> Trial:
        op = build_rung(conv, self.rung, threads)
        output = np.full(conv.output_shape, np.nan, conv.dtype)
        call = partial(op.bind(tensors.filter, tensors.bias), tensors.data, residual=tensors.residual, out=output)
        return Trial(call, lambda: output, op.algorithm, False, op.extra_bytes)


def run(
    layers: Sequence[Layer],
    rungs: Mapping[str, Rung] | None = None,
    *,
    threads: int | None = None,
    rounds: int = 15,
    seconds: float = 10.0,
    seconds_warmup: float = 0.5,
    suite: str = "custom",
    progress: Progress | None = None,
) -> Result:
    """Times every rung on every layer. The result has one row for each layer.

    Args:
        rungs: by name, lowest first; None: all of `RUNGS`.
        threads: of the parallel rungs; None: all CPUs that this process may use.
        rounds: most samples of a rung on a layer.
        seconds: most seconds of timed calls of a rung on a layer; slow rungs get fewer samples, at least the one of the warm-up.
        seconds_warmup: of each rung before the first round.
        suite: name of the result after "ladder-".
        progress: called with (layers done, layers in all, row) after each layer.

    Raises:
        ValueError: no layers, no rungs, `rounds` below 1 or a bad `threads`. A rung that fails is a message in its row instead.
    """
    rungs = RUNGS if rungs is None else rungs
    if not layers or not rungs:
        raise ValueError("`layers` and `rungs` must name at least one each.")
    if rounds < 1 or not seconds > 0:
        raise ValueError(f"`rounds` (={rounds}) must be at least 1 and `seconds` (={seconds:g}) above 0.")
    machine = Machine.host(threads)
    limits = ceilings.measure(machine.threads, seconds_warmup=seconds_warmup)
    result = new_result(SUITE + suite, [layer.conv for layer in layers], machine, limits)
    with ExitStack() as stack:
        workers = {
            name: stack.enter_context(Worker(RungKernel(name, one), machine.threads if one.parallel else 1)) for name, one in rungs.items()
        }
        for done, layer in enumerate(layers, 1):
            row = _time_layer(layer, workers, limits, rounds, seconds, seconds_warmup)
            result.layers.append(row)
            if progress is not None:
                progress(done, len(layers), row)
    return result


def _time_layer(
    layer: Layer, workers: Mapping[str, Worker], limits: ceilings.Ceilings, rounds: int, seconds: float, warmup: float
) -> Row:
    conv, last = layer.conv, list(workers)[-1]
    row = Row(layer.name, str(conv), layer.count)
    expected = Tensors.random(conv, SEED).expected(conv)
    fastest: dict[str, float] = {}
    for name, worker in workers.items():
        try:
            prepared = worker.prepare(conv, SEED)
            wrong = checked(prepared.output, expected, tolerance(conv))
            fastest[name] = worker.warm(warmup)
        except WorkerError as refused:
            row.peers_failed[name] = str(refused)
            continue
        if name == last:
            row.algorithm, row.extra_bytes, row.error = prepared.algorithm, prepared.extra_bytes, wrong
    samples = _rounds(workers, fastest, rounds, seconds, row.peers_failed)
    row.spread = spreads(samples)
    row.peers = {name: spread.median for name, spread in row.spread.items()}
    row.failed, row.ours_ms = row.peers_failed.pop(last, None), row.peers.pop(last, None)
    if row.ours_ms is not None:
        row.gflops, row.roofline_fraction = conv.flops / row.ours_ms / 1e6, limits.floor_ms(conv) / row.ours_ms
    return row


def _rounds(
    workers: Mapping[str, Worker], fastest: Mapping[str, float], rounds: int, seconds: float, failed: dict[str, str]
) -> dict[str, list[float]]:
    """Samples in seconds per call. If one call exceeds the limit, the call of the warm-up is its sample."""
    counts = {name: min(rounds, int(seconds / call)) for name, call in fastest.items()}
    samples = {name: [] if counts[name] else [call] for name, call in fastest.items()}
    for turn in range(max(counts.values(), default=0)):
        for name, count in counts.items():
            if turn < count and name not in failed:
                try:
                    samples[name].append(workers[name].sample(0.03, math.ceil(SAMPLE_SECONDS / fastest[name])))
                except WorkerError as late:
                    failed[name] = str(late)
    return {name: values for name, values in samples.items() if name not in failed}
