"""Measures the GPU's ablation ladder: every rung, and Alg. 9 without each technique, on the same layers in one run.

The rungs are those of schedules.studies.cuda_ladder, from the im2win papers (arXiv 2306.14316 and the thesis behind it). Every kernel is
checked against the float64 reference before it is timed and again afterwards. It is timed as in the benchmark (cuda_harness.py): in
interleaved rounds, after the level-2 cache was overwritten, with the im2win transform included. The transform alone is timed in the same
rounds. While a layer is measured, the CPUs compile the kernels of those that follow. A result is a benchmark result whose "ours" is the
ladder's last rung and whose "peers" are all others.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import tvm

from im2win.bench.ceilings import Ceilings
from im2win.bench.cpu import spreads
from im2win.bench.cuda import measure_ceilings, new_result
from im2win.bench.cuda_builds import Builders, Library, Recipe, TileRecipe, load
from im2win.bench.cuda_harness import Subject, interleaved, op_subject, prepared
from im2win.bench.results import Result, Row
from im2win.builder.build import cuda_manifest
from im2win.codegen import cuda as cuda_codegen
from im2win.codegen import reconstructed
from im2win.codegen.llvm import TileError
from im2win.device.gpu import Gpu, device_gpu
from im2win.numerics.tolerance import tolerance
from im2win.registry.backends import backend_for
from im2win.registry.schedules import schedule_of
from im2win.runtime.manifest import Manifest
from im2win.schedules.cuda.families.base import Reconstruction
from im2win.schedules.cuda.scheduled.passes import PIPELINE
from im2win.schedules.studies import cuda_ladder as ladder
from im2win.schedules.studies import cuda_ladder_schedule as steps
from im2win.schedules.studies.cuda_ladder import RUNGS, WITHOUT, CudaRung
from im2win.spec.conv2d import Conv2d
from im2win.spec.suites import Layer
from im2win.spec.symbols import SYMBOL, TRANSFORM_PARTS
from im2win.studies.entries import LADDER as SUITE
from im2win.studies.entries import LADDER_TRANSFORM, last_rung
from im2win.tuner.runners.check import verify
from im2win.tuner.runners.cuda import Bench

SEED = 0

Progress = Callable[[int, int, Row], None]


def rung_module(conv: Conv2d, rung: CudaRung, gpu: Gpu) -> tvm.IRModule:
    """The kernels of a rung: `conv2d`, with its transform, over flat tensors in the order of `conv.arguments`, and `transform_parts`.

    The second is the transform alone, for measuring.

    Raises:
        TileError: the ladder has no kernel for the problem.
    """
    _check(conv)
    tensors = steps.define(conv, rung)
    functions = {SYMBOL: steps.schedule(conv, tensors, rung).mod["main"], TRANSFORM_PARTS: steps.transform(tensors)}
    return reconstructed.lower(functions, Reconstruction(rung.rules, 0, PIPELINE, must=False), gpu)


def _check(conv: Conv2d) -> None:
    reason = ladder.supports(conv) or schedule_of("im2win").supports(conv, "cuda")
    if reason is not None:
        raise TileError(f"the ladder on {conv}: {reason}.")


@dataclass(frozen=True)
class RungRecipe:
    """A rung of the ladder for a problem."""

    conv: Conv2d
    rung: CudaRung
    gpu: Gpu

    def compile(self, path: Path) -> Manifest:
        """Compiles into the library `path`."""
        cuda_codegen.compile_module(rung_module(self.conv, self.rung, self.gpu), self.gpu).export(path)
        made, threads = ladder.workspace_bytes(self.conv), ladder.sizes_of(self.conv, self.rung).threads
        pack = ladder.pack_of(self.conv, self.rung)
        return cuda_manifest(self.conv, "im2win", asdict(self.rung), pack, self.gpu, threads=threads, made=made)


def recipe(conv: Conv2d, rung: CudaRung, gpu: Gpu) -> Recipe:
    """The recipe of a rung. "production" is the project's im2win schedule in IEEE float32, the arithmetic of all rungs."""
    if rung.production:
        return TileRecipe(conv, "im2win", gpu, "exact", recorded=True)
    return RungRecipe(conv, rung, gpu)


def run(
    layers: Sequence[Layer],
    rungs: Mapping[str, CudaRung] | None = None,
    *,
    rounds: int = 15,
    seconds: float = 1.0,
    suite: str = "custom",
    progress: Progress | None = None,
) -> Result:
    """Times every rung on every layer on the first GPU. The result has one row for each layer.

    Args:
        rungs: by name, lowest first; None: all of `RUNGS` and `WITHOUT`.
        rounds: most samples of a rung on a layer.
        seconds: most seconds of timed calls of a rung on a layer; slow rungs get fewer samples, at least one.
        suite: name of the result after "ladder-".
        progress: called with (layers done, layers in all, row) after each layer.

    Raises:
        ValueError: no layers, no rungs, bad `rounds` or `seconds`. A rung that fails is a message in its row instead.
        NoGpuError: there is no GPU.
        ToolchainError: there is no CUDA compiler.
    """
    rungs = {**RUNGS, **WITHOUT} if rungs is None else rungs
    if not layers or not rungs:
        raise ValueError("`layers` and `rungs` must name at least one each.")
    if rounds < 1 or not seconds > 0:
        raise ValueError(f"`rounds` (={rounds}) must be at least 1 and `seconds` (={seconds:g}) above 0.")
    gpu = device_gpu()
    backend_for(gpu).check_tools()
    twins = _twins(rungs)
    distinct = list(dict.fromkeys(twins.values()))
    recipes = {(layer.conv, name): recipe(layer.conv, rungs[name], gpu) for layer in layers for name in distinct}
    with (
        tempfile.TemporaryDirectory(prefix="im2win-ablation-") as folder,
        Builders() as builders,
        builders.begun(recipes, Path(folder)) as built,
    ):
        limits = measure_ceilings()
        result = new_result(SUITE + suite, layers, gpu, limits)
        for done, layer in enumerate(layers, 1):
            row = time_layer(layer, {name: built[layer.conv, name] for name in distinct}, twins, rounds, seconds)
            if row.ours_ms is not None:
                row.gflops = layer.conv.flops / row.ours_ms / 1e6
                row.roofline_fraction = Ceilings(limits["fma_gflops"], limits["copy_gbs"]).floor_ms(layer.conv) / row.ours_ms
            result.layers.append(row)
            if progress is not None:
                progress(done, len(layers), row)
    return result


def _twins(rungs: Mapping[str, CudaRung]) -> dict[str, str]:
    """For each rung the first one with the same techniques, so that equal kernels are built and timed once."""
    first: dict[tuple[str, ...], str] = {}
    return {name: first.setdefault(rung.techniques, name) for name, rung in rungs.items()}


def time_layer(layer: Layer, built: Mapping[str, Library | str], twins: Mapping[str, str], rounds: int, seconds: float) -> Row:
    """Checks and times every rung on one layer.

    Args:
        built: libraries by name, or the reason why there is none.
        twins: the name in `built` of every rung.
    """
    bench, row, last = Bench(layer.conv, SEED), Row(layer.name, str(layer.conv), layer.count), last_rung(list(twins), RUNGS)
    ready, failed = prepared([(name, partial(_subject, bench, library)) for name, library in built.items()])
    samples = interleaved(bench, {**ready, **_transform(bench, [built[name] for name in ready])}, rounds, seconds)
    for name, subject in ready.items():
        message, _ = verify(bench, subject.call, tolerance(layer.conv))
        if message:
            failed[name] = f"after timing: {message}"
            del samples[name]
    names = {**twins, LADDER_TRANSFORM: LADDER_TRANSFORM}
    found = spreads(samples)
    row.spread = {name: found[twin] for name, twin in names.items() if twin in found}
    row.peers = {name: spread.median for name, spread in row.spread.items()}
    row.peers_failed = {name: failed[twin] for name, twin in twins.items() if twin in failed}
    row.failed, row.ours_ms = row.peers_failed.pop(last, None), row.peers.pop(last, None)
    if row.ours_ms is not None:
        ours = ready[twins[last]]
        row.algorithm, row.tuned, row.extra_bytes, row.error = ours.algorithm, ours.tuned, ours.extra_bytes, ours.error
    return row


def _subject(bench: Bench, library: Library | str) -> Subject:
    return op_subject(bench, load(library), tolerance(bench.conv))


def _transform(bench: Bench, libraries: Sequence[Library | str]) -> dict[str, Subject]:
    """The transform alone, which is the same in every library; nothing if no library has one."""
    import torch

    for library in libraries:
        if isinstance(library, Library) and (kernel := load(library).kernels.transform) is not None:
            windows = torch.empty(library.manifest.made, dtype=torch.float32, device="cuda")
            return {LADDER_TRANSFORM: Subject(partial(kernel, bench.inputs["data"], windows), library.manifest.extra_bytes, 0.0)}
    return {}
