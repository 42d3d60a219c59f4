"""The epilogue of multistage kernels: bias, scale, residual, activation, and stores as wide as the layout allows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import tirx
from tvm.tirx.script import builder as T

from im2win.schedules.cuda.epilogue.requantise import added, float8_value, multiplied, scaled, store_bytes
from im2win.schedules.cuda.mma.fma import Run
from im2win.schedules.cuda.primitives import CHUNK, Expr, local
from im2win.schedules.cuda.tiles.multistage import MultistageTile
from im2win.spec import activations
from im2win.spec.conv2d import Conv2d
from im2win.spec.dtypes import ELEMENT_TYPES


def run_length(conv: Conv2d, tile: MultistageTile, neighbours: int) -> int:
    """Number of outputs that one store takes, at most 16 bytes.

    Args:
        neighbours: number of neighbouring windows, from a multiple of it on, that are neighbours in the output.
    """
    most = CHUNK // conv.out_itemsize
    if tile.product == "fma":
        return 4 if conv.layout == "NHWC" and _channels_allow(conv, 4) else 1
    rows, cols = (tile.warp_n // 64, tile.warp_m // 8) if tile.warpgroup else (tile.warp_m // 16, tile.warp_n // 8)
    tiles = rows if (conv.layout == "NHWC") != tile.warpgroup else cols  # tiles of accumulators along which outputs are neighbours
    wide = tile.outputs if tile.in_rows and conv.layout == "NCHW" else 1  # neighbouring outputs of an accumulator
    for run in (16, 8, 4, 2):
        aligned = _channels_allow(conv, run) if conv.layout == "NHWC" else neighbours % run == 0
        if run <= most and aligned and run % wide == 0 and tiles % max(run // wide // 2, 1) == 0:
            return run
    return 1


def _channels_allow(conv: Conv2d, run: int) -> bool:
    return conv.out_channels // conv.groups % run == 0


class DeviceExpressions:
    """An `im2win.spec.arithmetic.Arithmetic` over TIR expressions of a type: CUDA's functions, with its fast exponential in float32."""

    def __init__(self, dtype: str) -> None:
        self._dtype = dtype

    def _const(self, value: Expr) -> Expr:
        return tirx.const(value, self._dtype) if isinstance(value, int | float) else value

    def max(self, value: Expr, other: Expr) -> Expr:
        return T.max(self._const(value), self._const(other))

    def min(self, value: Expr, other: Expr) -> Expr:
        return T.min(self._const(value), self._const(other))

    def exp(self, value: Expr) -> Expr:
        return T.exp(value)

    def tanh(self, value: Expr) -> Expr:
        return T.tanh(value)

    def erf(self, value: Expr) -> Expr:
        return T.erf(value)


def activated(activation: str, value: Expr, dtype: str) -> Expr:
    """An activation of a value, computed in `dtype`."""
    return activations.apply(activation, DeviceExpressions(dtype), value)


def value_type(conv: Conv2d) -> str:
    """The type of `finished` values: the output's, or float32 for outputs of one byte, which are converted when they are stored."""
    return "float32" if ELEMENT_TYPES[conv.out_dtype].itemsize == 1 else conv.out_dtype


def finished(conv: Conv2d, dtype: str, tensors: dict[str, Any], value: Expr, channel: Expr, at: Expr) -> Expr:
    """The output for an accumulator: bias, scale, residual and activation applied; see `Conv2d`.

    Args:
        dtype: type of the accumulator. channel: output channel. at: index of the element in the flat output.
    """
    if ELEMENT_TYPES[conv.dtype].scaled:
        return _of_scaled(conv, tensors, value, channel, at)
    if conv.bias:
        value = value + tensors["bias"][channel].astype(dtype)
    if conv.requantised:
        value, dtype = scaled(value, tensors["scale"][channel]), "float32"
    if conv.residual:
        other = tensors["residual"][at].astype(dtype)
        value = added(value, other) if conv.requantised else value + other
    return activated(conv.activation, value, dtype).astype(value_type(conv))


def _of_scaled(conv: Conv2d, tensors: dict[str, Any], value: Expr, channel: Expr, at: Expr) -> Expr:
    """`finished` for a layer that scales its sums first."""
    value = multiplied(value, tensors["scale"][channel])
    if conv.bias:
        value = added(value, tensors["bias"][channel])
    if conv.residual:
        other = tensors["residual"][at]
        value = added(value, float8_value(other) if ELEMENT_TYPES[conv.out_dtype].scaled else other.astype("float32"))
    return activated(conv.activation, value, "float32").astype(value_type(conv))


class Epilogue:
    """Writes the accumulators of a thread block.

    Args:
        tensors: flat views: "output", and where the problem has them "bias" and "scale" [out_channels] and "residual".
        operand: maps windows of the block to the output.
        first: the block's first channel in its group. group: index of the group.
    """

    def __init__(self, conv: Conv2d, tile: MultistageTile, tensors: dict[str, Any], operand: Any, first: Expr, group: Expr) -> None:
        self._conv, self._tile, self._tensors, self._operand = conv, tile, tensors, operand
        self._first, self._group = first, group
        self._run = run_length(conv, tile, operand.run(conv, tile))
        self._values = local("values", (self._run,), value_type(conv))

    def write(self, product: Any) -> None:
        """Emits the stores."""
        product.each_window(self._window)

    def _counted(self) -> int:
        """Channels among which a block's are counted: those of a group."""
        return self._conv.out_channels // self._conv.groups

    def _window(self, window: Expr, runs: Callable[[Run], None]) -> None:
        conv, (out_h, out_w) = self._conv, self._conv.output_size
        n, m, x, conditions = self._operand.output(window)
        if conv.layout == "NCHW":
            start, stride = n * (conv.out_channels * out_h * out_w) + m * out_w + x, out_h * out_w
        else:
            start, stride = ((n * out_h + m) * out_w + x) * conv.out_channels, 1
        counted = self._counted()

        def take(channel: Expr, sums: list[Any]) -> None:
            j = self._first + channel
            inside = [j < counted] if counted % self._tile.block_m else []
            self._guarded(inside, lambda: self._store(start + (self._group * counted + j) * stride, self._group * counted + j, sums))

        self._guarded(conditions, lambda: runs(take))

    @staticmethod
    def _guarded(conditions: list[Expr], body: Callable[[], None]) -> None:
        if conditions:
            with T.If(tirx.all(*conditions)), T.Then():
                body()
        else:
            body()

    def _store(self, at: Expr, channel: Expr, sums: list[Any]) -> None:
        """Emits the store of one run of neighbouring outputs, from element `at` on."""
        conv, dtype, tensors = self._conv, self._tile.sum_dtype, self._tensors
        for e, value in enumerate(sums):
            of = channel + (e if conv.layout == "NHWC" else 0)
            T.buffer_store(self._values, finished(conv, dtype, tensors, value, of, at + e), [e])
        if ELEMENT_TYPES[conv.out_dtype].itemsize == 1:
            store_bytes(conv.out_dtype, tensors["output"], at, self._values, len(sums))
        elif len(sums) == 1:
            T.buffer_store(tensors["output"], self._values[0], [at])
        else:
            with T.vectorized(len(sums)) as e:
                T.buffer_store(tensors["output"], self._values[e], [at + e])
