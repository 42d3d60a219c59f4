"""The ladder measured: every rung of schedules/ladder.py on the same layers, in one run.

Each rung is a contender as in the benchmark (contest.py): a process of its own, checked against the float64 reference, warmed up by time,
timed in interleaved rounds. Rungs without `parallel` have one thread, in the transform too. A result is a benchmark result whose "ours" is
the last rung and whose "peers" are the rungs before it; there is no ratio in it, since nobody else takes part.
"""

from __future__ import annotations

import datetime
import itertools
import math
import re
import shutil
import tempfile
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tvm

from im2win import __version__, ceilings, codegen
from im2win.bench import commit, versions
from im2win.builder import build_tile
from im2win.compute import im2win
from im2win.contest import SAMPLE_SECONDS, Worker, WorkerError
from im2win.machine import Machine
from im2win.peers import Tensors, Trial
from im2win.problem import Conv2d
from im2win.ranking import default_tile
from im2win.reference import error, tolerance
from im2win.report import load_all, markdown
from im2win.results import Result, Row, Spread, geometric_mean
from im2win.runtime import Manifest, Op
from im2win.schedules import ladder
from im2win.schedules.ladder import RUNGS, Rung
from im2win.schedules.tails import CONFIG
from im2win.suites import Layer

SEED = 0
SUITE = "ladder-"  # starts the suite's name in a result
_MARKER = re.compile(r"(<!-- ladder -->\n).*?(<!-- /ladder -->)", re.DOTALL)

Progress = Callable[[int, int, Row], None]


def compile_rung(conv: Conv2d, rung: Rung, machine: Machine) -> Any:
    """A rung of the thesis as TVM's executable. LLVM's vectorizers are off for scalar rungs, so that vectors come with their rung."""
    scheduled = ladder.schedule(conv, im2win.define(conv, ladder.pack(conv, rung, machine)), rung, machine)
    module = tvm.IRModule({codegen.SYMBOL: scheduled.mod["main"].with_attr("global_symbol", codegen.SYMBOL)})
    module = codegen.any_alignment(ladder.mark_tails(module), conv.itemsize)
    scalar = {} if rung.vector else {"cl-opt": ["-vectorize-loops:bool=0", "-vectorize-slp:bool=0"]}
    target = tvm.target.Target({"kind": "llvm", "mcpu": machine.mcpu, "num-cores": machine.threads, **scalar})
    with tvm.transform.PassContext(config=CONFIG):
        return tvm.compile(module, target)


def build_rung(conv: Conv2d, rung: Rung, threads: int | None = None) -> Op:
    """Compiles and loads a rung for a problem.

    Raises:
        ValueError: `threads` is not between 1 and the number of usable CPUs.
    """
    machine = Machine.host(threads)
    if rung.production:
        return build_tile(conv, "im2win", default_tile(conv, "im2win", machine)[1], machine)
    manifest = Manifest(
        conv=conv, algorithm="im2win", tile=asdict(rung), pack=ladder.pack(conv, rung, machine), target="cpu", machine=machine.name,
        isa=machine.isa, threads=machine.threads, tuned=False, extra_bytes=im2win.transform_bytes(conv),
        tvm=tvm.__version__, im2win=__version__,
    )  # fmt: skip
    folder = Path(tempfile.mkdtemp(prefix="im2win-rung-"))
    try:
        compile_rung(conv, rung, machine).export_library(str(folder / "conv.so"))
        op = Op(manifest, folder / "conv.so")
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    weakref.finalize(op, shutil.rmtree, folder, ignore_errors=True)  # the file lives as long as its operator
    return op


@dataclass(frozen=True)
class RungKernel:
    """A rung as a contender, filters bound, output preallocated."""

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
    """Times every rung on every layer; one row a layer.

    Args:
        rungs: by name, lowest first; None: all of `RUNGS`.
        threads: of the parallel rungs; None: all CPUs this process may use.
        rounds: most samples of a rung on a layer.
        seconds: timed calls of a rung on a layer take about this long at most: slow ones get fewer samples, down to the warm-up's one.
        seconds_warmup: of each rung before the first round.
        suite: what the result is called, after "ladder-".
        progress: called with (layers done, layers in all, row) after each.

    Raises:
        ValueError: no layers, no rungs, `rounds` below 1 or a bad `threads`. A rung that fails is a message in its row instead.
    """
    rungs = RUNGS if rungs is None else rungs
    if not layers or not rungs:
        raise ValueError("ablation: `layers` and `rungs` must name at least one each.")
    if rounds < 1 or not seconds > 0:
        raise ValueError(f"ablation: `rounds` (={rounds}) must be at least 1 and `seconds` (={seconds:g}) above 0.")
    machine, batches = Machine.host(threads), {layer.conv.batch for layer in layers}
    limits = ceilings.measure(machine.threads, seconds_warmup=seconds_warmup)
    result = Result(
        suite=SUITE + suite,
        dtype="+".join(sorted({layer.conv.dtype for layer in layers})),
        batch=batches.pop() if len(batches) == 1 else None,
        device=machine.name,
        brand=machine.brand,
        threads=machine.threads,
        versions=versions(),
        commit=commit(),
        date=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        ceilings={"fma_gflops": limits.fma_gflops, "copy_gbs": limits.copy_gbs},
    )
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
            wrong = error(prepared.output, expected)
            if not wrong <= tolerance(conv):
                raise WorkerError(f"wrong result: relative error {wrong:.2g} is above {tolerance(conv):.2g}.")
            fastest[name] = worker.warm(warmup)
        except WorkerError as refused:
            row.peers_failed[name] = str(refused)
            continue
        if name == last:
            row.algorithm, row.extra_bytes, row.error = prepared.algorithm, prepared.extra_bytes, wrong
    samples = _rounds(workers, fastest, rounds, seconds, row.peers_failed)
    row.spread = {name: _spread(values) for name, values in samples.items()}
    row.peers = {name: spread.median for name, spread in row.spread.items()}
    row.failed, row.ours_ms = row.peers_failed.pop(last, None), row.peers.pop(last, None)
    if row.ours_ms is not None:
        row.gflops, row.roofline_fraction = conv.flops / row.ours_ms / 1e6, limits.floor_ms(conv) / row.ours_ms
    return row


def _rounds(
    workers: Mapping[str, Worker], fastest: Mapping[str, float], rounds: int, seconds: float, failed: dict[str, str]
) -> dict[str, list[float]]:
    """Samples in seconds a call. A call that alone is over the limit has been timed by its warm-up, and that is its sample."""
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


def _spread(seconds: Sequence[float]) -> Spread:
    p10, median, p90 = (float(value) for value in np.percentile(seconds, [10, 50, 90]) * 1e3)
    return Spread(median, p10, p90, len(seconds))


def rates(row: Row) -> dict[str, float]:
    """GFLOPS of each rung that was timed on a layer, in the run's order."""
    flops = Conv2d.parse(row.conv).flops
    return {name: flops / spread.median / 1e6 for name, spread in row.spread.items()}


def gains(result: Result) -> list[tuple[str, float, float, float, float]]:
    """For each rung after the first: name, mean gain over the rung before, and mean, least and most of its gain over the first.

    Means are geometric, over the layers on which all three were timed.
    """
    speeds = [rates(row) for row in result.layers]
    names = list(dict.fromkeys(name for row in result.layers for name in _order(row)))
    found = []
    for before, name in itertools.pairwise(names):
        rows = [row for row in speeds if {names[0], before, name} <= row.keys()]
        step, total = [row[name] / row[before] for row in rows], [row[name] / row[names[0]] for row in rows]
        mean, whole = geometric_mean(step), geometric_mean(total)
        if mean is not None and whole is not None:
            found.append((name, mean, whole, min(total), max(total)))
    return found


def _order(row: Row) -> list[str]:
    """The rungs of a row, lowest first, those that failed included."""
    known = [name for name in RUNGS if name in row.spread or name in row.peers_failed]
    return known + [name for name in row.spread if name not in RUNGS]


def table(result: Result) -> str:
    """A markdown table, a line a rung, and under it where and with what it was measured."""
    lines = []
    for name, step, total, least, most in gains(result):
        rung = RUNGS.get(name)
        facts = [rung.title, rung.source] if rung else ["", ""]
        lines.append([f"`{name}`", *facts, f"{step:.2f}x", f"{total:.1f}x", f"{least:.1f}x to {most:.1f}x"])
    batch = "the model's batch" if result.batch is None else f"batch {result.batch}"
    version = result.versions.get("apache-tvm", "unknown")
    where = f"{result.brand}, {result.threads} threads where parallel (`{result.device}`); apache-tvm {version}; {result.date[:10]}"
    columns = ["rung", "what changes", "source", "over the rung before", "over the first", "by layer"]
    what = f"{result.suite}, {result.dtype}, {batch}; geometric means over {len(result.layers)} layers"
    return f"{markdown(columns, lines, words=3)}\n\n{what}; {where}."


def fill(text: str, results: Mapping[str, Result]) -> str:
    """`text` with the part between ladder markers replaced by a table for each ladder among the results."""
    body = "\n\n".join(table(result) for result in results.values() if result.suite.startswith(SUITE))
    return _MARKER.sub(lambda match: f"{match[1]}{body}\n{match[2]}" if body else match[1] + match[2], text)


def refresh(document: Path, folder: Path) -> bool:
    """Fills the ladder tables of a text from the results under `folder`; whether the text changed."""
    text = document.read_text(encoding="utf-8")
    filled = fill(text, load_all(folder))
    if filled != text:
        document.write_text(filled, encoding="utf-8")
    return filled != text


def plot(result: Result, path: Path) -> Path:
    """Draws GFLOPS over rungs: a thin line a layer, a thick one for their geometric mean, the FMA peak dashed; returns the PNG's path.

    Needs matplotlib (the `bench` extra).
    """
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(name for row in result.layers for name in rates(row)))
    figure = Figure(figsize=(max(7.0, 1.15 * len(names)), 4.6), dpi=144, layout="constrained")
    axes: Any = figure.subplots()
    for row in result.layers:
        found = rates(row)
        places = [place for place, name in enumerate(names) if name in found]
        axes.plot(places, [found[names[place]] for place in places], color="#56B4E9", linewidth=0.9, marker="o", markersize=2.5, zorder=2)
        if places:
            axes.annotate(row.layer, (places[-1], found[names[places[-1]]]), (4, 0), textcoords="offset points", va="center", fontsize=6)
    means = [geometric_mean(found[name] for found in map(rates, result.layers) if name in found) for name in names]
    axes.plot(range(len(names)), means, color="#0072B2", linewidth=2.2, marker="o", label="geometric mean", zorder=3)
    peak = result.ceilings["fma_gflops"]
    axes.axhline(peak, color="#444444", linewidth=1, linestyle="--", label=f"FMA peak, {result.threads} threads: {peak:.0f}", zorder=1)
    axes.set_yscale("log")
    axes.set_xticks(range(len(names)), [f"{name}\n{RUNGS[name].source}" if name in RUNGS else name for name in names], fontsize=7)
    axes.set_ylabel("GFLOPS (higher is better)")
    axes.grid(axis="y", color="#dddddd", linewidth=0.6, zorder=0)
    axes.spines[["top", "right"]].set_visible(False)
    batch = "" if result.batch is None else f", batch {result.batch}"
    axes.set_title(f"{result.suite}, {result.dtype}{batch}: {result.brand}", fontsize=10, loc="left")
    axes.legend(frameon=False, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Software": None})
    return path
