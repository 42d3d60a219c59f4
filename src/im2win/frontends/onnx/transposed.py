"""Transposed convolutions as convolutions: an output of stride s is s * s images side by side, each a convolution with some of the taps.

With t = o + begin, where `begin` is the padding, output o of one axis is

    O[o] = sum over j of I[t // s - j] * F[t % s + s * j]

so that all outputs with one phase t % s are a convolution of stride 1 with the taps F[phase], F[phase + s], ... in reverse order. The
phases become output channels of one `Conv2d`, with zeros where a phase has a tap less. `Phases` says where an output lies among them.
Nothing is multiplied by the zeros that the direct definition puts between inputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from im2win.frontends.onnx.graph import Graph, attributes_of
from im2win.frontends.onnx.problems import DTYPES, Unsupported, extents, of_rows
from im2win.spec.conv2d import Conv2d

if TYPE_CHECKING:
    from onnx import NodeProto

Pair = tuple[int, int]
OPERATOR = "ConvTranspose"


@dataclass(frozen=True)
class Phases:
    """Where the elements of a larger image lie in an image with its phases as channels, channel by channel:

        O[n, k, y, x] = P[n, (k * s + (y + b) % s) * s + (x + b) % s, (y + b) // s, (x + b) // s]        s: stride, b: begin, by axis

    `outer` phases precede the channels instead: channel (phase) * K + k, which is ONNX's DepthToSpace in mode DCR.
    """  # fmt: skip

    stride: Pair
    begin: Pair = (0, 0)
    outer: bool = False


@dataclass(frozen=True)
class _Stated:
    """A ConvTranspose node: its attributes, with one row of a 1-D one."""

    kernel: Pair
    stride: Pair
    dilation: Pair
    begin: Pair
    groups: int

    @property
    def taps(self) -> Pair:
        """Taps of a phase."""
        return (-(-self.kernel[0] // self.stride[0]), -(-self.kernel[1] // self.stride[1]))


def _stated(node: NodeProto, filters: tuple[int, ...], line: bool) -> _Stated:
    attributes = of_rows(attributes_of(node)) if line else attributes_of(node)
    if attributes.get("auto_pad", b"NOTSET") not in (b"NOTSET", b"VALID"):
        raise Unsupported(f"its auto_pad {attributes['auto_pad'].decode()!r} is not supported for {OPERATOR}; pads are")
    (down, across), (rows, columns) = attributes.get("strides", (1, 1)), attributes.get("dilations", (1, 1))
    if (down > 1 and rows > 1) or (across > 1 and columns > 1):
        raise Unsupported(f"its stride {[down, across]} and dilation {[rows, columns]} are both above 1")
    top, left = attributes.get("pads", (0, 0, 0, 0))[:2]
    return _Stated((filters[2], filters[3]), (down, across), (rows, columns), (top, left), attributes.get("group", 1))


def phases_of(node: NodeProto, filters: tuple[int, ...]) -> Phases:
    """Where the outputs of a ConvTranspose node lie in those of its `problem_of`; `filters` is the shape of its filter."""
    line = len(filters) == 3
    stated = _stated(node, (*filters[:2], 1, filters[2]) if line else filters, line)
    begin = tuple(b % s for b, s in zip(stated.begin, stated.stride, strict=True))
    return Phases(stated.stride, (begin[0], begin[1]))


def problem_of(onnx: ModuleType, graph: Graph, node: NodeProto, batch: int) -> Conv2d:
    """The convolution that computes the phases of a ConvTranspose node.

    Raises:
        Unsupported: the node is no such convolution; the message says why.
    """
    data, weight = node.input[:2]
    filters = tuple(size for size in extents(graph, "filter", weight) if isinstance(size, int))
    images, channels = extents(graph, "input", data)[:2]
    sides = (("input", data), ("output", node.output[0]))
    sizes, outputs = ([size for size in extents(graph, role, name)[2:] if isinstance(size, int)] for role, name in sides)
    if len(filters) != 4 or len(sizes) != 2 or len(outputs) != 2:
        raise Unsupported("the shapes of its filter, input and output must be fixed")
    stated = _stated(node, filters, len(graph.shapes.get(data) or ()) == 3)
    if isinstance(channels, int) and channels != filters[0]:
        raise Unsupported(f"its input has {channels} channels and its filter {filters[0]}")
    dtype = onnx.TensorProto.DataType.Name(graph.types.get(data) or graph.types.get(weight, 0))
    if dtype not in DTYPES:
        raise Unsupported(f"dtype {dtype.lower()} is not supported; only {' and '.join(DTYPES.values())} are")
    before, after = [], []
    for size, made, taps, stride, dilation, begin in zip(
        sizes, outputs, stated.taps, stated.stride, stated.dilation, stated.begin, strict=True
    ):
        first, last, reach = begin // stride, (made - 1 + begin) // stride, dilation * (taps - 1)
        before.append(reach - first)
        after.append(max(0, last - first + 1 + reach - size - before[-1]))
    if min(before) < 0:
        raise Unsupported(f"its padding {list(stated.begin)} is larger than its kernel {list(stated.kernel)} allows")
    return Conv2d(
        images if isinstance(images, int) else batch,
        filters[0],
        sizes[0],
        sizes[1],
        filters[1] * stated.groups * stated.stride[0] * stated.stride[1],
        stated.taps,
        padding=(before[0], before[1], after[0], after[1]),
        dilation=stated.dilation,
        groups=stated.groups,
        dtype=DTYPES[dtype],
        bias=len(node.input) > 2 and bool(node.input[2]),
    )


def phase_filter(node: NodeProto, weight: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The filter of `problem_of`, [K * s * s][C / groups][taps], from that of the node, [C][K / groups][kernel]."""
    line = weight.ndim == 3
    stated = _stated(node, (*weight.shape[:2], 1, weight.shape[2]) if line else weight.shape, line)
    weight = weight.reshape(*weight.shape[:2], *stated.kernel)
    channels, each = weight.shape[:2]
    (rows, cols), (down, across), groups = stated.taps, stated.stride, stated.groups
    padded = np.zeros((channels, each, rows * down, cols * across), weight.dtype)
    padded[:, :, : weight.shape[2], : weight.shape[3]] = weight
    taps = padded.reshape(groups, channels // groups, each, rows, down, cols, across)[:, :, :, ::-1, :, ::-1, :]
    return np.ascontiguousarray(taps.transpose(0, 2, 4, 6, 1, 3, 5)).reshape(groups * each * down * across, channels // groups, rows, cols)
