"""A node of an ONNX graph as a problem: Conv, Gemm and MatMul as `Conv2d`, or why a convolution is none."""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

from im2win.frontends.onnx.graph import Graph, Shape, attributes_of, name_of, subgraphs
from im2win.spec.conv2d import Conv2d, Padding
from im2win.spec.dtypes import ELEMENT_TYPES

if TYPE_CHECKING:
    from onnx import NodeProto

DTYPES = {row.onnx: name for name, row in ELEMENT_TYPES.items() if row.onnx}
_AUTO_PAD: dict[str, Literal["same", "valid"] | None] = {"NOTSET": None, "VALID": "valid", "SAME_UPPER": "same", "SAME_LOWER": "same"}



def nested(node: NodeProto) -> Iterator[tuple[NodeProto, str]]:
    """Every convolution inside a node's subgraphs, and why it is no layer."""
    for graph in subgraphs(node):
        for inner in graph.node:
            if "Conv" in inner.op_type:
                yield inner, f"it is in a subgraph of the {node.op_type} node {name_of(node)!r}; only the main graph is read"
            yield from nested(inner)


class Unsupported(Exception):
    """The reason why a node is no `Conv2d`."""


def problem_of(onnx: ModuleType, graph: Graph, node: NodeProto, batch: int, lines: bool) -> Conv2d:
    """The plain convolution of a Conv node. Missing attributes have the defaults of the ONNX specification.

    `batch` is used where shape inference lost the number, as after an operator that it does not know. Without `lines` it must be 2-D.
    """
    if node.op_type != "Conv" or node.domain not in ("", "ai.onnx"):
        operator = ".".join(filter(None, (node.domain, node.op_type)))
        raise Unsupported(f"operator {operator} is not supported; only Conv is")
    data, weight = [*node.input, "", ""][:2]
    if not lines and len(graph.shapes.get(data) or ()) == 3:
        raise Unsupported("it is a 1-D convolution; only 2-D is supported in float16")
    wanted = extents(graph, "filter", weight)
    filters = tuple(size for size in wanted if isinstance(size, int))
    if len(filters) != 4:
        raise Unsupported(f"its filter has the shape {_show(wanted)}; it must be fixed")
    images, channels, height, width = extents(graph, "input", data)
    if not isinstance(height, int) or not isinstance(width, int):
        raise Unsupported(f"its input has the shape [{images}, {channels}, {height}, {width}]; height and width must be fixed")
    attributes = attributes_of(node)
    groups = attributes.get("group", 1)
    if isinstance(channels, int) and channels != filters[1] * groups:
        raise Unsupported(f"its input has {channels} channels and its filter takes {filters[1]} in each of {groups} groups")
    if len(graph.shapes.get(data) or ()) == 3:
        attributes = of_rows(attributes)
    kernel = tuple(attributes.get("kernel_shape", filters[2:]))
    if kernel != filters[2:]:
        raise Unsupported(f"its kernel_shape {list(kernel)} is not that of its filter {list(filters)}")
    dtype = onnx.TensorProto.DataType.Name(graph.types.get(data) or graph.types.get(weight, 0))
    if dtype not in DTYPES:
        raise Unsupported(f"dtype {dtype.lower()} is not supported; only {' and '.join(DTYPES.values())} are")
    mode = attributes.get("auto_pad", b"NOTSET").decode()
    if mode not in _AUTO_PAD:
        raise Unsupported(f"its auto_pad {mode!r} is none of {', '.join(_AUTO_PAD)}")
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
        dtype=DTYPES[dtype],
        bias=len(node.input) > 2 and bool(node.input[2]),
    )
    top, left, bottom, right = conv.padding
    return conv.with_(padding=(bottom, right, top, left)) if mode == "SAME_LOWER" else conv


def extents(graph: Graph, role: str, name: str) -> Shape:
    """The four extents of a tensor; those of a 1-D convolution have one row."""
    shape = graph.shapes.get(name)
    if shape is None:
        raise Unsupported(f"the shape of its {role} {name!r} is unknown")
    if len(shape) not in (3, 4):
        raise Unsupported(f"its {role} has the shape {_show(shape)}, a {len(shape) - 2}-D convolution; only 1-D and 2-D are supported")
    return (*shape[:2], 1, shape[2]) if len(shape) == 3 else shape


def of_rows(attributes: dict[str, Any]) -> dict[str, Any]:
    """The attributes of a 1-D convolution for images of one row."""
    besides = {"kernel_shape": (1,), "strides": (1,), "dilations": (1,)}
    found = {name: (*besides[name], *value) if name in besides else value for name, value in attributes.items()}
    if "pads" in found:
        left, right = found["pads"]
        found["pads"] = (0, left, 0, right)
    return found


def _show(shape: Shape) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"


def scaled(conv: Conv2d, fixed: int | None, batch: int | None, rows: bool) -> Conv2d:
    """The problem at another batch. For a product the batch is its number of rows."""
    if batch is None or fixed is None:
        return conv
    size = conv.width if rows else conv.batch
    if size * batch % fixed:
        raise Unsupported(f"its batch {size} cannot be scaled from the model's {fixed} to {batch}")
    return conv.with_(**{"width" if rows else "batch": size * batch // fixed})


def product_of(onnx: ModuleType, graph: Graph, node: NodeProto) -> Conv2d | None:
    """The 1x1 convolution of a Gemm or MatMul with a fixed matrix; None for any other node."""
    if node.op_type not in ("Gemm", "MatMul") or node.domain not in ("", "ai.onnx"):
        return None
    attributes = attributes_of(node)
    rows, matrix, output = (graph.shapes.get(name) for name in (*node.input[:2], node.output[0]))
    if rows is None or matrix is None or output is None or len(matrix) != 2 or len(rows) < 2 or not graph.fixed(node.input[1]):
        return None
    sizes = [size for size in (*rows, *matrix) if isinstance(size, int)]
    dtype = DTYPES.get(onnx.TensorProto.DataType.Name(graph.types.get(node.input[0], 0)))
    if len(sizes) != len(rows) + 2 or attributes.get("transA", 0) or dtype is None:
        return None
    inner, columns = reversed(sizes[-2:]) if attributes.get("transB", 0) else sizes[-2:]
    biased = len(node.input) > 2 and bool(node.input[2])
    if biased and not (graph.fixed(node.input[2]) and graph.shapes.get(node.input[2]) in ((), (1,), (1, 1), (columns,), (1, columns))):
        return None
    return Conv2d(1, inner, 1, math.prod(sizes[: len(rows) - 1]), columns, 1, dtype=dtype, layout="NHWC", bias=biased)
