"""Lists the convolution layers of an ONNX model as distinct problems with their counts.

It reads shapes only, never weights, so a file whose external weights are missing works too. The package `onnx` is imported inside
functions, so that im2win itself does not need it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from im2win.frontends.onnx import transposed
from im2win.frontends.onnx.epilogues import Tail, padding_before, tail
from im2win.frontends.onnx.graph import Graph, name_of
from im2win.frontends.onnx.pairs import in_pairs
from im2win.frontends.onnx.problems import Unsupported, nested, problem_of, product_of, scaled
from im2win.frontends.onnx.quantised import Integers, fused, integers_of
from im2win.frontends.onnx.shapes import infer
from im2win.spec.conv2d import Conv2d, ConvError
from im2win.spec.suites import Layer

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto, NodeProto

_NOT_WHOLE = "`source` (={label}) must be a whole ONNX model; it is of another format or cut short."


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
        integers: its integer operands, if it is one of a quantised model.
    """

    conv: Conv2d
    tail: Tail
    data: str
    ahead: tuple[int, ...] = ()
    integers: Integers | None = None


def layers_of(
    source: str | os.PathLike[str] | ModelProto, batch: int | None = None, *, epilogues: bool = False, products: bool = False
) -> ModelLayers:
    """Every distinct convolution of an ONNX model with its count, named after the first node that has it.

    A 1-D convolution is a 2-D one of images with one row. Convolutions over more dimensions, with a dynamic height or width, another dtype
    than float32, float16 and bfloat16, another operator than Conv, or inside a subgraph (If, Loop, Scan) are returned in `skipped` with the
    reason.

    Args:
        source: path of a binary ONNX file, or a loaded model (not changed).
        batch: images in the model's input. Default: the model's own, 1 where it is symbolic. If it is given and the model has a fixed batch
            b, the batch of each convolution is scaled by batch / b.
        epilogues: add to each convolution what can be fused with it: BatchNormalization and other scalings by channel (folded: a bias), an
            Add of a tensor of the same shape (residual), an activation of `im2win.spec.activations.ACTIVATIONS`, as one operator or as
            several nodes, and a Pad with zeros before it. A node is fused only if no other node reads the value in between. Default: the
            plain convolution with its own bias.
        products: include Gemm and MatMul with a fixed matrix, as 1x1 convolutions in NHWC: rows are the pixels of one image; and
            ConvTranspose, as the convolution of its phases (`im2win.frontends.onnx.transposed`). With both options these are the layers
            that `im2win.compile_model` looks up.

    Raises:
        ModelError: the file is missing, not ONNX or truncated, shape inference fails, it has no convolution, or `batch` is not positive.
        ImportError: the package `onnx` is not installed.
    """
    if batch is not None and (isinstance(batch, bool) or not isinstance(batch, int) or batch < 1):
        raise ModelError(f"`batch` (={batch!r}) must be an integer, at least 1.")
    label, model = load(source)
    try:
        found = _read(import_onnx(), model, label, batch, epilogues, products)
    except ModelError:
        raise
    except (AttributeError, IndexError, TypeError, ValueError) as error:  # a damaged file: names that are no text, unknown types
        raise ModelError(f"`source` (={label}) must follow the ONNX specification; reading it fails: {error}") from error
    if not found.layers and not found.skipped:
        raise ModelError(f"`source` (={label}) must have a convolution; it has none among its {len(model.graph.node)} nodes.")
    return found


def _read(onnx: ModuleType, model: ModelProto, label: str, batch: int | None, epilogues: bool, products: bool) -> ModelLayers:
    fixed = set_batch(model.graph, batch)
    in_pairs(onnx, model)
    graph = Graph(_inferred(onnx, model, label).graph)
    found, skipped = fusions(graph, fixed or batch or 1, epilogues=epilogues, products=products)
    layers: dict[int, Conv2d] = {}
    for index, one in found.items():
        try:
            layers[index] = scaled(one.conv, fixed, batch, rows="Conv" not in graph.nodes[index].op_type)
        except (Unsupported, ConvError) as error:
            skipped.append((index, Skipped(name_of(graph.nodes[index]), str(error))))
    return ModelLayers(_counted(graph, layers), tuple(entry for _, entry in sorted(skipped, key=lambda pair: pair[0])))


def fusions(
    graph: Graph, batch: int, *, epilogues: bool = True, products: bool = True, lines: bool = True, integers: bool = True
) -> tuple[dict[int, Fused], list[tuple[int, Skipped]]]:
    """The convolutions of a graph by the index of their node, and the skipped ones; see `layers_of`.

    Args:
        batch: number of images where shape inference lost it.
        epilogues: include what can be fused with them.
        products: include Gemm and MatMul, and transposed convolutions.
        lines: include 1-D and transposed convolutions.
        integers: convolutions and products of a quantised model compute with its integers; else with the numbers that these stand for.
    """
    onnx = import_onnx()
    claimed: set[int] = set()
    found: dict[int, Fused] = {}
    skipped: list[tuple[int, Skipped]] = []
    # In reverse order: where two convolutions meet in one Add, the later one fuses it and the earlier one's output is the residual.
    for index, node in reversed(list(enumerate(graph.nodes))):
        skipped += [(index, Skipped(name_of(inner), reason)) for inner, reason in nested(node)]
        if products and (product := product_of(onnx, graph, node)) is not None:
            found[index] = _fused(graph, product, node, claimed if epilogues else None, axis=-1, integers=integers)
        if "Conv" not in node.op_type:
            continue
        try:
            if products and lines and node.op_type == transposed.OPERATOR:
                conv = transposed.problem_of(onnx, graph, node, batch)
            else:
                conv = problem_of(onnx, graph, node, batch, lines)
            found[index] = _fused(graph, conv, node, claimed if epilogues else None, integers=integers)
        except (Unsupported, ConvError) as error:
            skipped.append((index, Skipped(name_of(node), str(error))))
    return found, skipped


def _fused(graph: Graph, conv: Conv2d, node: NodeProto, claimed: set[int] | None, axis: int = 1, *, integers: bool = True) -> Fused:
    data, output = node.input[0], node.output[0]
    if claimed is None:
        plain = Tail({}, (), None, frozenset(), output)
        one = integers_of(graph, node, data, conv) if integers else None
        if one is not None:
            conv = conv.with_(dtype=one.dtype, zero_point=one.zero_point)
        return Fused(conv, plain, data if one is None else one.data, integers=one)
    ahead: tuple[int, ...] = ()
    if node.op_type == "Conv" and (found := padding_before(graph, data)) is not None:
        index, data, (top, left, bottom, right) = found
        sides = tuple(own + added for own, added in zip(conv.padding, (top, left, bottom, right), strict=True))
        conv = conv.with_(height=conv.height - top - bottom, width=conv.width - left - right, padding=sides)
        ahead = (index,)
    one = integers_of(graph, node, data, conv) if integers else None
    behind = tail(graph, output, claimed, axis, residuals=node.op_type != transposed.OPERATOR, scalings=one is None)
    if one is not None:
        conv, behind, one = fused(graph, conv, behind, one, claimed)
        return Fused(conv, behind, one.data, ahead, one)
    return Fused(conv.with_(**behind.fields), behind, data, ahead)


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
