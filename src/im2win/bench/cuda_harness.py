"""The GPU harness: times im2win, PyTorch, cuDNN's algorithms by name and TVM's default search against each other, in one process.

Every subject gets the same values in its own layout. Every output is checked against one float64 reference before anything is timed. Rounds
are interleaved, each in an order of its own, so that no subject always follows the same one: what ran before matters to kernels of a few
microseconds. Two events time each call, after the level-2 cache was overwritten. TF32 is off unless the accuracy allows it. Workspaces are
limited by the device's memory only.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from im2win.bench.peers.cuda import call_bytes, cudnn_math, torch_call
from im2win.bench.peers.cudnn import Cudnn, CudnnError, output_dtype, supports
from im2win.bench.peers.subject import PeerError
from im2win.common.messages import brief
from im2win.device.gpu import Gpu
from im2win.numerics.tolerance import tolerance
from im2win.runtime.op import Op
from im2win.spec.accuracy import Accuracy, allows
from im2win.spec.conv2d import Conv2d
from im2win.spec.dtypes import ELEMENT_TYPES
from im2win.tuner.runners.check import verify
from im2win.tuner.runners.cuda import Bench, reference, sample

PEER_TOLERANCE = 5e-2  # of cuDNN's algorithms; its FFT and Winograd in float16 are far less accurate than direct sums
WORKSPACE_BYTES = 60 << 30
WARM_CALLS = 3


@dataclass
class Subject:
    """A subject of the harness: a checked call that is ready to be timed.

    Attributes:
        extra_bytes: bytes of its workspace.
        error: against the reference.
        transform: the transform of the call alone; None without one.
        algorithm: what im2win runs, or what a peer with a choice chose.
        tile: of im2win's subjects.
        sample: takes a sample (seconds of one call) where the call runs in another process; None where the harness takes it.
    """

    call: Callable[[], Any]
    extra_bytes: int | None
    error: float
    algorithm: str = ""
    tuned: bool = False
    transform: Callable[[], Any] | None = None
    tile: Mapping[str, Any] = field(default_factory=dict)
    sample: Callable[[], float] | None = None


class WrongError(RuntimeError):
    """A wrong output, or a subject that does not support the problem."""


def measured_error(bench: Bench, output: Any, allowed: float, right: tuple[Any, float] | None = None) -> float:
    """The error of an output.

    Args:
        right: the expected output and the magnitude that errors are relative to; None for those of the bench.

    Raises:
        WrongError: the error exceeds `allowed`, or is NaN.
    """
    import torch

    torch.cuda.synchronize()
    expected, scale = right or (bench.expected, bench.scale)
    measured = float((output.double() - expected).abs().max()) / scale
    if not measured <= allowed:
        raise WrongError(f"wrong result: relative error {measured:.2g} is above {allowed:.2g}.")
    return measured


def op_subject(bench: Bench, op: Op, allowed: float) -> Subject:
    """A built operator with its filters bound, which writes to the bench's output.

    Raises:
        WrongError: its error exceeds `allowed`, or it wrote outside its output.
    """
    bound = {name: bench.inputs[name] for name in ("bias", "scale") if name in bench.inputs}
    layer = op.bind(bench.inputs["filter"], **bound)
    call = partial(layer, bench.inputs["data"], residual=bench.inputs.get("residual"), out=bench.output)
    message, error = verify(bench, call, allowed)
    if message or error is None:
        raise WrongError(f"wrong result: {message}.")
    transform = partial(layer.transform, bench.inputs["data"]) if layer.transforms else None
    return Subject(call, op.extra_bytes, error, op.method, op.tuned, transform, op.tile)


def torch_subject(bench: Bench, layout: str) -> Subject:
    """PyTorch's convolution with tensors in this layout.

    Raises:
        WrongError: its output is wrong, or PyTorch has no such convolution.
    """
    conv = bench.conv
    call = torch_call(conv, bench.inputs, layout)
    held, y = call_bytes(call)
    extra = held - y.numel() * y.element_size()
    error = measured_error(bench, y if conv.layout == "NCHW" else y.permute(0, 2, 3, 1), PEER_TOLERANCE)
    return Subject(call, max(0, extra), error)


def tvm_subject(bench: Bench, gpu: Gpu, trials: int, cache: Path, failed: Mapping[Conv2d, str]) -> Subject:
    """The best kernel of TVM's default search.

    Args:
        trials: candidates of the search.
        cache: as in `im2win.bench.peers.cpu.TvmDefault`.
        failed: failures of `search_all`, by layer.

    Raises:
        WrongError: its output is wrong, or TVM's definition has no such convolution.
        PeerError: the search failed, or no candidate of it ran.
    """
    from im2win.bench.peers.tvm_default import compiled, refused

    conv = bench.conv
    if (reason := refused(conv)) is not None:
        raise WrongError(reason)
    if conv in failed:
        raise PeerError(failed[conv])
    call = partial(compiled(conv, trials, gpu, cache), bench.inputs["data"], bench.inputs["filter"], bench.output)
    message, error = verify(bench, call, tolerance(conv))
    if message or error is None:
        raise WrongError(f"wrong result: {message}.")
    return Subject(call, None, error, f"{trials} trials")


@contextlib.contextmanager
def cudnn_subjects(bench: Bench, accuracy: Accuracy) -> Iterator[Iterator[tuple[str, Callable[[], Subject]]]]:
    """(name, preparation) of each of cuDNN's algorithms. They share one workspace.

    cuDNN has one scale for all channels. Where the problem has a scale for each channel, cuDNN's output is checked against a reference with
    one scale. Its outputs are float32 where no algorithm writes the problem's output type.
    """
    import torch

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

        def prepare(plan: Any) -> Subject:
            pointers = (bench.inputs["data"].data_ptr(), w.data_ptr(), out.data_ptr(), workspace.data_ptr())
            call = library.runner(conv, plan, *pointers, scale=one_scale)
            out.fill_(float("nan") if out.dtype.is_floating_point else -77)
            try:
                call()
            except CudnnError as error:
                raise WrongError(str(error)) from None
            return Subject(call, plan.workspace_bytes, measured_error(bench, out, PEER_TOLERANCE, right))

        yield iter([(f"cudnn_{plan.algorithm.lower()}", partial(prepare, plan)) for plan in plans])


def _scaled_alike(bench: Bench, dtype: str) -> tuple[float, tuple[Any, float]]:
    """One scale for all channels that spreads outputs over int8.

    Returns:
        The scale; the reference with it, rounded to `dtype`, and its largest magnitude.
    """
    import torch

    sums, largest = reference(bench.conv.with_(out_dtype=None), bench.inputs)
    scale = 127 / largest
    right = sums * scale
    return scale, (right if (limits := ELEMENT_TYPES[dtype].limits) is None else torch.round(right).clamp_(*limits), largest * scale)


def tvm_searched(
    convs: Sequence[Conv2d], gpu: Gpu, trials: int, cache: Path, note: Callable[[str], object] | None,
) -> dict[str, Callable[[Bench], Subject]]:
    """Runs TVM's default search of the layers. Returns the subject by its name."""
    from im2win.bench.peers.tvm_searches import search_all

    failed = search_all(convs, trials, gpu, cache, note=note)
    return {"tvm": partial(tvm_subject, gpu=gpu, trials=trials, cache=cache, failed=failed)}


def set_up_peers(accuracy: Accuracy) -> None:
    """Lets PyTorch benchmark cuDNN's algorithms, and sets its TF32 switches to the accuracy."""
    import torch

    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = allows(accuracy, "tf32")


def prepared(preparations: Iterable[tuple[str, Callable[[], Subject]]]) -> tuple[dict[str, Subject], dict[str, str]]:
    """The subjects that are ready, and the reasons why the others are not."""
    ready: dict[str, Subject] = {}
    failed: dict[str, str] = {}
    for name, prepare in preparations:
        try:
            ready[name] = prepare()
        except Exception as error:
            failed[name] = brief(error, 300)
    return ready, failed


def interleaved(bench: Bench, ready: Mapping[str, Subject], rounds: int, seconds: float = float("inf")) -> dict[str, list[float]]:
    """Samples in seconds per call: up to `rounds` of each subject, fewer if they would take longer than `seconds`, at least one."""
    samples: dict[str, list[float]] = {name: [] for name in ready}
    counts = {}

    def taken(subject: Subject) -> float:
        return sample(bench, subject.call) if subject.sample is None else subject.sample()

    for name, subject in ready.items():
        first = taken(subject)
        counts[name] = rounds if first * rounds <= seconds else max(1, int(seconds / first))
        for _ in range(min(WARM_CALLS, counts[name]) - 1):
            subject.call()
    order = random.Random(0)
    for turn in range(rounds):
        for name in order.sample(list(ready), len(ready)):
            if turn < counts[name]:
                samples[name].append(taken(ready[name]))
    return samples
