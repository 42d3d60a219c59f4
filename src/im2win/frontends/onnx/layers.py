"""Lists the convolution layers of an ONNX model as distinct problems with their counts.

It reads shapes only, never weights, so a file whose external weights are missing works too. The package `onnx` is imported inside
functions, so that im2win itself does not need it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

from im2win.frontends.onnx.epilogues import Tail, padding_before, tail
from im2win.frontends.onnx.graph import Graph, Shape, attributes_of, name_of, subgraphs
from im2win.frontends.onnx.shapes import infer
from im2win.spec.conv2d import Conv2d, ConvError, Padding
from im2win.spec.dtypes import ELEMENT_TYPES
from im2win.spec.suites import Layer

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto, NodeProto

_DTYPES = {row.onnx: name for name, row in ELEMENT_TYPES.items() if row.onnx}
_AUTO_PAD: dict[str, Literal["same", "valid"] | None] = {"NOTSET": None, "VALID": "valid", "SAME_UPPER": "same", "SAME_LOWER": "same"}

_NOT_WHOLE = "layers_of: `source` (={label}) must be a whole ONNX model; it is of another format or cut short."


class ModelError(ValueError):
    """A model that cannot be read. The message names the argument, its value and the rule."""


@dataclass(frozen=True)
class Skipped:
    """A convolution that is not a `Conv2d`, and the reason."""

    name: str
    reason: str


@dataclass(frozen=True)
class ModelLayers:
    """Result of `layers_of`: distinct layers in graph order, and the skipped convolutions. Iterates over the layers."""

    layers: tuple[Layer, ...]
    skipped: tuple[Skipped, ...] = ()

    def __iter__(self) -> Iterator[Layer]:
        return iter(self.layers)

    def __len__(self) -> int:
        return len(self.layers)


@dataclass(frozen=True)
class Fused:
    """A convolution or a product of a graph, as the problem that it becomes together with the nodes after it and a Pad before it.

    Attributes:
        data: the value that it reads.
        ahead: index of the Pad, if there is one.
    """

    conv: Conv2d
    tail: Tail
    data: str
    ahead: tuple[int, ...] = ()


def layers_of(
    source: str | os.PathLike[str] | ModelProto, batch: int | None = None, *, epilogues: bool = False, products: bool = False
) -> ModelLayers:
    """Every distinct convolution of an ONNX model with its count, named after the first node that has it.

    A 1-D convolution is a 2-D one of images with one row. Convolutions over more dimensions, with a dynamic height or width, another dtype
    than float32 and float16, another operator than Conv, or inside a subgraph (If, Loop, Scan) are returned in `skipped` with the reason.

    Args:
        source: path of a binary ONNX file, or a loaded model (not changed).
        batch: images in the model's input. Default: the model's own, 1 where it is symbolic. If it is given and the model has a fixed batch
            b, the batch of each convolution is scaled by batch / b.
        epilogues: add to each convolution what can be fused with it: BatchNormalization and other scalings by channel (folded: a bias), an
            Add of a tensor of the same shape (residual), an activation of `im2win.spec.activations.ACTIVATIONS`, as one operator or as
            several nodes, and a Pad with zeros before it. A node is fused only if no other node reads the value in between. Default: the
            plain convolution with its own bias.
        products: include Gemm and MatMul with a fixed matrix, as 1x1 convolutions in NHWC: rows are the pixels of one image. With both
            options these are the layers that `im2win.compile_model` looks up.

    Raises:
        ModelError: the file is missing, not ONNX or truncated, shape inference fails, it has no convolution, or `batch` is not positive.
        ImportError: the package `onnx` is not installed.
    """
    if batch is not None and (isinstance(batch, bool) or not isinstance(batch, int) or batch < 1):
        raise ModelError(f"`batch` (={batch!r}) must be an integer, at least 1.")
    label, model = load(source)
    try:
        found = _read(import_onnx(), model, label, batch, epilogues, products)
    except (AttributeError, IndexError, TypeError) as error:  # a damaged file: names that are not text, attributes of another type
        raise ModelError(f"`source` (={label}) must follow the ONNX specification; reading it fails: {error}") from error
    if not found.layers and not found.skipped:
        raise ModelError(f"`source` (={label}) must have a convolution; it has none among its {len(model.graph.node)} nodes.")
    return found


def _read(onnx: ModuleType, model: ModelProto, label: str, batch: int | None, epilogues: bool, products: bool) -> ModelLayers:
    fixed = set_batch(model.graph, batch)
    graph = Graph(_inferred(onnx, model, label).graph)
    found, skipped = fusions(graph, fixed or batch or 1, epilogues=epilogues, products=products)
    layers: dict[int, Conv2d] = {}
    for index, one in found.items():
        try:
            layers[index] = _scaled(one.conv, fixed, batch, rows=graph.nodes[index].op_type != "Conv")
        except (_Unsupported, ConvError) as error:
            skipped.append((index, Skipped(name_of(graph.nodes[index]), str(error))))
    return ModelLayers(_counted(graph, layers), tuple(entry for _, entry in sorted(skipped, key=lambda pair: pair[0])))


def fusions(
    graph: Graph, batch: int, *, epilogues: bool = True, products: bool = True, lines: bool = True
) -> tuple[dict[int, Fused], list[tuple[int, Skipped]]]:
    """The convolutions of a graph by the index of their node, and the skipped ones; see `layers_of`.

    Args:
        batch: number of images where shape inference lost it.
        epilogues: include what can be fused with them.
        products: include Gemm and MatMul.
        lines: include 1-D convolutions.
    """
    onnx = import_onnx()
    claimed: set[int] = set()
    found: dict[int, Fused] = {}
    skipped: list[tuple[int, Skipped]] = []
    # In reverse order: where two convolutions meet in one Add, the later one fuses it and the earlier one's output is the residual.
    for index, node in reversed(list(enumerate(graph.nodes))):
        skipped += [(index, Skipped(name_of(inner), reason)) for inner, reason in nested(node)]
        if products and (product := _product(onnx, graph, node)) is not None:
            found[index] = _fused(graph, product, node, claimed if epilogues else None, axis=-1)
        if "Conv" not in node.op_type:
            continue
        try:
            found[index] = _fused(graph, _problem(onnx, graph, node, batch, lines), node, claimed if epilogues else None)
        except (_Unsupported, ConvError) as error:
            skipped.append((index, Skipped(name_of(node), str(error))))
    return found, skipped


def _fused(graph: Graph, conv: Conv2d, node: NodeProto, claimed: set[int] | None, axis: int = 1) -> Fused:
    data, output = node.input[0], node.output[0]
    if claimed is None:
        return Fused(conv, Tail({}, (), None, frozenset(), output), data)
    behind = tail(graph, output, claimed, axis)
    conv = conv.with_(**behind.fields)
    if node.op_type != "Conv" or (found := padding_before(graph, data)) is None:
        return Fused(conv, behind, data)
    index, before, (top, left, bottom, right) = found
    sides = tuple(own + added for own, added in zip(conv.padding, (top, left, bottom, right), strict=True))
    conv = conv.with_(height=conv.height - top - bottom, width=conv.width - left - right, padding=sides)
    return Fused(conv, behind, before, (index,))


def _counted(graph: Graph, found: dict[int, Conv2d]) -> tuple[Layer, ...]:
    names: dict[Conv2d, list[str]] = {}
    for index in sorted(found):
        names.setdefault(found[index], []).append(name_of(graph.nodes[index]))
    return tuple(Layer(same[0], conv, len(same)) for conv, same in names.items())


# --- reading the file ----------------------------------------------------------------------------------------------


def import_onnx() -> ModuleType:
    try:
        import onnx
        import onnx.inliner
        import onnx.shape_inference
    except ImportError as error:
        raise ImportError("layers_of needs the package `onnx`; install the extra im2win[onnx].") from error
    return onnx


def load(source: str | os.PathLike[str] | ModelProto) -> tuple[str, ModelProto]:
    """A copy of the model that may be changed, and its name for messages.

    Raises:
        ModelError: the file is missing or not ONNX.
        ImportError: the package `onnx` is not installed.
    """
    if isinstance(source, (str, os.PathLike)) and not Path(source).is_file():  # said before the package is missed
        raise ModelError(f"`source` (={os.fspath(source)!r}) must be an existing file.")
    onnx = import_onnx()
    if isinstance(source, onnx.ModelProto):
        model = onnx.ModelProto()
        model.CopyFrom(source)
        label = repr(model.graph.name)
    else:
        label = repr(os.fspath(source))
        content = Path(source).read_bytes()
        try:
            model = onnx.load_model_from_string(content)
        except Exception as error:  # protobuf's DecodeError, a class without type information
            raise ModelError(_NOT_WHOLE.format(label=label)) from error
    if not model.HasField("graph") or not model.opset_import:  # empty files, and files cut between two fields, parse like this
        raise ModelError(_NOT_WHOLE.format(label=label))
    return label, onnx.inliner.inline_local_functions(model) if model.functions else model


def set_batch(graph: GraphProto, batch: int | None) -> int | None:
    """Sets the symbolic batch of the inputs to `batch` or 1, wherever the symbol occurs. Returns the first input's batch if it is fixed."""
    parameters = {tensor.name for tensor in graph.initializer}
    parameters |= {name for node in graph.node if "Conv" in node.op_type for name in node.input[1:]}
    inputs = [value.type.tensor_type.shape.dim for value in graph.input if value.name not in parameters]
    leading = [dims[0] for dims in inputs if dims]
    symbols = {dim.dim_param for dim in leading if dim.dim_param}
    of_images = [dims for rank in (4, 3) for dims in inputs if len(dims) == rank]
    fixed = of_images[0][0].dim_value if of_images else 0
    everywhere = [dim for value in (*graph.input, *graph.value_info, *graph.output) for dim in value.type.tensor_type.shape.dim]
    for dim in [dim for dim in leading if dim.dim_value <= 0] + [dim for dim in everywhere if dim.dim_param in symbols]:
        dim.dim_value = batch or 1
    return fixed if fixed > 0 else None


def _inferred(onnx: ModuleType, model: ModelProto, label: str) -> ModelProto:
    try:
        inferred = infer(onnx, model, strict=False)
    except Exception as error:  # ONNX's C++ code and protobuf raise their own classes
        raise ModelError(f"`source` (={label}) must pass ONNX shape inference; it fails: {error}") from error
    return inferred


# --- a Conv node as a problem --------------------------------------------------------------------------------------


def nested(node: NodeProto) -> Iterator[tuple[NodeProto, str]]:
    """Every convolution inside a node's subgraphs, and why it is no layer."""
    for graph in subgraphs(node):
        for inner in graph.node:
            if "Conv" in inner.op_type:
                yield inner, f"it is in a subgraph of the {node.op_type} node {name_of(node)!r}; only the main graph is read"
            yield from nested(inner)


class _Unsupported(Exception):
    """The reason why a node is no `Conv2d`."""


def _problem(onnx: ModuleType, graph: Graph, node: NodeProto, batch: int, lines: bool) -> Conv2d:
    """The plain convolution of a Conv node. Missing attributes have the defaults of the ONNX specification.

    `batch` is used where shape inference lost the number, as after an operator that it does not know. Without `lines` it must be 2-D.
    """
    if node.op_type != "Conv" or node.domain not in ("", "ai.onnx"):
        operator = ".".join(filter(None, (node.domain, node.op_type)))
        raise _Unsupported(f"operator {operator} is not supported; only Conv is")
    data, weight = [*node.input, "", ""][:2]
    if not lines and len(graph.shapes.get(data) or ()) == 3:
        raise _Unsupported("it is a 1-D convolution; only 2-D is supported in float16")
    wanted = _shape(graph, "filter", weight)
    filters = tuple(size for size in wanted if isinstance(size, int))
    if len(filters) != 4:
        raise _Unsupported(f"its filter has the shape {_show(wanted)}; it must be fixed")
    images, channels, height, width = _shape(graph, "input", data)
    if not isinstance(height, int) or not isinstance(width, int):
        raise _Unsupported(f"its input has the shape [{images}, {channels}, {height}, {width}]; height and width must be fixed")
    attributes = attributes_of(node)
    groups = attributes.get("group", 1)
    if isinstance(channels, int) and channels != filters[1] * groups:
        raise _Unsupported(f"its input has {channels} channels and its filter takes {filters[1]} in each of {groups} groups")
    if len(graph.shapes.get(data) or ()) == 3:
        attributes = _of_rows(attributes)
    kernel = tuple(attributes.get("kernel_shape", filters[2:]))
    if kernel != filters[2:]:
        raise _Unsupported(f"its kernel_shape {list(kernel)} is not that of its filter {list(filters)}")
    dtype = onnx.TensorProto.DataType.Name(graph.types.get(data) or graph.types.get(weight, 0))
    if dtype not in _DTYPES:
        raise _Unsupported(f"dtype {dtype.lower()} is not supported; only {' and '.join(_DTYPES.values())} are")
    mode = attributes.get("auto_pad", b"NOTSET").decode()
    if mode not in _AUTO_PAD:
        raise _Unsupported(f"its auto_pad {mode!r} is none of {', '.join(_AUTO_PAD)}")
    padding: Padding = _AUTO_PAD[mode] or attributes.get("pads", 0)
    conv = Conv2d(
        images if isinstance(images, int) else batch,
        filters[1] * groups,
        height,
        width,
        filters[0],
        kernel,
        stride=attributes.get("strides", 1),
        padding=padding,
        dilation=attributes.get("dilations", 1),
        groups=groups,
        dtype=_DTYPES[dtype],
        bias=len(node.input) > 2 and bool(node.input[2]),
    )
    top, left, bottom, right = conv.padding
    return conv.with_(padding=(bottom, right, top, left)) if mode == "SAME_LOWER" else conv


def _shape(graph: Graph, role: str, name: str) -> Shape:
    """The four extents of a tensor; those of a 1-D convolution have one row."""
    shape = graph.shapes.get(name)
    if shape is None:
        raise _Unsupported(f"the shape of its {role} {name!r} is unknown")
    if len(shape) not in (3, 4):
        raise _Unsupported(f"its {role} has the shape {_show(shape)}, a {len(shape) - 2}-D convolution; only 1-D and 2-D are supported")
    return (*shape[:2], 1, shape[2]) if len(shape) == 3 else shape


def _of_rows(attributes: dict[str, Any]) -> dict[str, Any]:
    """The attributes of a 1-D convolution for images of one row."""
    besides = {"kernel_shape": (1,), "strides": (1,), "dilations": (1,)}
    found = {name: (*besides[name], *value) if name in besides else value for name, value in attributes.items()}
    if "pads" in found:
        left, right = found["pads"]
        found["pads"] = (0, left, 0, right)
    return found


def _show(shape: Shape) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"


def _scaled(conv: Conv2d, fixed: int | None, batch: int | None, rows: bool) -> Conv2d:
    """The problem at another batch. For a product the batch is its number of rows."""
    if batch is None or fixed is None:
        return conv
    size = conv.width if rows else conv.batch
    if size * batch % fixed:
        raise _Unsupported(f"its batch {size} cannot be scaled from the model's {fixed} to {batch}")
    return conv.with_(**{"width" if rows else "batch": size * batch // fixed})


def _product(onnx: ModuleType, graph: Graph, node: NodeProto) -> Conv2d | None:
    """The 1x1 convolution of a Gemm or MatMul with a fixed matrix; None for any other node."""
    if node.op_type not in ("Gemm", "MatMul") or node.domain not in ("", "ai.onnx"):
        return None
    attributes = attributes_of(node)
    rows, matrix, output = (graph.shapes.get(name) for name in (*node.input[:2], node.output[0]))
    if rows is None or matrix is None or output is None or len(matrix) != 2 or len(rows) < 2 or not graph.fixed(node.input[1]):
        return None
    sizes = [size for size in (*rows, *matrix) if isinstance(size, int)]
    dtype = _DTYPES.get(onnx.TensorProto.DataType.Name(graph.types.get(node.input[0], 0)))
    if len(sizes) != len(rows) + 2 or attributes.get("transA", 0) or dtype is None:
        return None
    inner, columns = reversed(sizes[-2:]) if attributes.get("transB", 0) else sizes[-2:]
    biased = len(node.input) > 2 and bool(node.input[2])
    if biased and not (graph.fixed(node.input[2]) and graph.shapes.get(node.input[2]) in ((), (1,), (1, 1), (columns,), (1, columns))):
        return None
    return Conv2d(1, inner, 1, math.prod(sizes[: len(rows) - 1]), columns, 1, dtype=dtype, layout="NHWC", bias=biased)
