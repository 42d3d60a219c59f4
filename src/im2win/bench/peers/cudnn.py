"""cuDNN's forward convolution, each algorithm called by name through the C interface of cuDNN 9.

A framework often selects another algorithm than cuDNN's fastest. Here each algorithm is called by itself, with all the workspace that it
needs, so that the peer is the best of them. (The engines of cuDNN's graph interface are reached through PyTorch, not from here.)

Types, as in cuDNN's table of `cudnnConvolutionForward`:

| `conv.dtype` | x, w | y | sums | layouts |
|---|---|---|---|---|
| float32 | float32 | float32 | float32 | NCHW, NHWC |
| float16 | float16 | float16 | float32 | NCHW, NHWC |
| int8 | int8 | int8 for `out_dtype` int8, else float32 | int32 | NHWC, channels a multiple of 4 |

cuDNN writes the int32 sums of int8 tensors as int8 (saturated) or as float32, never as int32. Outputs that are not int8 are written as
float32, which holds every sum up to 2**24. cuDNN scales them by one number for all channels, while a `Conv2d` has one for each channel. Its
other int8 forms require x, w and y in blocks of 4 or 32 channels (NCHW_VECT_C), layouts that `Conv2d` does not have.

The argument `math` says which units may be used:

- `"fma"`: FMA_MATH, no tensor cores: IEEE float32 products of float32 (and float16) tensors.
- `"tf32"`: DEFAULT_MATH, which for float32 permits TF32 since the A100. TENSOR_OP_MATH_ALLOW_CONVERSION is no choice: it permits float16
  products of float32 tensors. `NVIDIA_TF32_OVERRIDE=0` in the environment turns TF32 off here as well.
- `"tensor"`: TENSOR_OP_MATH for float16 and int8: tensor cores are permitted, conversions of tensors are not.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
import weakref
from collections.abc import Callable
from contextlib import ExitStack, suppress
from ctypes import POINTER, byref, c_char_p, c_float, c_int, c_size_t, c_void_p
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar

from im2win.spec.conv2d import Conv2d
from im2win.spec.dtypes import DTYPES, ELEMENT_TYPES

LIBRARY = "libcudnn.so.9"


class CudnnError(RuntimeError):
    """A call that cuDNN refused, a problem that its convolution cannot express, or a missing cuDNN. The message says which."""


class Algorithm(IntEnum):
    """cudnnConvolutionFwdAlgo_t."""

    IMPLICIT_GEMM = 0
    IMPLICIT_PRECOMP_GEMM = 1
    GEMM = 2
    DIRECT = 3
    FFT = 4
    FFT_TILING = 5
    WINOGRAD = 6
    WINOGRAD_NONFUSED = 7


class Math(IntEnum):
    """The values of cudnnMathType_t that are used."""

    DEFAULT = 0
    TENSOR_OP = 1
    FMA = 3


MATHS = {  # by the argument `math`, then by dtype
    name: {dtype: math for dtype in DTYPES if name in ELEMENT_TYPES[dtype].cudnn_maths}
    for name, math in (("fma", Math.FMA), ("tf32", Math.DEFAULT), ("tensor", Math.TENSOR_OP))
}
OUTPUT_DTYPES = {name: "float32" if ELEMENT_TYPES[name].integer else name for name in DTYPES}  # of y, by dtype of x and w
"""Where outputs shall not be int8; see `output_dtype`."""

_FORMATS = {"NCHW": 0, "NHWC": 1}  # cudnnTensorFormat_t
_CROSS_CORRELATION = 1  # cudnnConvolutionMode_t: the filter is not flipped
_NOT_SUPPORTED = 3  # the thousands of every CUDNN_STATUS_NOT_SUPPORTED_*

_KINDS = ("Tensor", "Filter", "Convolution")
_SIGNATURES: dict[str, list[Any]] = {  # arguments, as in cudnn_graph_v9.h, cudnn_ops_v9.h and cudnn_cnn_v9.h; all return a status
    "cudnnCreate": [POINTER(c_void_p)],
    "cudnnDestroy": [c_void_p],
    "cudnnSetStream": [c_void_p, c_void_p],
    **{f"cudnnCreate{kind}Descriptor": [POINTER(c_void_p)] for kind in _KINDS},
    **{f"cudnnDestroy{kind}Descriptor": [c_void_p] for kind in _KINDS},
    "cudnnSetTensor4dDescriptor": [c_void_p] + 6 * [c_int],
    "cudnnSetFilter4dDescriptor": [c_void_p] + 6 * [c_int],
    "cudnnSetConvolution2dDescriptor": [c_void_p] + 8 * [c_int],
    "cudnnSetConvolutionGroupCount": [c_void_p, c_int],
    "cudnnSetConvolutionMathType": [c_void_p, c_int],
    "cudnnGetConvolutionForwardWorkspaceSize": 5 * [c_void_p] + [c_int, POINTER(c_size_t)],
    "cudnnConvolutionForward": 7 * [c_void_p] + [c_int, c_void_p, c_size_t] + 3 * [c_void_p],
}


class _Choice(ctypes.Structure):
    """cudnnConvolutionFwdAlgoPerf_t."""

    _fields_: ClassVar = [
        ("algorithm", c_int), ("status", c_int), ("time", c_float), ("memory", c_size_t), ("determinism", c_int), ("math", c_int),
        ("reserved", 3 * c_int),
    ]  # fmt: skip


@dataclass(frozen=True)
class Forward:
    """One way to run a convolution: names of an `Algorithm` and a `Math`, and the bytes of workspace that it needs."""

    algorithm: str
    math: str
    workspace_bytes: int


@dataclass(frozen=True)
class Arguments:
    """Arguments of the descriptor setters after the descriptor itself, in their order.

    Attributes:
        x, y: (format, type, n, c, h, w) for cudnnSetTensor4dDescriptor.
        w: (type, format, k, c, h, w) for cudnnSetFilter4dDescriptor; c is that of one group.
        convolution: (pad_h, pad_w, stride_h, stride_w, dilation_h, dilation_w, mode, type of the accumulators).
        groups: for cudnnSetConvolutionGroupCount.
        math: for cudnnSetConvolutionMathType.
    """

    x: tuple[int, ...]
    w: tuple[int, ...]
    y: tuple[int, ...]
    convolution: tuple[int, ...]
    groups: int
    math: Math


def find_library() -> ctypes.CDLL | None:
    """cuDNN 9: a loaded one (by `import torch`), else that of the package nvidia-cudnn, else the system's; None without any."""
    if sys.platform != "linux":
        return None
    package = importlib.util.find_spec("nvidia")
    folders = (package.submodule_search_locations or []) if package else []
    wheels = [(str(Path(folder) / "cudnn" / "lib" / LIBRARY), ctypes.DEFAULT_MODE) for folder in folders]
    for name, mode in ((LIBRARY, os.RTLD_NOLOAD), *wheels, (LIBRARY, ctypes.DEFAULT_MODE)):
        with suppress(OSError):
            return ctypes.CDLL(name, mode)
    return None


def supports(conv: Conv2d, math: str | None = None) -> str | None:
    """The reason why cuDNN's plain convolution cannot express `conv` (in this math, where given); None if it can."""
    if math is not None and math not in (allowed := [name for name, dtypes in MATHS.items() if conv.dtype in dtypes]):
        return f"`math` (={math!r}) must be one of {', '.join(allowed)} for {conv.dtype}"
    if conv.bias or conv.residual or conv.activation != "none":
        return "it has an epilogue, and cuDNN's algorithms called by name are the plain convolution"
    if conv.padding[:2] != conv.padding[2:]:
        return f"`padding` (={conv.padding}) must be the same on opposite sides, as cuDNN takes one number an axis"
    if ELEMENT_TYPES[conv.dtype].integer and conv.layout != "NHWC":
        return "cuDNN takes int8 tensors in NHWC, or in blocks of channels (NCHW_VECT_C), not in NCHW"
    if ELEMENT_TYPES[conv.dtype].integer and (conv.in_channels % 4 or conv.out_channels % 4):
        return f"for int8 `in_channels` (={conv.in_channels}) and `out_channels` (={conv.out_channels}) must be multiples of 4"
    return None


def output_dtype(conv: Conv2d) -> str:
    """Element type of y, as cuDNN writes it."""
    return "int8" if conv.out_dtype == "int8" else OUTPUT_DTYPES[conv.dtype]


def arguments(conv: Conv2d, math: Math) -> Arguments:
    """The numbers that describe `conv` to cuDNN.

    Raises:
        CudnnError: cuDNN cannot express it, with the reason of `supports`.
    """
    if (reason := supports(conv)) is not None:
        raise CudnnError(f"cuDNN: {conv}: {reason}.")
    given, result, sums = (ELEMENT_TYPES[name].cudnn for name in (conv.dtype, output_dtype(conv), ELEMENT_TYPES[conv.dtype].sums))
    layout = _FORMATS[conv.layout]
    return Arguments(
        x=(layout, given, conv.batch, conv.in_channels, conv.height, conv.width),
        w=(given, layout, *conv.filter_shape),
        y=(layout, result, conv.batch, conv.out_channels, *conv.output_size),
        convolution=(*conv.padding[:2], *conv.stride, *conv.dilation, _CROSS_CORRELATION, sums),
        groups=conv.groups,
        math=math,
    )


class Cudnn:
    """A cuDNN handle on the calling thread's current CUDA device, for one thread at a time. `close` or a `with` block destroys it.

    Args:
        library: path of cuDNN; None for the one that `find_library` finds.

    Attributes:
        version: of cuDNN, such as "9.19.0".

    Raises:
        CudnnError: there is no cuDNN 9, or it cannot start (no GPU, say).
    """

    def __init__(self, library: ctypes.CDLL | None = None) -> None:
        library = find_library() if library is None else library
        if library is None:
            raise CudnnError(f"{LIBRARY} is not there: pip install nvidia-cudnn-cu13, or import a PyTorch built with CUDA first.")
        self._library = library
        self._functions = {name: _function(library, name, c_int, types) for name, types in _SIGNATURES.items()}
        self._message = _function(library, "cudnnGetErrorString", c_char_p, [c_int])
        number = _function(library, "cudnnGetVersion", c_size_t, [])()
        self.version = f"{number // 10000}.{number // 100 % 100}.{number % 100}"
        self._handle = c_void_p()
        self._do("cudnnCreate", byref(self._handle))

    def __enter__(self) -> Cudnn:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Destroys the handle. Runners of this object raise CudnnError from then on."""
        if self._handle:
            handle = c_void_p(self._handle.value)
            self._handle.value = None  # runners hold this very object
            self._do("cudnnDestroy", handle)

    def set_stream(self, stream: int) -> None:
        """Sets the cudaStream_t for further work, such as `torch.cuda.current_stream().cuda_stream`; 0 is the default stream."""
        self._do("cudnnSetStream", self._handle, c_void_p(stream))

    def plans(self, conv: Conv2d, math: str) -> list[Forward]:
        """Every algorithm that cuDNN accepts for the problem, with unlimited workspace, in the order of `Algorithm`.

        cuDNN accepts a description. An algorithm may still refuse when it first runs, so catch CudnnError there as well.

        Args:
            math: "fma", "tf32" or "tensor", see the module's docstring.

        Raises:
            CudnnError: the problem or the math is not possible (see `supports`), or cuDNN failed with another status than NOT_SUPPORTED.
        """
        if (reason := supports(conv, math)) is not None:
            raise CudnnError(f"cuDNN: {conv}: {reason}.")
        kind, query, found = MATHS[math][conv.dtype], "cudnnGetConvolutionForwardWorkspaceSize", []
        with ExitStack() as stack:
            described = self._describe(stack, arguments(conv, kind))
            for algorithm in Algorithm:
                size = c_size_t()
                status = self._functions[query](self._handle, *described, algorithm, byref(size))
                if status // 1000 != _NOT_SUPPORTED:
                    self._check(status, f"{query} of {algorithm.name}")
                    found.append(Forward(algorithm.name, kind.name, size.value))
        return found

    def choice(self, conv: Conv2d, math: str) -> Forward | None:
        """The algorithm that cuDNN's heuristics select without timing; None if they select none.

        Raises:
            CudnnError: as in `plans`; or this version of cuDNN does not have the function any more.
        """
        if (reason := supports(conv, math)) is not None:
            raise CudnnError(f"cuDNN: {conv}: {reason}.")
        kind, name, count, found = MATHS[math][conv.dtype], "cudnnGetConvolutionForwardAlgorithm_v7", c_int(), (len(Algorithm) * _Choice)()
        if not hasattr(self._library, name):
            raise CudnnError(f"cuDNN {self.version} has no {name}.")
        ask = _function(self._library, name, c_int, 5 * [c_void_p] + [c_int, POINTER(c_int), POINTER(_Choice)])
        with ExitStack() as stack:
            described = self._describe(stack, arguments(conv, kind))
            self._check(ask(self._handle, *described, len(Algorithm), byref(count), found), name)
        best = next((one for one in found[: count.value] if one.status == 0), None)
        return None if best is None else Forward(Algorithm(best.algorithm).name, kind.name, best.memory)

    def runner(
        self, conv: Conv2d, plan: Forward, x_ptr: int, w_ptr: int, y_ptr: int, workspace_ptr: int = 0, scale: float = 1.0
    ) -> Callable[[], None]:
        """A function that enqueues one convolution, y = scale * conv(x, w), on the stream and does not wait for it.

        The descriptors are created once here, so a call is a bare cudnnConvolutionForward. The caller owns the memory behind the pointers.

        Args:
            conv, plan: a problem and one of its `plans`.
            x_ptr: device address of x, of `conv.input_shape`, contiguous.
            w_ptr: of w, **in the layout of x**: [out_channels, in_channels / groups, kernel_h, kernel_w] for NCHW, [out_channels, kernel_h,
                kernel_w, in_channels / groups] for NHWC.
            y_ptr: of y, of `conv.output_shape` and `output_dtype(conv)`; overwritten.
            workspace_ptr: of at least `plan.workspace_bytes` bytes; 0 where none is needed.
            scale: of all channels; rounded to float32.

        Raises:
            CudnnError: now or in a call, with cuDNN's message; or a pointer is missing.
        """
        needed = {"x_ptr": x_ptr, "w_ptr": w_ptr, "y_ptr": y_ptr, "workspace_ptr": workspace_ptr or not plan.workspace_bytes}
        if missing := [name for name, there in needed.items() if not there]:
            raise CudnnError(f"cuDNN: {conv} by {plan}: `{missing[0]}` must be a device address, not 0.")
        with ExitStack() as building:
            x, w, convolution, y = self._describe(building, arguments(conv, Math[plan.math]))
            descriptors = building.pop_all()
        factor, zero = c_float(scale), c_float(0.0)  # scales are float32 for all supported types
        inputs = (self._handle, byref(factor), x, c_void_p(x_ptr), w, c_void_p(w_ptr), convolution, int(Algorithm[plan.algorithm]))
        values = (*inputs, c_void_p(workspace_ptr), c_size_t(plan.workspace_bytes), byref(zero), y, c_void_p(y_ptr))
        forward = self._functions["cudnnConvolutionForward"]

        def call() -> None:
            if status := forward(*values):
                self._check(status, f"cudnnConvolutionForward by {plan.algorithm}")

        weakref.finalize(call, descriptors.close)
        return call

    def _describe(self, stack: ExitStack, values: Arguments) -> tuple[c_void_p, c_void_p, c_void_p, c_void_p]:
        """Descriptors of x, w, the convolution and y, which live until `stack` is closed."""
        x, w, convolution, y = (self._create(stack, kind) for kind in ("Tensor", "Filter", "Convolution", "Tensor"))
        self._do("cudnnSetTensor4dDescriptor", x, *values.x)
        self._do("cudnnSetFilter4dDescriptor", w, *values.w)
        self._do("cudnnSetTensor4dDescriptor", y, *values.y)
        self._do("cudnnSetConvolution2dDescriptor", convolution, *values.convolution)
        self._do("cudnnSetConvolutionGroupCount", convolution, values.groups)
        self._do("cudnnSetConvolutionMathType", convolution, values.math)
        return x, w, convolution, y

    def _create(self, stack: ExitStack, kind: str) -> c_void_p:
        descriptor = c_void_p()
        self._do(f"cudnnCreate{kind}Descriptor", byref(descriptor))
        stack.callback(self._do, f"cudnnDestroy{kind}Descriptor", descriptor)
        return descriptor

    def _do(self, name: str, *values: Any) -> None:
        self._check(self._functions[name](*values), name)

    def _check(self, status: int, call: str) -> None:
        if status:
            raise CudnnError(f"{call}: {self._message(status).decode()} ({status}).")


def _function(library: ctypes.CDLL, name: str, result: Any, types: list[Any]) -> Callable[..., Any]:
    function: Any = getattr(library, name)
    function.restype, function.argtypes = result, types
    return function  # type: ignore[no-any-return]
