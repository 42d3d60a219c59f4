"""Measures the device memory that convolutions take beside input, filters and output.

It is taken by formula and measured for every algorithm, and for the peers. The formula counts the workspace of the transformed tensor, or
the part of it that a tile holds at a time. Kernels allocate from PyTorch's allocator, whose statistics give the peak of a call. cuDNN
reports the workspaces that it needs. PyTorch's are measured like im2win's.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import im2win
from im2win.bench.cpu import commit, versions
from im2win.bench.memory_result import LayerMemory, MemoryResult
from im2win.bench.peers.cuda import call_bytes, cudnn_math, torch_call
from im2win.bench.peers.cudnn import Cudnn, CudnnError
from im2win.bench.source import digests
from im2win.device.gpu import device_gpu
from im2win.registry.schedules import SCHEDULES, Schedule
from im2win.spec.accuracy import Accuracy, allows
from im2win.spec.conv2d import Conv2d
from im2win.spec.suites import Layer

ALLOCATOR_BYTES = 2 << 20  # by which a block of PyTorch's allocator may exceed the request: it does not split off 1 MiB or less
Progress = Callable[[int, int, LayerMemory], None]
"""(layers done, layers in all, layer)"""


def judge(formula: int, measured: int) -> str | None:
    """What is wrong with a measured peak; None if it equals the formula's bytes, up to the allocator's rounding."""
    if formula <= measured <= formula + (ALLOCATOR_BYTES if formula else 0):
        return None
    return f"measured {measured} bytes, where the formula says {formula}"


def device_zeros(conv: Conv2d) -> dict[str, Any]:
    """Zeros on the GPU for every argument of a problem, its output included."""
    import torch

    channels = (conv.out_channels,)
    shapes = {"data": conv.input_shape, "filter": conv.filter_shape, "bias": channels, "scale": channels}
    return {
        name: torch.zeros(shapes.get(name, conv.output_shape), dtype=getattr(torch, dtype), device="cuda")
        for name, dtype in conv.dtypes.items()
    }


def _ours(row: Schedule, conv: Conv2d, tensors: dict[str, Any], logs: Path | None, accuracy: Accuracy) -> tuple[int, int]:
    """im2win's bytes by formula, and measured."""
    op = im2win.build(conv, "cuda", logs=logs, algorithm=row.key, accuracy=accuracy)
    bound = {name: np.zeros(conv.out_channels, conv.dtypes[name]) for name in ("bias", "scale") if name in conv.arguments}
    layer = op.bind(np.zeros(conv.filter_shape, conv.dtype), **bound)
    measured, _ = call_bytes(partial(layer, tensors["data"], residual=tensors.get("residual"), out=tensors["output"]))
    return op.extra_bytes, measured


def _torch(conv: Conv2d, tensors: dict[str, Any], layout: str) -> int:
    measured, result = call_bytes(torch_call(conv, tensors, layout))
    return max(0, measured - int(result.numel() * result.element_size()))


def _note_cudnn(found: LayerMemory, conv: Conv2d, accuracy: Accuracy) -> None:
    try:
        with Cudnn() as library:
            math = cudnn_math(conv, accuracy)
            found.cudnn_bytes = {plan.algorithm.lower(): plan.workspace_bytes for plan in library.plans(conv, math)}
            choice = library.choice(conv, math)
            found.cudnn_choice = choice.algorithm.lower() if choice else None
    except CudnnError as error:
        found.failed["cudnn"] = str(error)


def measure_layer(layer: Layer, logs: Path | None = None, accuracy: Accuracy = "float32") -> LayerMemory:
    """The memory of one layer on the first GPU. A measurement that fails has a message in place of a number."""
    conv = layer.conv
    found = LayerMemory(layer.name, str(conv), conv.bytes_moved)
    tensors = device_zeros(conv)
    for name, row in SCHEDULES.items():
        if row.cuda is None:
            continue
        if (reason := row.supports(conv, "cuda", accuracy)) is not None:
            found.failed[name] = reason
            continue
        found.formula_bytes[name] = row.stored_bytes(conv, "cuda")
        try:
            found.formula_bytes[name], found.measured_bytes[name] = _ours(row, conv, tensors, logs, accuracy)
        except Exception as error:
            found.failed[name] = _last_line(error)
            continue
        if (wrong := judge(found.formula_bytes[name], found.measured_bytes[name])) is not None:
            found.failed[name] = wrong
    for layout in ("NCHW", "NHWC"):
        name = f"torch_{layout.lower()}"
        try:
            found.torch_bytes[name] = _torch(conv, tensors, layout)
        except Exception as error:
            found.failed[name] = _last_line(error)
    _note_cudnn(found, conv, accuracy)
    return found


def _last_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[-1][:300]


def measure(
    layers: Sequence[Layer],
    *,
    logs: Path | None = None,
    accuracy: Accuracy = "float32",
    suite: str = "custom",
    progress: Progress | None = None,
) -> MemoryResult:
    """Measures the layers on the first GPU.

    Args:
        logs, accuracy: as in `im2win.build`; a kernel's memory does not depend on its tile.
        progress: called after each layer.

    Raises:
        NoGpuError: there is no GPU.
    """
    gpu = device_gpu()
    import torch

    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = allows(accuracy, "tf32")
    convs = [layer.conv for layer in layers]
    batches = {conv.batch for conv in convs}
    result = MemoryResult(
        suite=suite, dtype="+".join(sorted({conv.types for conv in convs})), batch=batches.pop() if len(batches) == 1 else None,
        device=gpu.name, brand=gpu.brand, versions={**versions(), "cuda": str(torch.version.cuda)}, commit=commit(),
        date=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"), digests=digests("cuda"),
    )  # fmt: skip
    for done, layer in enumerate(layers, 1):
        torch.cuda.empty_cache()
        result.layers.append(measure_layer(layer, logs, accuracy))
        if progress is not None:
            progress(done, len(layers), result.layers[-1])
    return result
