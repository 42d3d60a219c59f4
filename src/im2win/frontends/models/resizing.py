"""Resize of images by ONNX's modes "nearest" and "linear" on CPUs, one output row at a time.

Where an output lies in the input depends on row and column alone. It is computed here, in float32 as ONNX Runtime does, and the kernel has
only to interpolate between two input rows, into a line in the first-level cache, and then between two elements of the line:

    line[k] = I[y0, k] + (I[y0 + 1, k] - I[y0, k]) * wy        O[m, x] = line[x0] + (line[x0 + 1] - line[x0]) * wx

Where an image grows by a whole factor, x0 and wx repeat with every input column. They are then constants of a loop over input columns,
which LLVM vectorises. Otherwise they are read from tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from im2win.frontends.models.program import Shape
from im2win.frontends.models.rows import OPAQUE, SCHEDULED
from im2win.frontends.onnx.graph import attributes_of

if TYPE_CHECKING:
    from onnx import NodeProto

    from im2win.frontends.models.source import Source

_FLOAT = 1  # onnx.TensorProto.FLOAT
_MOST = 8  # times that an image grows in a loop with constants
Numbers = npt.NDArray[Any]


@dataclass(frozen=True)
class Axis:
    """Where outputs lie along an axis: between input `first`, from -1 on, and the next one, at `weight` from 0 to 1. Borders repeat."""

    first: tuple[int, ...]
    weight: tuple[float, ...]

    def repeats(self, size: int) -> tuple[tuple[int, float], ...] | None:
        """(first, weight) for the outputs of input 0, if those of every input are as many and lie alike; else None."""
        times, rest = divmod(len(self.first), size)
        if rest or not 1 <= times <= _MOST:
            return None
        first = np.array(self.first).reshape(size, times) - np.arange(size)[:, None]
        weight = np.array(self.weight).reshape(size, times)
        if (first != first[0]).any() or np.abs(weight - weight[0]).max() > 1e-5:
            return None
        return tuple(zip(map(int, first[0]), map(float, weight[0]), strict=True))


@dataclass(frozen=True)
class Resize:
    """A resizing of the images [N, C, H, W] of float32."""

    source: str
    output: str
    linear: bool
    rows: Axis
    columns: Axis


def resize_of(source: Source, node: NodeProto) -> Resize | None:
    """The resizing of a node; None for other nodes, and for resizings that TVM's importer has to import."""
    shape, output = source.graph.shapes.get(node.input[0] if node.input else ""), source.graph.shapes.get(node.output[0])
    if node.op_type != "Resize" or source.opset < 11 or source.graph.types.get(node.input[0]) != _FLOAT or shape is None or output is None:
        return None
    sizes = [size for size in (*shape, *output) if isinstance(size, int)]
    stated = {"mode": b"nearest", "coordinate_transformation_mode": b"half_pixel", "nearest_mode": b"round_prefer_floor"}
    stated |= attributes_of(node)
    mode, place = stated["mode"].decode(), stated["coordinate_transformation_mode"].decode()
    if len(sizes) != 8 or sizes[:2] != sizes[4:6] or mode not in ("nearest", "linear") or place not in _PLACES:
        return None
    if stated.get("antialias", 0) or "axes" in stated or stated.get("keep_aspect_ratio_policy", b"stretch") != b"stretch":
        return None
    inputs = [*node.input, "", "", ""]
    scales = source.constants.get(inputs[2])
    given = scales[2:] if scales is not None and scales.size == 4 else [None, None]
    axes = [
        _axis(size, made, scale, place, stated["nearest_mode"].decode() if mode == "nearest" else None)
        for size, made, scale in zip(sizes[2:4], sizes[6:8], given, strict=True)
    ]
    return Resize(node.input[0], node.output[0], mode == "linear", axes[0], axes[1])


def _half_pixel(x: Numbers, scale: Any, size: int, made: int) -> Numbers:
    return np.asarray((x + np.float32(0.5)) / scale - np.float32(0.5))


def _corners(x: Numbers, scale: Any, size: int, made: int) -> Numbers:
    return x * np.float32(size - 1) / np.float32(made - 1) if made > 1 else 0 * x


_PLACES: Mapping[str, Any] = {
    "half_pixel": _half_pixel,
    "pytorch_half_pixel": lambda x, scale, size, made: _half_pixel(x, scale, size, made) if made > 1 else 0 * x,
    "asymmetric": lambda x, scale, size, made: x / scale,
    "align_corners": _corners,
}
_ROUNDINGS: Mapping[str, Any] = {
    "round_prefer_floor": lambda x: np.ceil(x - np.float32(0.5)),
    "round_prefer_ceil": lambda x: np.floor(x + np.float32(0.5)),
    "floor": np.floor,
    "ceil": np.ceil,
}


def _axis(size: int, made: int, scale: float | None, place: str, rounding: str | None) -> Axis:
    scale = np.float32(made / size if scale is None else scale)
    x = _PLACES[place](np.arange(made, dtype=np.float32), scale, size, made).astype(np.float32)
    if rounding is not None:
        first = np.clip(_ROUNDINGS[rounding](x), 0, size - 1)
        return Axis(tuple(map(int, first)), (0.0,) * made)
    x = np.clip(x, -1, size - 1)
    first = np.floor(x)
    return Axis(tuple(map(int, first)), tuple(map(float, x - first)))


def tables(one: Resize) -> list[Numbers]:
    """The constants that the kernel reads: first and weight of the rows, then of the columns."""
    return [
        np.array(value, dtype)
        for axis in (one.rows, one.columns)
        for value, dtype in ((axis.first, np.int32), (axis.weight, np.float32))
    ]


def resize(shape: Shape, output: Shape, one: Resize) -> tirx.PrimFunc:
    """The function (data, tables, out) of a resizing."""
    (height, width), (out_h, out_w), planes = shape[2:], output[2:], shape[0] * shape[1]
    repeated = one.columns.repeats(width)
    with IRBuilder() as builder, T.prim_func(s_tir=True):
        T.func_name("resize")
        T.func_attr({"tirx.noalias": True, SCHEDULED: True, "op_pattern": OPAQUE})
        data = T.arg("data", T.buffer((planes, height, width), "float32"))
        y_first, y_weight, x_first, x_weight = (
            T.arg(name, T.buffer((size,), dtype))
            for name, size, dtype in (
                ("y_first", out_h, "int32"), ("y_weight", out_h, "float32"), ("x_first", out_w, "int32"), ("x_weight", out_w, "float32"),
            )
        )  # fmt: skip
        out = T.arg("out", T.buffer((planes, out_h, out_w), "float32"))
        with T.parallel(planes) as plane:
            line = T.alloc_buffer((width + 2,), "float32")  # with the first and the last element twice
            with T.serial(out_h) as m:
                above, below = tirx.max(y_first[m], 0), tirx.min(y_first[m] + 1, height - 1)
                with T.serial(width) as k:
                    value = _between(data[plane, above, k], data[plane, below, k], y_weight[m]) if one.linear else data[plane, above, k]
                    T.buffer_store(line, value, [k + 1])
                T.buffer_store(line, line[1], [0])
                T.buffer_store(line, line[width], [width + 1])
                if repeated is None:
                    with T.serial(out_w) as x:
                        T.buffer_store(out, _element(line, x_first[x] + 1, x_weight[x], one.linear), [plane, m, x])
                else:
                    with T.serial(width) as k:
                        for place, (first, weight) in enumerate(repeated):
                            value = _element(line, k + (first + 1), tirx.const(weight, "float32"), one.linear)
                            T.buffer_store(out, value, [plane, m, k * len(repeated) + place])
    return builder.get()


def _element(line: Any, place: Any, weight: Any, linear: bool) -> Any:
    return _between(line[place], line[place + 1], weight) if linear else line[place]


def _between(one: Any, other: Any, weight: Any) -> Any:
    return one + (other - one) * weight
