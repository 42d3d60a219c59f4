"""The benchmark on a GPU: us, PyTorch's cuDNN in both layouts, and every forward algorithm that cuDNN has by name, in one process.

Every contender gets the same values, in its own layout; every output is checked against one float64 reference before anything is timed.
Rounds are interleaved; each call is timed by two events, behind an overwritten level-2 cache. TF32 is off unless the accuracy allows it.
Workspaces are unlimited, as far as memory goes. Filter packing and layout changes of the input are outside the time for everyone, our
transform is inside, and where there is one it is also timed alone, in the same rounds.
"""

from __future__ import annotations

import contextlib
import datetime
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from im2win.algorithms import ALGORITHMS
from im2win.backends import backend_for
from im2win.bench import OURS, UNTUNED, Progress, commit, spreads, versions
from im2win.ceilings import Ceilings
from im2win.cuda_builds import Library, Recipe, TileRecipe, build_all, load
from im2win.cuda_peers import call_bytes, cudnn_math, torch_call
from im2win.gpu import Gpu, device_gpu
from im2win.messages import brief
from im2win.problem import Conv2d
from im2win.reference import Accuracy, allows, tolerance
from im2win.results import Result, Row
from im2win.runtime import Op
from im2win.suites import Layer
from im2win.tuner.cuda_runner import Bench, reference, sample, verify

PEER_TOLERANCE = 5e-2  # of cuDNN's own algorithms; FFT and Winograd in float16 are far less accurate than direct sums
WORKSPACE_BYTES = 60 << 30
WARM_CALLS = 3
TRANSFORM = "transform"

Ours = tuple[Conv2d, str]


@dataclass
class Contender:
    """A checked, ready call. extra_bytes: workspace, or the tensor made first; error: against the reference.

    transform: the part of the call that makes that tensor, alone.
    """

    call: Callable[[], Any]
    extra_bytes: int | None
    error: float
    algorithm: str = ""
    tuned: bool = False
    transform: Callable[[], Any] | None = None


class WrongError(RuntimeError):
    """An output that is not the convolution, or a contender that has none for this problem."""


def _error(bench: Bench, output: Any, allowed: float, right: tuple[Any, float] | None = None) -> float:
    """`right`: what the output shall be and the scale of errors, where they are not the bench's."""
    import torch

    torch.cuda.synchronize()
    expected, scale = right or (bench.expected, bench.scale)
    measured = float((output.double() - expected).abs().max()) / scale
    if not measured <= allowed:
        raise WrongError(f"wrong result: relative error {measured:.2g} is above {allowed:.2g}.")
    return measured


def recipes(layers: Sequence[Layer], gpu: Gpu, logs: Path | None, algorithm: str, accuracy: Accuracy, untuned: bool) -> dict[Ours, Recipe]:
    """Our kernels of these layers, by problem and `OURS` or `UNTUNED`."""
    made: dict[Ours, Recipe] = {}
    for conv in dict.fromkeys(layer.conv for layer in layers):
        made[conv, OURS] = TileRecipe(conv, algorithm, gpu, accuracy, recorded=True, logs=logs)
        if untuned:
            made[conv, UNTUNED] = TileRecipe(conv, algorithm, gpu, accuracy)
    return made


def _ours(bench: Bench, gpu: Gpu, accuracy: Accuracy, library: Library | str) -> Contender:
    op, backend = load(library), backend_for(gpu, accuracy)
    allowed = tolerance(bench.conv, backend.accuracy(backend.tile(ALGORITHMS[op.algorithm], op.tile)))
    return op_contender(bench, op, allowed)


def op_contender(bench: Bench, op: Op, allowed: float) -> Contender:
    """A built operator, its filters bound, that writes where the bench looks.

    Raises:
        WrongError: its error is above `allowed`, or it wrote where it must not.
    """
    bound = {name: bench.inputs[name] for name in ("bias", "scale") if name in bench.inputs}
    layer = op.bind(bench.inputs["filter"], **bound)
    call = partial(layer, bench.inputs["data"], residual=bench.inputs.get("residual"), out=bench.output)
    message, error = verify(bench, call, allowed)
    if message or error is None:
        raise WrongError(f"wrong result: {message}.")
    transform = partial(layer.transform, bench.inputs["data"]) if layer.transforms else None
    return Contender(call, op.extra_bytes, error, op.algorithm, op.tuned, transform)


def torch_contender(bench: Bench, layout: str) -> Contender:
    """PyTorch's convolution, with its memory in this layout.

    Raises:
        WrongError: it is wrong, or PyTorch has no such convolution.
    """
    conv = bench.conv
    call = torch_call(conv, bench.inputs, layout)
    held, y = call_bytes(call)
    extra = held - y.numel() * y.element_size()
    error = _error(bench, y if conv.layout == "NCHW" else y.permute(0, 2, 3, 1), PEER_TOLERANCE)
    return Contender(call, max(0, extra), error)


def tvm_contender(bench: Bench, gpu: Gpu, trials: int, cache: Path, failed: Mapping[Conv2d, str]) -> Contender:
    """The best of TVM's default search, with so many trials; `cache` as in `im2win.peers.TvmDefault`, `failed` from `search_all`.

    Raises:
        WrongError: it is wrong, or its definition has no such convolution. PeerError: the search failed, or no candidate of it ran.
    """
    from im2win.peers import PeerError
    from im2win.tvm_default import compiled, refused

    conv = bench.conv
    if (reason := refused(conv)) is not None:
        raise WrongError(reason)
    if conv in failed:
        raise PeerError(failed[conv])
    call = partial(compiled(conv, trials, gpu, cache), bench.inputs["data"], bench.inputs["filter"], bench.output)
    message, error = verify(bench, call, tolerance(conv))
    if message or error is None:
        raise WrongError(f"wrong result: {message}.")
    return Contender(call, None, error)


@contextlib.contextmanager
def cudnn_contenders(bench: Bench, accuracy: Accuracy) -> Iterator[Iterator[tuple[str, Callable[[], Contender]]]]:
    """(name, preparation) of cuDNN's algorithms; they share one workspace.

    Where channels have scales of their own, it scales them all alike, and is checked against that; its outputs are float32 where none of
    its algorithms writes what the problem asks for.
    """
    import torch

    from im2win.cudnn import Cudnn, CudnnError, output_dtype, supports

    conv = bench.conv
    math = cudnn_math(conv, accuracy)
    if supports(conv, math) is not None:
        yield iter(())
        return
    with Cudnn() as library:
        library.set_stream(torch.cuda.current_stream().cuda_stream)
        found = library.plans(conv, math)
        if not found and conv.requantised:
            conv = conv.with_(out_dtype=None)
            found = library.plans(conv, math)
        plans = [plan for plan in found if plan.workspace_bytes <= WORKSPACE_BYTES]
        one_scale, right = _scaled_alike(bench, output_dtype(conv)) if bench.conv.requantised else (1.0, None)
        workspace = torch.empty(max([plan.workspace_bytes for plan in plans], default=0) + 1, dtype=torch.uint8, device="cuda")
        w = bench.inputs["filter"] if conv.layout == "NCHW" else bench.inputs["filter"].permute(0, 2, 3, 1).contiguous()
        out = torch.empty(conv.output_shape, dtype=getattr(torch, output_dtype(conv)), device="cuda")

        def prepare(plan: Any) -> Contender:
            pointers = (bench.inputs["data"].data_ptr(), w.data_ptr(), out.data_ptr(), workspace.data_ptr())
            call = library.runner(conv, plan, *pointers, scale=one_scale)
            out.fill_(float("nan") if out.dtype.is_floating_point else -77)
            try:
                call()
            except CudnnError as error:
                raise WrongError(str(error)) from None
            return Contender(call, plan.workspace_bytes, _error(bench, out, PEER_TOLERANCE, right))

        yield iter([(f"cudnn_{plan.algorithm.lower()}", partial(prepare, plan)) for plan in plans])


def _scaled_alike(bench: Bench, dtype: str) -> tuple[float, tuple[Any, float]]:
    """A scale for all channels that spreads outputs over int8, the sums times it as this type has them, and the largest of them."""
    import torch

    sums, largest = reference(bench.conv.with_(out_dtype=None), bench.inputs)
    scale = 127 / largest
    right = sums * scale
    return scale, (torch.round(right).clamp_(-128, 127) if dtype == "int8" else right, largest * scale)


def run(
    layers: Sequence[Layer],
    *,
    logs: Path | None = None,
    algorithm: str = "auto",
    accuracy: Accuracy = "float32",
    untuned: bool = False,
    rounds: int = 15,
    tvm_trials: int = 0,
    tvm_cache: Path | None = None,
    suite: str = "custom",
    progress: Progress | None = None,
    keep: Callable[[Result], object] | None = None,
    note: Callable[[str], object] | None = None,
) -> Result:
    """Times the layers on the first GPU; one row each.

    Args:
        logs, algorithm, accuracy: as in `im2win.build`.
        untuned: times the default tile too.
        rounds: samples a contender.
        tvm_trials: candidates that TVM's default search may try on a layer; 0 leaves it out.
        tvm_cache: see `im2win.peers.TvmDefault`; what it lacks is searched for all layers at once, before the first is timed.
        progress, keep: see `im2win.bench.run`.
        note: called with lines of text while TVM searches.

    Raises:
        NoGpuError: there is none. A contender that fails is a message in its row instead.
    """
    import torch

    gpu = device_gpu()
    set_up_peers(accuracy)
    limits = measure_ceilings()
    name = "-".join([suite, *([accuracy] if accuracy != "float32" else []), *([f"tvm{tvm_trials}"] if tvm_trials else [])])
    result = new_result(name, layers, gpu, limits)
    with tempfile.TemporaryDirectory(prefix="im2win-") as folder:
        built = build_all(recipes(layers, gpu, logs, algorithm, accuracy, untuned), Path(folder))
        cache = tvm_cache or Path(folder) / "tvm"
        searched = tvm_searched([layer.conv for layer in layers], gpu, tvm_trials, cache, note) if tvm_trials else {}
        for done, layer in enumerate(layers, 1):
            torch.cuda.empty_cache()
            ours = {name: library for (conv, name), library in built.items() if conv == layer.conv}
            row = time_layer(layer, gpu, limits, accuracy, ours, rounds, searched)
            result.layers.append(row)
            if keep is not None:
                keep(result)
            if progress is not None:
                progress(done, len(layers), row)
    return result


def tvm_searched(
    convs: Sequence[Conv2d], gpu: Gpu, trials: int, cache: Path, note: Callable[[str], object] | None,
) -> dict[str, Callable[[Bench], Contender]]:
    """TVM's default search of the layers, done: the contender by its name."""
    from im2win.tvm_searches import search_all

    failed = search_all(convs, trials, gpu, cache, note=note)
    return {"tvm": partial(tvm_contender, gpu=gpu, trials=trials, cache=cache, failed=failed)}


def set_up_peers(accuracy: Accuracy) -> None:
    """PyTorch tries cuDNN's algorithms out, and keeps to the accuracy."""
    import torch

    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = allows(accuracy, "tf32")


def time_layer(
    layer: Layer, gpu: Gpu, limits: dict[str, float], accuracy: Accuracy, ours: Mapping[str, Library | str], rounds: int,
    searched: Mapping[str, Callable[[Bench], Contender]],
) -> Row:
    """Checks and times every contender on one layer: our kernels, PyTorch, what was searched for, and all of cuDNN."""
    bench = Bench(layer.conv, 0)
    row = Row(layer.name, str(layer.conv), layer.count)
    with cudnn_contenders(bench, accuracy) as named:
        preparations: list[tuple[str, Callable[[], Contender]]] = [
            *((name, partial(_ours, bench, gpu, accuracy, library)) for name, library in ours.items()),
            *((f"torch_{layout.lower()}", partial(torch_contender, bench, layout)) for layout in ("NCHW", "NHWC")),
            *((name, partial(prepare, bench)) for name, prepare in searched.items()),
        ]
        ready, row.peers_failed = prepared([*preparations, *named])
        row.failed = row.peers_failed.pop(OURS, None)
        samples = interleaved(bench, with_transform(ready), rounds)
    row.spread = spreads(samples)
    _note(row, layer.conv, ready, limits)
    return row


def prepared(preparations: Iterable[tuple[str, Callable[[], Contender]]]) -> tuple[dict[str, Contender], dict[str, str]]:
    """The contenders that are ready, and why the others are not."""
    ready: dict[str, Contender] = {}
    failed: dict[str, str] = {}
    for name, prepare in preparations:
        try:
            ready[name] = prepare()
        except Exception as error:
            failed[name] = brief(error, 300)
    return ready, failed


def with_transform(ready: Mapping[str, Contender]) -> dict[str, Contender]:
    """And our transform by itself, where there is one."""
    transform = ready[OURS].transform if OURS in ready else None
    return {**ready, TRANSFORM: Contender(transform, None, 0.0)} if transform is not None else dict(ready)


def interleaved(bench: Bench, ready: Mapping[str, Contender], rounds: int, seconds: float = float("inf")) -> dict[str, list[float]]:
    """Samples in seconds a call: up to `rounds` a contender, fewer where they would take longer than `seconds`, and one at least."""
    samples: dict[str, list[float]] = {name: [] for name in ready}
    counts = {}
    for name, contender in ready.items():
        first = sample(bench, contender.call)
        counts[name] = rounds if first * rounds <= seconds else max(1, int(seconds / first))
        for _ in range(min(WARM_CALLS, counts[name]) - 1):
            contender.call()
    for turn in range(rounds):
        for name, contender in ready.items():
            if turn < counts[name]:
                samples[name].append(sample(bench, contender.call))
    return samples


def _note(row: Row, conv: Conv2d, ready: dict[str, Contender], limits: dict[str, float]) -> None:
    medians = {name: spread.median for name, spread in row.spread.items()}
    row.ours_ms, row.untuned_ms, row.transform_ms = (medians.pop(name, None) for name in (OURS, UNTUNED, TRANSFORM))
    row.peers = medians
    row.peers_extra_bytes = {name: ready[name].extra_bytes or 0 for name in medians}
    row.best_peer = min(medians, key=lambda name: medians[name], default=None)
    if OURS in ready:
        ours = ready[OURS]
        row.algorithm, row.tuned, row.extra_bytes, row.error = ours.algorithm, ours.tuned, ours.extra_bytes, ours.error
    if row.ours_ms is not None:
        row.gflops = conv.flops / row.ours_ms / 1e6
        kind = {"float32": "fma_gflops", "float16": "f16_gflops", "int8": "f16_gflops"}[conv.dtype]
        floor = Ceilings(limits[kind], limits["copy_gbs"]).floor_ms(conv)
        row.roofline_fraction = floor / row.ours_ms
    if row.best_peer is not None:
        best = medians[row.best_peer]
        row.ratio = best / row.ours_ms if row.ours_ms is not None else None
        row.untuned_ratio = best / row.untuned_ms if row.untuned_ms is not None else None


def measure_ceilings() -> dict[str, float]:
    """Large products of the vendor's library in float32, TF32 and float16 (GFLOPS), and copy bandwidth (GB/s, bytes read and written)."""
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
        return sorted(times)[len(times) // 2]

    size = 8192
    found = {}
    before = torch.backends.cuda.matmul.allow_tf32
    for name, dtype, tf32 in (("fma", torch.float32, False), ("tf32", torch.float32, True), ("f16", torch.float16, False)):
        torch.backends.cuda.matmul.allow_tf32 = tf32
        a, b = (torch.randn(size, size, device="cuda").to(dtype) for _ in range(2))
        found[f"{name}_gflops"] = 2 * size**3 / milliseconds(partial(torch.matmul, a, b)) / 1e6
    torch.backends.cuda.matmul.allow_tf32 = before
    source = torch.empty(1 << 30, dtype=torch.float32, device="cuda")
    target = torch.empty_like(source)
    found["copy_gbs"] = 2 * source.numel() * 4 / milliseconds(partial(target.copy_, source)) / 1e6
    return found


def _cudnn_version() -> Any:
    import torch

    version: Any = torch.backends.cudnn.version
    return version()


def new_result(suite: str, layers: Sequence[Layer], gpu: Gpu, limits: dict[str, float]) -> Result:
    """A result without rows: what was run, where, when and with which versions."""
    import torch

    convs = [layer.conv for layer in layers]
    batches, layouts = {conv.batch for conv in convs}, {conv.layout for conv in convs}
    libraries = {"cuda": str(torch.version.cuda), "cudnn": str(_cudnn_version())}
    return Result(
        suite=suite + ("-nhwc" if layouts == {"NHWC"} else ""),
        dtype="+".join(sorted({conv.types for conv in convs})),
        batch=batches.pop() if len(batches) == 1 else None,
        device=gpu.name,
        brand=gpu.brand,
        threads=1,
        versions={**versions(), **libraries},
        commit=commit(),
        date=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        ceilings=limits,
    )
