"""Compiles the nodes that are no convolutions: TVM's ONNX importer and its Relax pipeline (operators to loops, fusion)."""

from __future__ import annotations

import contextlib
import gc
import io
import os
import re
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import tvm
from tvm import relax

from im2win.frontends.models.parts import Parts, scaling
from im2win.frontends.models.plain_nodes import Writer
from im2win.frontends.models.program import Call, Program
from im2win.frontends.models.tensor_layouts import Stored, TensorLayouts
from im2win.frontends.onnx.epilogues import scales
from im2win.frontends.onnx.layers import ModelError, import_onnx

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto

    from im2win.frontends.models.source import Source

Node = tuple[str, dict[str, Any]]  # operator and attributes
Lowering = Callable[[tvm.IRModule], tvm.IRModule]


def add_fallback(
    source: Source, parts: Parts, program: Program, layouts: TensorLayouts, joined: set[str], label: str, lower: Lowering
) -> dict[str, Any]:
    """Adds the calls of all nodes that TVM compiles to a program. Returns their loops by name, unscheduled.

    Args:
        layouts: how values are stored; all other parts are in the program already.
        joined: values of the program that concatenations read.
        lower: replaces operators whose loops are not TVM's.

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
    elsewhere.update(name for name, _ in program.cuts.values())
    inputs = [layouts.read_by_rest(name) for name in sorted(read - made) if name not in source.constants]
    outputs = layouts.made_by_rest(sorted(made & {layouts.origin(name) for name in elsewhere}))
    module = _lowered(_model(source, nodes, inputs, outputs, layouts), label, lower)
    return _calls(module, program, [one.name for one in inputs], [one.name for one in outputs])


def _model(source: Source, nodes: list[NodeProto], inputs: list[Stored], outputs: list[Stored], layouts: TensorLayouts) -> ModelProto:
    """The nodes as a separate ONNX model, which reads and writes values as they are stored and computes in the original types.

    Values are renamed to plain names, since the importer changes others.
    """
    onnx = import_onnx()
    names: dict[str, str] = {"": ""}
    constants: dict[str, np.ndarray[Any, Any]] = {}

    def plain(name: str) -> str:
        if name not in names:
            names[name] = f"v{len(names)}"
            if name in source.constants:
                constants[names[name]] = source.constants[name]
        return names[name]

    writer = Writer(onnx, source, plain, constants)
    copies: list[NodeProto] = []
    for node in nodes:
        if writer.takes(node):
            copies += writer.write(node)
            continue
        if node.op_type == "BatchNormalization" and scales(source.graph, node, node.input[0]):
            copies += _affine(onnx, source, node, plain, constants)
            continue
        copy = onnx.NodeProto()
        copy.CopyFrom(node)
        copy.input[:], copy.output[:] = [plain(name) for name in node.input], [plain(name) for name in node.output]
        copies.append(copy)

    before, after = _Borders(onnx, layouts), _Borders(onnx, layouts)
    taken = [before.read(one, plain(one.origin)) for one in inputs]
    given = [after.write(one, plain(one.origin)) for one in outputs]
    graph = onnx.helper.make_graph(
        [*before.nodes, *copies, *after.nodes], "rest", taken, given,
        [onnx.numpy_helper.from_array(array, name) for name, array in constants.items()],
    )  # fmt: skip
    model: ModelProto = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", source.opset)], ir_version=8)
    return model


class _Borders:
    """Nodes that convert values from their stored form to the form that the model computes with, or back; none where both are the same."""

    def __init__(self, onnx: Any, layouts: TensorLayouts) -> None:
        self.nodes: list[NodeProto] = []
        self._onnx, self._forms = onnx, layouts

    def read(self, stored: Stored, name: str) -> Any:
        """Adds nodes that compute the value `name` from a stored value. Returns the stored value as a graph input."""
        steps: list[Node] = [("Transpose", {"perm": (0, 3, 1, 2)})] * stored.last
        steps += [("Cast", {"to": self._code(self._forms.dtype(stored.origin))})] * (stored.dtype != self._forms.dtype(stored.origin))
        return self._value(stored, self._chain(f"{name}_stored", name, steps)[0])

    def write(self, stored: Stored, name: str) -> Any:
        """Adds nodes that compute a stored value from the value `name`. Returns the stored value as a graph output."""
        steps: list[Node] = [("Cast", {"to": self._code(stored.dtype)})] * (stored.dtype != self._forms.dtype(stored.origin))
        steps += [("Transpose", {"perm": (0, 2, 3, 1)})] * stored.last
        return self._value(stored, self._chain(name, f"{name}_to{len(self.nodes)}", steps)[1])

    def _chain(self, first: str, last: str, steps: list[Node]) -> tuple[str, str]:
        """Adds a chain of nodes from `first` to `last`. Returns the names of its ends; without steps both are the model's value."""
        if not steps:
            name = last if first.endswith("_stored") else first
            return name, name
        names = [first, *(f"{last}_{number}" for number in range(len(steps) - 1)), last]
        for (operator, attributes), source, target in zip(steps, names, names[1:], strict=False):
            self.nodes.append(self._onnx.helper.make_node(operator, [source], [target], **attributes))
        return first, last

    def _value(self, stored: Stored, name: str) -> Any:
        return self._onnx.helper.make_tensor_value_info(name, self._code(stored.dtype), self._forms.program.shapes[stored.name])

    def _code(self, dtype: str) -> int:
        return int(self._onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))


def _affine(onnx: Any, source: Source, node: NodeProto, plain: Any, constants: dict[str, Any]) -> list[NodeProto]:
    """A BatchNormalization as a multiplication and an addition with a constant for each channel."""
    shape = source.graph.shapes[node.input[0]]
    factor, term = scaling(source, node, node.input[0], int(shape[1]))
    wide = (-1, *(1 for _ in shape[2:]))
    data, product, output = plain(node.input[0]), plain(node.output[0] + "/scaled"), plain(node.output[0])
    for name, array in ((f"{product}f", factor), (f"{product}t", term)):
        constants[name] = array.astype(np.float32).reshape(wide)
    mul = onnx.helper.make_node("Mul", [data, f"{product}f"], [product])
    return [mul, onnx.helper.make_node("Add", [product, f"{product}t"], [output])]


def _lowered(model: ModelProto, label: str, lower: Lowering) -> tvm.IRModule:
    """The model as loops: one function for each fused group, and `main`, which calls them."""
    from tvm.relax.frontend.onnx import from_onnx

    said = io.StringIO()
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            warnings.simplefilter("ignore")  # ONNX's checker warns about the partial graph
            module = from_onnx(model)
            module = lower(module)
        return relax.get_pipeline("zero")(module)
    except Exception as error:  # the importer's converters raise any class
        reason = _reason(error, said.getvalue(), model)
        with _quiet():
            error.__traceback__ = error.__cause__ = error.__context__ = None  # TVM's builder writes a line when it goes
            gc.collect()
    raise ModelError(f"`source` (={label}) must have operators that TVM imports; {reason}.")


def _reason(error: Exception, said: str, model: ModelProto) -> str:
    """Why TVM's importer failed: the operator that it names, and what it raises."""
    line = next((text.strip() for text in reversed(str(error).strip().splitlines()) if text.strip()), "")
    raised = f"{type(error).__name__}: {line}" if isinstance(error, LookupError) or not line else line
    found = re.findall(r"Error converting operator (\w+)", said)
    if not found:
        return f"it says: {raised.rstrip('.')}"
    opset = next((one.version for one in model.opset_import if one.domain in ("", "ai.onnx")), 1)
    return f"{found[-1]}, as operator set {opset} has it, it cannot import ({raised.rstrip('.')})"


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Nothing that C++ code writes to stderr is seen."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def _calls(module: tvm.IRModule, program: Program, inputs: list[str], outputs: list[str]) -> dict[str, Any]:
    main = module["main"]
    values: dict[Any, Any] = dict(zip(main.params, inputs, strict=True))

    def fresh(var: Any, ty: Any) -> str:
        name = f"rest/{len(program.shapes)}/{var.name}"
        if ty.shape is None or not all(isinstance(extent, tvm.tirx.IntImm) for extent in ty.shape):
            raise ModelError(f"value {var.name!r} has the shape {ty.shape}; shapes must be fixed but for the batch.")
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
        raise ModelError(f"TVM leaves {expression} as it is; only operators with loops of fixed size can be compiled.")

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
