"""Prepares an ONNX model for compilation at one batch: loads weights, fixes shapes, computes constants, drops nodes without effect."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from im2win.frontends.onnx.graph import Graph, attributes_of, foldable, name_of, subgraphs
from im2win.frontends.onnx.layers import ModelError, import_onnx, load, set_batch
from im2win.frontends.onnx.moving import integers_moved
from im2win.frontends.onnx.pairs import in_pairs
from im2win.frontends.onnx.quantised import DEQUANTIZE
from im2win.frontends.onnx.shapes import infer

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto, NodeProto

Array = np.ndarray[Any, Any]
KEPT = ("Constant", DEQUANTIZE)
"""Operators whose nodes stay in a graph although their outputs are constants: they say how a constant is made."""


@dataclass(frozen=True)
class Tensor:
    """Name, shape and dtype of a model's input or output; `batched` if the first axis counts images."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    batched: bool


@dataclass(frozen=True)
class Source:
    """A model at one batch.

    Attributes:
        graph: its nodes, without those that compute constants or have no effect, with the shapes of all values.
        constants: values that are the same in every run.
        inputs, outputs: in the model's order.
    """

    graph: Graph
    constants: dict[str, Array]
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    opset: int


def read(source: str | os.PathLike[str] | ModelProto) -> tuple[str, ModelProto]:
    """Loads a model with its weights, external ones included. Returns it with its name for messages.

    Raises:
        ModelError: the file or its external weights are missing, or it is not ONNX.
        ImportError: the package `onnx` is not installed.
    """
    label, model = load(source)
    onnx = import_onnx()
    if not isinstance(source, onnx.ModelProto):
        import onnx.external_data_helper as external

        try:
            external.load_external_data_for_model(model, str(Path(source).resolve().parent))
        except (OSError, ValueError, onnx.checker.ValidationError) as error:
            raise ModelError(f"`source` (={label}) must lie beside its external weights: {error}") from None
    return label, model


def at_batch(model: ModelProto, label: str, batch: int | None) -> Source:
    """The model at a batch; None for its own batch, or 1 where that is symbolic. `model` is not changed.

    Raises:
        ModelError: a shape stays unknown, or the model cannot run at this batch.
    """
    onnx = import_onnx()
    inferred = _inferred(onnx, model, label, batch)
    graph = Graph(inferred.graph)
    constants = _constants(onnx, inferred, graph)
    kept = _useful(graph, inferred.graph, constants)
    for node in kept:
        if next(subgraphs(node), None) is not None:
            name = name_of(node)
            raise ModelError(f"`source` (={label}) must have no control flow; node {name!r} is of type {node.op_type}.")
    del inferred.graph.node[:]
    inferred.graph.node.extend(kept)
    graph = Graph(inferred.graph, constants)
    own = inputs_of(inferred.graph, 0)
    images = next((size for shape in own.values() for size in shape[:1]), 1)
    batched = _batched(onnx, model, label, images)

    def tensor(name: str) -> Tensor:
        shape, code = graph.shapes.get(name), graph.types.get(name, 0)
        if name in constants:
            shape, dtype = tuple(constants[name].shape), str(constants[name].dtype)
        elif shape is None or not all(isinstance(size, int) for size in shape) or not code:
            raise ModelError(
                f"`source` (={label}) must have fixed shapes but for the batch; {name!r} has {_shown(shape)}. "
                "Fix them in the file, for example with onnx.tools.update_model_dims."
            )
        else:
            dtype = str(onnx.helper.tensor_dtype_to_np_dtype(code))
        if np.dtype(dtype).kind not in "iufb":
            raise ModelError(f"`source` (={label}) must have inputs and outputs of integers, booleans or IEEE floats; {name!r} is {dtype}.")
        return Tensor(name, tuple(int(size) for size in shape), dtype, name in batched)

    inputs = tuple(tensor(name) for name in own)
    outputs = tuple(tensor(value.name) for value in inferred.graph.output)
    opset = next((one.version for one in inferred.opset_import if one.domain in ("", "ai.onnx")), 1)
    return Source(graph, constants, inputs, outputs, opset)


def inputs_of(graph: GraphProto, unknown: int) -> dict[str, tuple[int, ...]]:
    """Shapes of the inputs that are no weights, with `unknown` for sizes that are not fixed."""
    weights = {tensor.name for tensor in graph.initializer}
    values = [value for value in graph.input if value.name not in weights]
    return {
        value.name: tuple(dim.dim_value if dim.dim_value > 0 else unknown for dim in value.type.tensor_type.shape.dim) for value in values
    }


def _shown(shape: tuple[int | str, ...] | None) -> str:
    return "an unknown shape" if shape is None else "the shape [" + ", ".join(map(str, shape)) + "]"


def _inferred(onnx: ModuleType, model: ModelProto, label: str, batch: int | None) -> ModelProto:
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    leading = [shape for shape in inputs_of(model.graph, 0).values() if shape and shape[0]]
    fixed = set_batch(copy.graph, batch) or next((shape[0] for shape in leading), None)
    if batch is not None and fixed is not None and fixed != batch:
        _rescale(onnx, copy.graph, fixed, batch)
    _write_out(onnx, copy)
    in_pairs(onnx, copy)
    integers_moved(onnx, copy)
    try:
        inferred = infer(onnx, copy, strict=True)
    except Exception as error:  # ONNX's C++ code and protobuf raise their own classes
        where = "" if batch is None else f" at batch {batch}"
        raise ModelError(f"`source` (={label}) must pass ONNX shape inference{where}; it fails: {error}") from error
    return inferred


def _write_out(onnx: ModuleType, model: ModelProto) -> None:
    """Writes GroupNormalization as exporters for older operator sets do, with the operators that have rules for shapes and fast loops.

    Before operator set 21 its scales are those of groups; such a node stays.
    """
    opset = next((one.version for one in model.opset_import if one.domain in ("", "ai.onnx")), 1)
    weights = {tensor.name: tensor for tensor in model.graph.initializer}
    nodes: list[NodeProto] = []
    for node in model.graph.node:
        if node.op_type != "GroupNormalization" or node.domain not in ("", "ai.onnx") or opset < 21 or node.input[1] not in weights:
            nodes.append(node)
            continue
        stated, name = attributes_of(node), f"{node.output[0]}/group_norm"
        groups, channels = stated["num_groups"], weights[node.input[1]].dims[0]
        small = {"epsilon": stated.get("epsilon", 1e-5)}
        constants = {
            "groups": np.array([0, groups, -1]), "one": np.ones(groups, np.float32), "zero": np.zeros(groups, np.float32),
            "channels": np.array([0, channels, -1]), "column": np.array([channels, 1]),
        }  # fmt: skip
        model.graph.initializer.extend(onnx.numpy_helper.from_array(array, f"{name}/{key}") for key, array in constants.items())
        steps = [
            ("Reshape", [node.input[0], f"{name}/groups"], "parted", {}),
            ("InstanceNormalization", [f"{name}/{read}" for read in ("parted", "one", "zero")], "normal", small),
            ("Reshape", [f"{name}/normal", f"{name}/channels"], "joined", {}),
            ("Reshape", [node.input[1], f"{name}/column"], "scale", {}),
            ("Reshape", [node.input[2], f"{name}/column"], "bias", {}),
            ("Mul", [f"{name}/joined", f"{name}/scale"], "scaled", {}),
            ("Add", [f"{name}/scaled", f"{name}/bias"], "added", {}),
            ("Shape", [node.input[0]], "whole", {}),
        ]
        nodes += [onnx.helper.make_node(operator, inputs, [f"{name}/{made}"], **more) for operator, inputs, made, more in steps]
        nodes.append(onnx.helper.make_node("Reshape", [f"{name}/added", f"{name}/whole"], [node.output[0]], name=node.name))
    del model.graph.node[:]
    model.graph.node.extend(nodes)


def _rescale(onnx: ModuleType, graph: GraphProto, fixed: int, batch: int) -> None:
    """Changes the batch of a model with a fixed one, in its inputs and in the target shapes of Reshape nodes."""
    for name, value in ((value.name, value) for value in graph.input):
        dims = value.type.tensor_type.shape.dim
        if name in inputs_of(graph, 0) and dims and dims[0].dim_value == fixed:
            dims[0].dim_value = batch
    del graph.value_info[:]
    for value in graph.output:
        value.type.tensor_type.ClearField("shape")
    shapes = {tensor.name: tensor for tensor in graph.initializer}
    shapes |= {
        node.output[0]: attributes_of(node)["value"] for node in graph.node if "value" in attributes_of(node) and node.op_type == "Constant"
    }
    computed = Graph(graph).fixed
    nodes = [node for node in graph.node if node.op_type == "Reshape" and node.input[1] in shapes and not computed(node.input[0])]
    for number, node in enumerate(nodes):
        sizes = onnx.numpy_helper.to_array(shapes[node.input[1]]).copy()
        if sizes.size and sizes[0] > 0 and sizes[0] % fixed == 0:
            sizes[0] = sizes[0] // fixed * batch
            node.input[1] = f"{node.input[1]}/batch{number}"
            graph.initializer.append(onnx.numpy_helper.from_array(sizes, node.input[1]))


def _batched(onnx: ModuleType, model: ModelProto, label: str, batch: int) -> frozenset[str]:
    """Names of the inputs and outputs whose first axis doubles with the batch; none where the model runs at one batch only."""
    try:
        graphs = [_inferred(onnx, model, label, size).graph for size in (batch, 2 * batch)]
    except ModelError:
        return frozenset()
    once, twice = (Graph(graph).shapes for graph in graphs)
    found = set()
    for name in (value.name for value in (*graphs[0].input, *graphs[0].output)):
        shape, other = once.get(name), twice.get(name)
        if shape and other and shape[0] == batch and other[0] == 2 * batch and shape[1:] == other[1:]:
            found.add(name)
    return frozenset(found)


# --- constants -----------------------------------------------------------------------------------------------------


def _constants(onnx: ModuleType, model: ModelProto, graph: Graph) -> dict[str, Array]:
    """Every value that is the same in all runs: weights, and what is computed from them or from shapes alone."""
    constants = {tensor.name: np.asarray(onnx.numpy_helper.to_array(tensor)) for tensor in model.graph.initializer}
    known, nodes = set(constants), []
    for node in model.graph.node:
        shape = graph.shapes.get(node.input[0]) if node.op_type == "Shape" else None
        if shape is not None and all(isinstance(size, int) for size in shape):
            stated = attributes_of(node)
            constants[node.output[0]] = np.array(shape[stated.get("start", 0) : stated.get("end")], np.int64)
        elif foldable(node) and all(name in known for name in node.input if name):
            nodes.append(node)
        else:
            continue
        known.update(node.output)
    return {**constants, **_computed(onnx, model.opset_import, nodes, constants)} if nodes else constants


def values_of(model: ModelProto, graph: Graph, names: Iterable[str]) -> dict[str, Array]:
    """Values that are the same in every run, together with the values that they are computed from.

    Args:
        model: the model of `graph`, with its weights loaded.
        names: values that are `Graph.fixed`.

    Raises:
        ModelError: a value cannot be computed.
    """
    onnx = import_onnx()
    weights = {tensor.name: tensor for tensor in model.graph.initializer}
    values: dict[str, Array] = {}
    makers: dict[int, NodeProto] = {}
    wanted = [name for name in names if name]
    while wanted:
        name = wanted.pop()
        if name in weights:
            values[name] = np.asarray(onnx.numpy_helper.to_array(weights[name]))
        elif (made := graph.maker(name)) is not None and made[0] not in makers:
            makers[made[0]] = made[1]
            wanted += filter(None, made[1].input)
    nodes = [node for _, node in sorted(makers.items())]
    return {**values, **_computed(onnx, model.opset_import, nodes, values)} if nodes else values


def computed(opset: int, nodes: list[NodeProto], values: dict[str, Array]) -> dict[str, Array]:
    """All outputs of nodes of one operator set whose inputs have these values.

    Raises:
        ModelError: ONNX's reference implementation cannot compute them.
    """
    onnx = import_onnx()
    return _computed(onnx, [onnx.helper.make_opsetid("", opset)], nodes, values)


def _computed(onnx: ModuleType, opsets: Iterable[Any], nodes: list[NodeProto], constants: dict[str, Array]) -> dict[str, Array]:
    """All outputs of nodes whose inputs are constants."""
    from onnx.reference import ReferenceEvaluator

    outputs = [onnx.ValueInfoProto(name=name) for node in nodes for name in node.output if name]
    feeds = {name: constants[name] for node in nodes for name in node.input if name in constants}
    inputs = [onnx.helper.make_tensor_value_info(n, onnx.helper.np_dtype_to_tensor_dtype(a.dtype), a.shape) for n, a in feeds.items()]
    alone = onnx.helper.make_model(onnx.helper.make_graph(nodes, "constants", inputs, outputs), opset_imports=list(opsets))
    try:
        values = ReferenceEvaluator(alone, new_ops=_dequantising()).run(None, feeds)
    except Exception as error:  # reference implementations of operators raise any class
        raise ModelError(f"what the model computes of constants alone cannot be computed: {error}") from error
    return {value.name: np.asarray(array) for value, array in zip(outputs, values, strict=True)}


def _dequantising() -> list[Any]:
    """DequantizeLinear for ONNX's reference implementation, which has it for new operator sets alone."""
    from onnx.reference.op_run import OpRun

    class DequantizeLinear(OpRun):
        op_domain = ""

        def _run(self, x: Array, scale: Array, zero: Array | None = None, axis: int = 1, block_size: int = 0, **_: Any) -> tuple[Array]:
            def along(one: Array) -> Array:
                if block_size:
                    return np.repeat(one, block_size, axis).take(range(x.shape[axis]), axis)
                return one.reshape([-1 if place == axis % x.ndim else 1 for place in range(x.ndim)]) if one.size > 1 else one.reshape(())

            return (((x.astype(np.int64) - (0 if zero is None else along(zero).astype(np.int64))) * along(scale)).astype(scale.dtype),)

    return [DequantizeLinear]


def _useful(view: Graph, graph: GraphProto, constants: dict[str, Array]) -> list[NodeProto]:
    """The nodes that compute something in every run. Nodes that pass their input on are bypassed."""
    passed: dict[str, str] = {}
    outputs = {value.name for value in graph.output}
    kept: list[NodeProto] = []
    plain = not any(True for node in graph.node for _ in subgraphs(node))  # else a body may read a bypassed value
    for node in graph.node:
        if node.op_type in KEPT and all(name in constants for name in node.output):  # looked up, as when layers are listed
            kept.append(node)
            continue
        if all(name in constants for name in node.output if name) and len(node.output):
            continue
        for place, name in enumerate(node.input):
            node.input[place] = passed.get(name, name)
        if plain and view.hands_on(node) and node.output[0] not in outputs:
            passed[node.output[0]] = node.input[0]
            continue
        kept.append(node)
    return kept
