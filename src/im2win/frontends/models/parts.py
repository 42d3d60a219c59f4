"""Splits a model into parts: convolutions and products with their epilogues, views, concatenations, and the rest, which TVM compiles."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from im2win.frontends.models.resizing import Resize, resize_of
from im2win.frontends.models.tables import Table, table_of
from im2win.frontends.onnx.graph import attributes_of, name_of
from im2win.frontends.onnx.layers import Fused, Skipped, fusions, import_onnx
from im2win.frontends.onnx.quantised import DEQUANTIZE, filters_and_bias
from im2win.frontends.onnx.transposed import OPERATOR, Phases, phase_filter, phases_of
from im2win.spec.conv2d import Conv2d

if TYPE_CHECKING:
    from onnx import NodeProto

    from im2win.frontends.models.source import Array, Source

_FLOAT, _BYTES = 1, {2: "uint8", 3: "int8"}  # of onnx.TensorProto
_VIEWS = ("Reshape", "Flatten", "Squeeze", "Unsqueeze")


@dataclass(frozen=True)
class Convolution:
    """A convolution or product with its epilogue: `output = conv(data, filter, bias, scale, residual)`.

    Scalings are folded into filters and bias.

    Attributes:
        name: of the node that it comes from.
    """

    name: str
    conv: Conv2d
    data: str
    residual: str | None
    output: str
    filter: Array
    bias: Array | None
    scale: Array | None = None


@dataclass(frozen=True)
class View:
    """The same elements with another shape."""

    source: str
    output: str


@dataclass(frozen=True)
class Cut:
    """Elements that lie side by side in a tensor, from element `begin` on: an output of Split or Slice."""

    source: str
    output: str
    begin: int


@dataclass(frozen=True)
class Join:
    """A concatenation along an axis."""

    sources: tuple[str, ...]
    output: str
    axis: int


@dataclass(frozen=True)
class Response:
    """ONNX's LRN: each element over (bias + alpha / size * sum of the squares of the `size` nearest channels) ** beta."""

    source: str
    output: str
    size: int
    alpha: float
    beta: float
    bias: float


@dataclass(frozen=True)
class Pool:
    """Maximum or average pooling. An average divides by the elements inside the input, or by the whole window with `whole`.

    Attributes:
        begin: padding above and on the left; padding below and on the right follows from the output's shape.
        dtype: of both tensors; maxima may be those of uint8 and int8.
    """

    source: str
    output: str
    kind: Literal["max", "mean"]
    kernel: tuple[int, int]
    stride: tuple[int, int]
    begin: tuple[int, int]
    whole: bool
    dtype: str = "float32"


@dataclass(frozen=True)
class Interleave:
    """A larger image from its phases, which lie side by side as channels: behind a transposed convolution, and DepthToSpace.

    Attributes:
        shape: of the source.
    """

    source: str
    output: str
    shape: tuple[int, ...]
    phases: Phases


@dataclass(frozen=True)
class Parts:
    """The parts of a model.

    Attributes:
        rest: indices of the nodes that TVM compiles.
        skipped: convolutions among them, with the reason.
    """

    convolutions: tuple[Convolution, ...]
    views: tuple[View, ...]
    cuts: tuple[Cut, ...]
    joins: tuple[Join, ...]
    responses: tuple[Response, ...]
    pools: tuple[Pool, ...]
    interleaves: tuple[Interleave, ...]
    resizes: tuple[Resize, ...]
    tables: tuple[Table, ...]
    rest: tuple[int, ...]
    skipped: tuple[Skipped, ...]


def take_apart(
    source: Source, batch: int, *, lines: bool = True, resizes: bool = True, alignment: int = 1, integers: bool = True, vectors: bool = True
) -> Parts:
    """Splits a model into parts. Every node is in exactly one part.

    Args:
        lines: without it TVM compiles 1-D and transposed convolutions, DepthToSpace, Split and Slice.
        resizes: without it TVM compiles Resize.
        alignment: bytes to which tensors must be aligned.
        integers: convolutions, products, maxima and functions of 8 bits of quantised models compute with integers.
        vectors: whether tables of bytes are looked up a vector at a time.
    """
    graph = source.graph
    found, left = fusions(graph, batch, lines=lines, integers=integers)
    skipped = [entry for _, entry in left]
    taken = {index for index, node in enumerate(graph.nodes) if node.output and node.output[0] in source.constants}
    taken |= {index for index, node in enumerate(graph.nodes) if node.op_type == "Constant"}
    convolutions: list[Convolution] = []
    interleaves: list[Interleave] = []
    for index, one in sorted(found.items()):
        node = graph.nodes[index]
        if node.input[1] not in source.constants:
            skipped.append(Skipped(name_of(node), "its filters are no constants"))
            continue
        if one.conv.dtype != "float32" and one.integers is None:
            skipped.append(Skipped(name_of(node), f"its dtype {one.conv.dtype} is not float32"))
            continue
        convolutions.append(folded(source, node, one))
        if node.op_type == OPERATOR:
            phases = phases_of(node, source.constants[node.input[1]].shape)
            interleaves.append(Interleave(convolutions[-1].output, one.tail.output, one.conv.output_shape, phases))
        taken |= {index, *one.tail.nodes, *one.ahead}
    taken |= _unread(source, convolutions, taken)
    views: list[View] = []
    cuts: list[Cut] = []
    joins: list[Join] = []
    responses: list[Response] = []
    pools: list[Pool] = []
    sizes: list[Resize] = []
    tables: list[Table] = []
    for index, node in reversed(list(enumerate(graph.nodes))):
        if integers and index not in taken and (made := table_of(source, node, taken, vectors=vectors)) is not None:
            tables.append(made[0])
            taken |= made[1]
    for index, node in enumerate(graph.nodes):
        if index in taken or node.domain not in ("", "ai.onnx"):
            continue
        if node.op_type in _VIEWS:
            views.append(View(node.input[0], node.output[0]))
            taken.add(index)
        elif lines and (parts := _cuts(source, node, alignment)):
            cuts += parts
            taken.add(index)
        elif node.op_type == "Concat":
            axis = attributes_of(node)["axis"] % len(graph.shapes[node.output[0]])
            joins.append(Join(tuple(node.input), node.output[0], axis))
            taken.add(index)
        elif node.op_type == "LRN" and graph.types.get(node.input[0]) == _FLOAT:
            stated = {"alpha": 1e-4, "beta": 0.75, "bias": 1.0, **attributes_of(node)}
            responses.append(Response(node.input[0], node.output[0], **stated))
            taken.add(index)
        elif resizes and (resize := resize_of(source, node)) is not None:
            sizes.append(resize)
            taken.add(index)
        elif lines and (interleave := _interleave(source, node)) is not None:
            interleaves.append(interleave)
            taken.add(index)
        elif (pool := _pool(source, node, integers)) is not None:
            pools.append(pool)
            taken.add(index)
    rest = tuple(index for index in range(len(graph.nodes)) if index not in taken)
    others = tuple(views), tuple(cuts), tuple(joins), tuple(responses), tuple(pools), tuple(interleaves), tuple(sizes), tuple(tables)
    return Parts(tuple(convolutions), *others, rest, tuple(skipped))


def _unread(source: Source, convolutions: list[Convolution], taken: set[int]) -> set[int]:
    """The DequantizeLinear nodes whose readers are all parts of convolutions of integers."""
    read = {name for one in convolutions for name in (one.data, one.residual) if name} | {one.name for one in source.outputs}
    read |= {name for index, node in enumerate(source.graph.nodes) if index not in taken for name in node.input}
    nodes = enumerate(source.graph.nodes)
    return {index for index, node in nodes if node.op_type == DEQUANTIZE and not read & set(node.output)}


def _cuts(source: Source, node: NodeProto, alignment: int) -> list[Cut]:
    """The outputs of a Split or Slice if they are whole ranges of its input; else none."""
    if node.op_type not in ("Split", "Slice") or node.input[0] in source.constants or any(not name for name in node.output):
        return []
    shape = [int(size) for size in source.graph.shapes.get(node.input[0]) or () if isinstance(size, int)]
    starts = dict.fromkeys(range(len(shape)), 0)
    cuts: list[Cut] = []
    if node.op_type == "Slice":
        first, _, axes, steps = (source.constants.get(name) for name in [*node.input[1:], "", "", ""][:4])
        computed = any(name and name not in source.constants for name in node.input[3:])  # axes or steps
        if first is None or computed or (steps is not None and (steps != 1).any()):
            return []
        for place, start in zip(range(first.size) if axes is None else axes, first, strict=True):
            size = shape[place]
            starts[int(place) % len(shape)] = min(max(int(start) + (size if start < 0 else 0), 0), size)
    axis = int(attributes_of(node).get("axis", 0)) % max(len(shape), 1)
    for output in node.output:
        made = [int(size) for size in source.graph.shapes.get(output) or () if isinstance(size, int)]
        if len(made) != len(shape) or not shape:
            return []
        split = next((place for place, size in enumerate(made) if size > 1), len(shape) - 1)
        begin = sum(starts[place] * math.prod(shape[place + 1 :]) for place in starts)
        if made[split + 1 :] != shape[split + 1 :] or begin * _item(source, node.input[0]) % alignment:
            return []
        cuts.append(Cut(node.input[0], output, begin))
        starts[axis] += made[axis]
    return cuts


def _item(source: Source, name: str) -> int:
    """Bytes of an element."""
    return int(import_onnx().helper.tensor_dtype_to_np_dtype(source.graph.types[name]).itemsize)


def _interleave(source: Source, node: NodeProto) -> Interleave | None:
    """A DepthToSpace of float32 images; None for any other node."""
    shape = source.graph.shapes.get(node.input[0]) if node.op_type == "DepthToSpace" else None
    if shape is None or not all(isinstance(size, int) for size in shape) or source.graph.types.get(node.input[0]) != _FLOAT:
        return None
    stated = attributes_of(node)
    size = stated["blocksize"]
    phases = Phases((size, size), outer=stated.get("mode", b"DCR") == b"DCR")
    return Interleave(node.input[0], node.output[0], tuple(int(one) for one in shape), phases)


def _pool(source: Source, node: NodeProto, integers: bool) -> Pool | None:
    """The pooling of a node, of float32 or also of maxima of `integers` of 8 bits; None if TVM's importer has to import it."""
    stated, shapes = attributes_of(node), source.graph.shapes
    shape, output = shapes.get(node.input[0]) if node.input else None, shapes.get(node.output[0])
    if node.op_type not in ("MaxPool", "AveragePool"):
        return None
    dtype = {_FLOAT: "float32", **(_BYTES if integers and node.op_type == "MaxPool" else {})}.get(source.graph.types.get(node.input[0], 0))
    if dtype is None:
        return None
    if shape is None or output is None or len(shape) != 4 or len(list(filter(None, node.output))) != 1:
        return None
    mean, mode = node.op_type == "AveragePool", stated.get("auto_pad", b"NOTSET")
    if any(one != 1 for one in stated.get("dilations", [])) or (mean and stated.get("ceil_mode", 0)):
        return None
    kernel, stride = stated["kernel_shape"], stated.get("strides", [1, 1])
    begin = stated.get("pads", [0, 0])[:2] if mode == b"NOTSET" else [0, 0]
    if mode in (b"SAME_UPPER", b"SAME_LOWER"):
        missing = [max((int(output[2 + i]) - 1) * stride[i] + kernel[i] - int(shape[2 + i]), 0) for i in (0, 1)]
        begin = [(total + (mode == b"SAME_LOWER")) // 2 for total in missing]
    whole = bool(stated.get("count_include_pad", 0))
    sizes = [(int(pair[0]), int(pair[1])) for pair in (kernel, stride, begin)]
    return Pool(node.input[0], node.output[0], "mean" if mean else "max", sizes[0], sizes[1], sizes[2], whole, dtype)


def folded(source: Source, node: NodeProto, one: Fused) -> Convolution:
    """The filters of a Conv, ConvTranspose, Gemm or MatMul with all scalings of its output folded in, in float64; or its integers."""
    if one.integers is not None:
        filters, sums = filters_and_bias(source.graph, node, one.integers, one.conv)
        residual, scale = one.integers.residual or one.tail.residual, one.integers.scale if one.conv.requantised else None
        return Convolution(name_of(node), one.conv, one.data, residual, one.tail.output, filters, sums, scale)
    weight = source.constants[node.input[1]].astype(np.float64)
    phases = 1
    if node.op_type == OPERATOR:
        phases = math.prod(phases_of(node, weight.shape).stride)
        weight = phase_filter(node, weight)
    bias = source.constants[node.input[2]].astype(np.float64) if len(node.input) > 2 and node.input[2] else None
    channels = one.conv.out_channels // phases
    if "Conv" not in node.op_type:
        attributes = attributes_of(node)
        weight = (weight if attributes.get("transB", 0) else weight.T) * attributes.get("alpha", 1.0)
        bias = None if bias is None else bias * attributes.get("beta", 1.0)
    shift = np.zeros(channels) if bias is None else np.broadcast_to(bias.reshape(-1), channels).copy()
    scale = np.ones(channels)
    value = node.output[0]
    for index in one.tail.scalings:
        behind = source.graph.nodes[index]
        value = value if value in behind.input else next(name for name in behind.input if name not in source.constants)
        factor, term = scaling(source, behind, value, channels)
        scale, shift = scale * factor, shift * factor + term
        value = behind.output[0]
    scale, shift = np.repeat(scale, phases), np.repeat(shift, phases)
    weight = (weight.reshape(one.conv.filter_shape) * scale.reshape(-1, 1, 1, 1)).astype(np.float32)
    return Convolution(
        name_of(node),
        one.conv,
        one.data,
        one.tail.residual,
        f"{one.tail.output}/phases" if node.op_type == OPERATOR else one.tail.output,
        weight,
        shift.astype(np.float32) if one.conv.bias else None,
    )


def scaling(source: Source, node: NodeProto, value: str, channels: int) -> tuple[Array, Array]:
    """Factor and term of each channel that a scaling node multiplies by and adds, in float64; see `frontends.onnx.epilogues.scales`."""
    if node.op_type == "BatchNormalization":
        gamma, beta, mean, variance = (source.constants[name].astype(np.float64).reshape(-1) for name in node.input[1:5])
        factor = gamma / np.sqrt(variance + attributes_of(node).get("epsilon", 1e-5))
        return factor, beta - mean * factor
    other = node.input[1] if node.input[0] == value else node.input[0]
    constant = np.broadcast_to(source.constants[other].astype(np.float64).reshape(-1), channels)
    if node.op_type in ("Add", "Sub"):
        return np.ones(channels), constant if node.op_type == "Add" else -constant
    return constant if node.op_type == "Mul" else 1 / constant, np.zeros(channels)
