"""The GPU benchmark: im2win and its peers (`bench.cuda_peers`) on the same layers, in rounds of one process (`bench.cuda_harness`).

Filter packing and layout conversion of the input are never timed. im2win's transform is, and where there is one it is also timed alone, in
the same rounds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from im2win.bench.cpu import Progress, commit, spreads, versions
from im2win.bench.cuda_builds import Library, Recipe, TileRecipe, build_all, load
from im2win.bench.cuda_harness import Subject, interleaved, op_subject, prepared, set_up_peers
from im2win.bench.cuda_peers import DEFAULT, PLAN_S, TVM, Peers
from im2win.bench.peers.cuda import cudnn_math
from im2win.bench.peers.cudnn import supports
from im2win.bench.results import OURS, UNTUNED, Result, Row, roofline_fraction, suite_of
from im2win.bench.resume import highest_ceilings, in_order, kept
from im2win.bench.source import digests
from im2win.device.gpu import Gpu, device_gpu
from im2win.numerics.tolerance import tolerance
from im2win.records.lookup import choose
from im2win.registry.backends import backend_for
from im2win.registry.schedules import candidates, schedule_of
from im2win.spec.accuracy import Accuracy
from im2win.spec.conv2d import Conv2d
from im2win.spec.suites import Layer
from im2win.tuner.runners.cuda import Bench

TRANSFORM = "transform"

Ours = tuple[Conv2d, str]


def recipes(layers: Sequence[Layer], gpu: Gpu, logs: Path | None, algorithm: str, accuracy: Accuracy, untuned: bool) -> dict[Ours, Recipe]:
    """Recipes of im2win's kernels for these layers, by problem and `OURS` or `UNTUNED`."""
    made: dict[Ours, Recipe] = {}
    for conv in dict.fromkeys(layer.conv for layer in layers):
        made[conv, OURS] = TileRecipe(conv, algorithm, gpu, accuracy, recorded=True, logs=logs)
        if untuned:
            made[conv, UNTUNED] = TileRecipe(conv, algorithm, gpu, accuracy)
    return made


def _ours(bench: Bench, gpu: Gpu, accuracy: Accuracy, library: Library | str) -> Subject:
    op, backend = load(library), backend_for(gpu, accuracy)
    allowed = tolerance(bench.conv, backend.accuracy(backend.tile(schedule_of(op.method), op.tile)))
    return op_subject(bench, op, allowed)


def run(
    layers: Sequence[Layer],
    *,
    against: Sequence[str] = DEFAULT,
    logs: Path | None = None,
    algorithm: str = "auto",
    accuracy: Accuracy = "float32",
    untuned: bool = False,
    rounds: int = 15,
    plan_s: float = PLAN_S,
    tvm_trials: int = 64,
    tvm_cache: Path | None = None,
    suite: str = "custom",
    progress: Progress | None = None,
    keep: Callable[[Result], object] | None = None,
    note: Callable[[str], object] | None = None,
    before: Result | None = None,
    extra: Mapping[str, Callable[[Bench], Subject]] | None = None,
) -> Result:
    """Times the layers on the first GPU. The result has one row for each.

    Args:
        against: names of peers (see `im2win.bench.cuda_peers`).
        logs, algorithm, accuracy: as in `im2win.build`.
        untuned: time the default tile too.
        rounds: samples of each subject.
        plan_s: seconds in which plans of cuDNN's graph interface are tried, for a layer and layout.
        tvm_trials: candidates that TVM's default search may try for a layer.
        tvm_cache: see `im2win.bench.peers.cpu.TvmDefault`; missing searches are made for all layers at once, before the first layer is
            timed.
        progress, keep, before: see `im2win.bench.cpu.run`.
        note: called with lines of text while TVM searches.
        extra: further peers by name, each a function that prepares a subject for a layer.

    Raises:
        ValueError: a name in `against` is no peer on a GPU.
        NoGpuError: there is no GPU. A subject that fails is a message in its row instead.
        ResultError: see `im2win.bench.cpu.run`.
    """
    import torch

    gpu = device_gpu()
    set_up_peers(accuracy)
    limits = measure_ceilings()
    result = new_result(f"{suite}-tvm{tvm_trials}" if TVM in against else suite, layers, gpu, limits, accuracy)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="im2win-")))
        cache = tvm_cache or folder / "tvm"
        peers = Peers(against, accuracy, gpu, plan_s=plan_s, tvm_trials=tvm_trials, tvm_cache=cache, note=note, extra=extra)
        stack.enter_context(peers)
        rows: dict[int, Row] = {}
        if before is not None:
            known = with_algorithms(before, accuracy) if peers.by_name else before
            rows = kept(known, result, layers, gpu, accuracy=accuracy, peers=peers.names, untuned=untuned, logs=logs, algorithm=algorithm)
            result.ceilings = highest_ceilings(before, result)
        others = [layer for place, layer in enumerate(layers) if place not in rows]
        built = build_all(recipes(others, gpu, logs, algorithm, accuracy, untuned), folder)
        peers.search([layer.conv for layer in others])
        for done, layer in enumerate(layers, 1):
            row = rows.get(done - 1)
            if row is None:
                torch.cuda.empty_cache()
                ours = {name: library for (conv, name), library in built.items() if conv == layer.conv}
                row = time_layer(layer, gpu, limits, accuracy, ours, rounds, peers)
                row.tier = tier_of(layer.conv, gpu, logs, algorithm, accuracy)
            rows[done - 1] = row
            result.layers = in_order(rows)
            if keep is not None:
                keep(result)
            if progress is not None:
                progress(done, len(layers), row)
    return result


def with_algorithms(before: Result, accuracy: Accuracy) -> Result:
    """An earlier result without the rows that lack the algorithms of cuDNN by name though cuDNN has them for the layer."""

    def complete(row: Row) -> bool:
        conv = Conv2d.parse(row.conv)
        return supports(conv, cudnn_math(conv, accuracy)) is not None or any(
            name.startswith("cudnn_") for name in (*row.peers, *row.peers_failed)
        )

    return dataclasses.replace(before, layers=[row for row in before.layers if complete(row)])


def tier_of(conv: Conv2d, gpu: Gpu, logs: Path | None, algorithm: str, accuracy: Accuracy) -> str:
    """The tier of the look-up that chooses im2win's kernel, as `builder.build.looked_up` names it; "" where no algorithm supports it."""
    try:
        names = [row.key for row in candidates(algorithm, conv, "cuda", accuracy)]
    except ValueError:
        return ""
    found = choose(conv, gpu, names, logs, accuracy)
    return "default" if found is None else found.tier


def time_layer(
    layer: Layer, gpu: Gpu, limits: dict[str, float], accuracy: Accuracy, ours: Mapping[str, Library | str], rounds: int, peers: Peers,
) -> Row:
    """Checks and times every subject on one layer: im2win's kernels and the peers."""
    bench = Bench(layer.conv, 0)
    row = Row(layer.name, str(layer.conv), layer.count)
    with peers.of(bench) as others:
        mine = [(name, partial(_ours, bench, gpu, accuracy, library)) for name, library in ours.items()]
        ready, row.peers_failed = prepared([*mine, *others])
        row.failed = row.peers_failed.pop(OURS, None)
        samples = interleaved(bench, with_transform(ready), rounds)
    row.spread = spreads(samples)
    _note(row, layer.conv, ready, limits, accuracy)
    return row


def with_transform(ready: Mapping[str, Subject]) -> dict[str, Subject]:
    """The subjects, and im2win's transform alone where there is one."""
    transform = ready[OURS].transform if OURS in ready else None
    return {**ready, TRANSFORM: Subject(transform, None, 0.0)} if transform is not None else dict(ready)


def _note(row: Row, conv: Conv2d, ready: dict[str, Subject], limits: dict[str, float], accuracy: Accuracy) -> None:
    medians = {name: spread.median for name, spread in row.spread.items()}
    row.ours_ms, row.untuned_ms, row.transform_ms = (medians.pop(name, None) for name in (OURS, UNTUNED, TRANSFORM))
    row.peers = medians
    row.peers_chosen = {name: ready[name].algorithm for name in medians if ready[name].algorithm}
    row.peers_extra_bytes = {name: ready[name].extra_bytes or 0 for name in medians}
    row.best_peer = min(medians, key=lambda name: medians[name], default=None)
    if OURS in ready:
        ours = ready[OURS]
        row.algorithm, row.tuned, row.extra_bytes, row.error = ours.algorithm, ours.tuned, ours.extra_bytes, ours.error
        row.tile = dict(ours.tile)
    if UNTUNED in ready:
        row.untuned_algorithm, row.untuned_tile = ready[UNTUNED].algorithm, dict(ready[UNTUNED].tile)
    if row.ours_ms is not None:
        row.gflops = conv.flops / row.ours_ms / 1e6
        row.roofline_fraction = roofline_fraction(row, [accuracy], limits)
    if row.best_peer is not None:
        best = medians[row.best_peer]
        row.ratio = best / row.ours_ms if row.ours_ms is not None else None
        row.untuned_ratio = best / row.untuned_ms if row.untuned_ms is not None else None


def measure_ceilings() -> dict[str, float]:
    """Measures the GPU's ceilings.

    They are those of large matrix products of the vendor's library in float32, TF32, float16 and int8 (GFLOPS), and copy bandwidth (GB/s,
    bytes read plus written). Tensor cores multiply int8 twice as fast as float16. Where the library's int8 product is slower than that,
    twice the float16 figure is used.
    """
    import torch

    def milliseconds(call: Callable[[], Any]) -> float:
        events: Any = torch.cuda.Event
        times = []
        for _ in range(8):
            start, end = events(enable_timing=True), events(enable_timing=True)
            start.record()
            call()
            end.record()
            end.synchronize()
            times.append(float(start.elapsed_time(end)))
        return min(times)  # a ceiling is an upper bound

    size = 8192
    found = {}
    before = torch.backends.cuda.matmul.allow_tf32
    for name, dtype, tf32 in (("fma", torch.float32, False), ("tf32", torch.float32, True), ("f16", torch.float16, False)):
        torch.backends.cuda.matmul.allow_tf32 = tf32
        a, b = (torch.randn(size, size, device="cuda").to(dtype) for _ in range(2))
        found[f"{name}_gflops"] = 2 * size**3 / milliseconds(partial(torch.matmul, a, b)) / 1e6
    torch.backends.cuda.matmul.allow_tf32 = before
    a, b = (torch.randint(-128, 128, (size, size), dtype=torch.int8, device="cuda") for _ in range(2))
    found["s8_gflops"] = max(2 * found["f16_gflops"], 2 * size**3 / milliseconds(partial(torch._int_mm, a, b.t())) / 1e6)
    source = torch.empty(1 << 30, dtype=torch.float32, device="cuda")
    target = torch.empty_like(source)
    found["copy_gbs"] = 2 * source.numel() * 4 / milliseconds(partial(target.copy_, source)) / 1e6
    return found


def _cudnn_version() -> Any:
    import torch

    version: Any = torch.backends.cudnn.version
    return version()


def new_result(suite: str, layers: Sequence[Layer], gpu: Gpu, limits: dict[str, float], accuracy: Accuracy = "float32") -> Result:
    """A result without rows: what was run, where, when and with which versions."""
    import torch

    convs = [layer.conv for layer in layers]
    batches = {conv.batch for conv in convs}
    libraries = {"cuda": str(torch.version.cuda), "cudnn": str(_cudnn_version())}
    return Result(
        suite=suite_of(suite, convs, accuracy),
        dtype="+".join(sorted({conv.types for conv in convs})),
        batch=batches.pop() if len(batches) == 1 else None,
        device=gpu.name,
        brand=gpu.brand,
        threads=1,
        versions={**versions(), **libraries},
        commit=commit(),
        date=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        ceilings=limits,
        digests=digests("cuda"),
    )
