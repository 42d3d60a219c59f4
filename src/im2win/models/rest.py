"""What is no convolution: TVM's ONNX importer and its Relax pipeline (operators to loops, fusion) over the nodes that are left."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import tvm
from tvm import relax

from im2win.models.parts import Parts, scaling
from im2win.models.program import Call, Program
from im2win.onnx_graph import scales
from im2win.onnx_layers import ModelError, import_onnx

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto

    from im2win.models.source import Source


def add_rest(source: Source, parts: Parts, program: Program, joined: set[str], label: str) -> dict[str, Any]:
    """Adds the calls of everything that TVM compiles to a program; its loops by name, still to be scheduled.

    Args:
        joined: values that concatenations read.

    Raises:
        ModelError: TVM cannot import an operator, or its output has no fixed shape.
    """
    if not parts.rest:
        return {}
    nodes = [source.graph.nodes[index] for index in parts.rest]
    made = {name for node in nodes for name in node.output if name}
    read = {name for node in nodes for name in node.input if name}
    elsewhere = {*program.outputs, *joined}
    for call in program.calls:
        elsewhere.update(call.inputs if isinstance(call, Call) else (call.source,))
    elsewhere.update(program.views.values())
    inputs = sorted(name for name in read - made if name not in source.constants)
    outputs = sorted(made & elsewhere)
    module = _lowered(_model(source, nodes, inputs, outputs), label)
    return _calls(module, program, inputs, outputs)


def _model(source: Source, nodes: list[NodeProto], inputs: list[str], outputs: list[str]) -> ModelProto:
    """The nodes as a model of their own; values get plain names, since the importer changes others."""
    onnx = import_onnx()
    names: dict[str, str] = {"": ""}
    constants: dict[str, np.ndarray[Any, Any]] = {}

    def plain(name: str) -> str:
        if name not in names:
            names[name] = f"v{len(names)}"
            if name in source.constants:
                constants[names[name]] = source.constants[name]
        return names[name]

    copies: list[NodeProto] = []
    for node in nodes:
        if node.op_type == "BatchNormalization" and scales(source.graph, node, node.input[0]):
            copies += _affine(onnx, source, node, plain, constants)
            continue
        copy = onnx.NodeProto()
        copy.CopyFrom(node)
        copy.input[:], copy.output[:] = [plain(name) for name in node.input], [plain(name) for name in node.output]
        copies.append(copy)

    def value(name: str) -> Any:
        return onnx.helper.make_tensor_value_info(plain(name), source.graph.types[name], source.graph.shapes[name])

    graph = onnx.helper.make_graph(
        copies, "rest", [value(name) for name in inputs], [value(name) for name in outputs],
        [onnx.numpy_helper.from_array(array, name) for name, array in constants.items()],
    )  # fmt: skip
    model: ModelProto = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", source.opset)], ir_version=8)
    return model


def _affine(onnx: Any, source: Source, node: NodeProto, plain: Any, constants: dict[str, Any]) -> list[NodeProto]:
    """A BatchNormalization as a product and a sum with a constant a channel."""
    shape = source.graph.shapes[node.input[0]]
    factor, term = scaling(source, node, node.input[0], int(shape[1]))
    wide = (-1, *(1 for _ in shape[2:]))
    data, product, output = plain(node.input[0]), plain(node.output[0] + "/scaled"), plain(node.output[0])
    for name, array in ((f"{product}f", factor), (f"{product}t", term)):
        constants[name] = array.astype(np.float32).reshape(wide)
    mul = onnx.helper.make_node("Mul", [data, f"{product}f"], [product])
    return [mul, onnx.helper.make_node("Add", [product, f"{product}t"], [output])]


def _lowered(model: ModelProto, label: str) -> tvm.IRModule:
    """The model as loops, one function for what TVM fuses, and `main`, which calls them."""
    from tvm.relax.frontend.onnx import from_onnx

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the importer hands on what ONNX's checker says of a partial graph
            module = from_onnx(model)
        return relax.get_pipeline("zero")(module)
    except Exception as error:  # the importer raises whatever its converters do
        line = next((text for text in reversed(str(error).strip().splitlines()) if text.strip()), type(error).__name__)
        raise ModelError(f"compile_model: `source` (={label}) must have operators that TVM imports; it says: {line.strip()}") from error


def _calls(module: tvm.IRModule, program: Program, inputs: list[str], outputs: list[str]) -> dict[str, Any]:
    main = module["main"]
    values: dict[Any, Any] = dict(zip(main.params, inputs, strict=True))

    def fresh(var: Any, ty: Any) -> str:
        name = f"rest/{len(program.shapes)}/{var.name}"
        if ty.shape is None or not all(isinstance(extent, tvm.tirx.IntImm) for extent in ty.shape):
            raise ModelError(f"compile_model: value {var.name!r} has the shape {ty.shape}; shapes must be fixed but for the batch.")
        program.declare(name, tuple(int(extent) for extent in ty.shape), str(ty.dtype))
        return name

    def known(expression: Any) -> Any:
        if isinstance(expression, relax.Var):
            return values[expression]
        if isinstance(expression, relax.Tuple):
            return tuple(known(one) for one in expression.fields)
        if isinstance(expression, relax.TupleGetItem):
            return known(expression.tuple_value)[expression.index]
        if isinstance(expression, tvm.ir.GenericConst):
            array = expression.value.numpy()
            return program.constant(f"rest/{len(program.shapes)}/constant", array)
        raise ModelError(f"compile_model: TVM leaves {expression} as it is; only operators with loops of fixed size can be compiled.")

    functions: dict[str, Any] = {}
    for block in main.body.blocks:
        for binding in block.bindings:
            value = binding.value
            if not (isinstance(value, relax.Call) and value.op == tvm.ir.Op.get("relax.call_tir")):
                values[binding.var] = known(value)
                continue
            name = f"rest_{value.args[0].name_hint}"
            functions[name] = module[value.args[0]]
            ty = value.ty_args[0]
            made = tuple(fresh(binding.var, one) for one in (ty.fields if isinstance(ty, relax.TupleType) else [ty]))
            program.calls.append(Call(name, tuple(known(one) for one in value.args[1].fields), made))
            values[binding.var] = made if isinstance(ty, relax.TupleType) else made[0]
    results = known(main.body.body)
    for name, result in zip(outputs, results if isinstance(results, tuple) else (results,), strict=True):
        program.views[name] = result
    return functions
