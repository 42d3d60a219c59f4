"""Functions from integers of 8 bits to integers of 8 bits, as tables: what a quantised model computes of one tensor element by element.

An activation between DequantizeLinear and QuantizeLinear has 256 results, in particular x * sigmoid(x) with a QuantizeLinear after the
sigmoid and one after the product, and the change from one scale to another. They are computed when the model is compiled.

On CPUs with AVX512-VBMI an instruction looks up 64 bytes in 128 entries. Elsewhere each byte is a load, which is slower than a few
operations on vectors of float32 but faster than an exponential.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from im2win.frontends.models.rows import OPAQUE, SCHEDULED
from im2win.frontends.models.source import computed
from im2win.frontends.onnx.layers import ModelError
from im2win.frontends.onnx.quantised import DEQUANTIZE, DOMAINS, QUANTIZE, steps_of

if TYPE_CHECKING:
    from onnx import NodeProto

    from im2win.frontends.models.source import Array, Source

_ELEMENTWISE = (
    "Abs", "Add", "Ceil", "Clip", "Div", "Elu", "Erf", "Exp", "Floor", "Gelu", "HardSigmoid", "HardSwish", "Identity", "LeakyRelu", "Log",
    "Max", "Min", "Mish", "Mul", "Neg", "Reciprocal", "Relu", "Selu", "Sigmoid", "Softplus", "Softsign", "Sqrt", "Sub", "Tanh",
    "ThresholdedRelu", QUANTIZE, DEQUANTIZE,
)  # fmt: skip
_COSTLY = ("Elu", "Erf", "Exp", "Gelu", "HardSwish", "Log", "Mish", "Selu", "Sigmoid", "Softplus", "Tanh")
_TYPES = {2: "uint8", 3: "int8"}  # by onnx.TensorProto.DataType
_LANES = 64  # bytes of a vector of AVX-512
_CHUNK = 1 << 14  # bytes of a parallel step
ENTRIES = 256


@dataclass(frozen=True)
class Table:
    """``output = values[source]``.

    Attributes:
        values: 256 integers of 8 bits, in the order of the source's unsigned bytes: those of -128 to -1 of int8 follow those of 127.
    """

    source: str
    output: str
    values: Array


def table_of(source: Source, node: NodeProto, taken: Collection[int], *, vectors: bool) -> tuple[Table, frozenset[int]] | None:
    """The table of a QuantizeLinear and what computes its input, and the indices of the nodes that it makes needless; None if it is none.

    Args:
        taken: indices of the nodes that other parts compute.
        vectors: whether bytes are looked up a vector at a time; else only costly functions are tables.
    """
    graph, output = source.graph, node.output[0]
    if node.op_type != QUANTIZE or node.domain not in DOMAINS or graph.types.get(output) not in _TYPES:
        return None
    cone: dict[int, NodeProto] = {}
    leaves: set[str] = set()
    values = [output]
    while values:
        found = graph.maker(values.pop())
        if found is None or found[0] in taken or not _elementwise(source, found[1], output):
            return None
        index, one = found
        if index in cone:
            continue
        cone[index] = one
        given = [name for name in one.input if name and name not in source.constants]
        if one.op_type == DEQUANTIZE:
            leaves.update(given)
        else:
            values += given
        if not values and len(leaves) > 1:  # the last one may be computed from another one, by its own QuantizeLinear
            inner = max(leaves, key=lambda name: (graph.maker(name) or (-1,))[0])
            leaves.remove(inner)
            values.append(inner)
    [leaf] = leaves or {""}
    if graph.types.get(leaf) not in _TYPES or len(cone) < 2:
        return None
    if not vectors and all(one.op_type not in _COSTLY for one in cone.values()):
        return None
    made = _values(source, leaf, output, [cone[index] for index in sorted(cone)])
    return None if made is None else (Table(leaf, output, made), _needless(source, cone, output))


def _elementwise(source: Source, node: NodeProto, output: str) -> bool:
    """Whether a node computes elements of the output's shape of single elements and of constants of one element."""
    graph, shape = source.graph, source.graph.shapes.get(output)
    if node.op_type not in _ELEMENTWISE or node.domain not in DOMAINS or shape is None or len(node.output) != 1:
        return False
    if node.op_type in (QUANTIZE, DEQUANTIZE):
        steps = steps_of(graph, node)
        if steps is None or steps.scale.size != 1:
            return False
    constants = [source.constants[name] for name in node.input if name in source.constants]
    return graph.shapes.get(node.output[0]) == shape and all(one.size == 1 for one in constants)


def _values(source: Source, leaf: str, output: str, nodes: list[NodeProto]) -> Array | None:
    """The table; None if ONNX's reference implementation cannot compute it."""
    given = np.arange(ENTRIES, dtype=np.uint8).view(_TYPES[source.graph.types[leaf]])
    constants = {name: source.constants[name].reshape(()) for node in nodes for name in node.input if name in source.constants}
    plain = []
    for node in nodes:
        copy = type(node)()
        copy.CopyFrom(node)
        copy.domain = ""
        if node.op_type in (QUANTIZE, DEQUANTIZE):
            del copy.attribute[:]
        plain.append(copy)
    try:
        with np.errstate(all="ignore"):
            found = computed(source.opset, plain, {**constants, leaf: given})[output]
    except ModelError:
        return None
    return found if found.shape == (ENTRIES,) and str(found.dtype) == _TYPES[source.graph.types[output]] else None


def _needless(source: Source, cone: dict[int, NodeProto], output: str) -> frozenset[int]:
    """The nodes of a cone that nothing else reads."""
    left = dict(cone)
    while True:
        read = [index for index, node in left.items() if node.output[0] != output and not _inside(source, node.output[0], left)]
        if not read:
            return frozenset(left)
        for index in read:
            del left[index]


def _inside(source: Source, name: str, nodes: Collection[int]) -> bool:
    readers = source.graph.readers(name)
    return bool(readers) and all(index in nodes for index, _ in readers)


def look_up(count: int, dtypes: tuple[str, str], *, vectors: bool) -> tirx.PrimFunc:
    """The function over `count` bytes, a table, and `count` bytes that it writes.

    Args:
        dtypes: of what is read and written: uint8 or int8.
        vectors: whether the machine has AVX512-VBMI.
    """
    with IRBuilder() as builder, T.prim_func(s_tir=False):
        T.func_name("table")
        T.func_attr({"tirx.noalias": True, SCHEDULED: True, "op_pattern": OPAQUE})
        given = T.arg("data", T.buffer((count,), dtypes[0]))
        held = T.arg("table", T.buffer((ENTRIES,), dtypes[1]))
        made = T.arg("out", T.buffer((count,), dtypes[1]))
        buffers = zip((given, held, made), (count, ENTRIES, count), strict=True)
        data, table, out = (T.decl_buffer((size,), "uint8", data=one.data, align=1) for one, size in buffers)
        wide = vectors and count >= _LANES
        with T.parallel(-(-count // _CHUNK)) as step:
            first, size = T.bind(step * _CHUNK), T.bind(tirx.min(count - step * _CHUNK, _CHUNK))
            if not wide:
                with T.serial(size) as i:
                    T.buffer_store(out, table[data[first + i].astype("int32")], [first + i])
            else:
                parts = [T.bind(tirx.BufferLoad(table, [tirx.Ramp(tirx.const(_LANES * i, "int32"), 1, _LANES)])) for i in range(4)]
                with T.serial((size + (_LANES - 1)) // _LANES) as i:
                    at = T.bind(tirx.min(first + i * _LANES, count - _LANES))
                    index = T.bind(tirx.BufferLoad(data, [tirx.Ramp(at, 1, _LANES)]))
                    low, high = (_of_128(parts[2 * half], index, parts[2 * half + 1]) for half in (0, 1))
                    upper = index >= tirx.Broadcast(tirx.const(128, "uint8"), _LANES)
                    T.buffer_store(out, tirx.Select(upper, high, low), [tirx.Ramp(at, 1, _LANES)])
    return builder.get()


def _of_128(low: Any, index: Any, high: Any) -> Any:
    """Entries of two vectors by the lower seven bits of an index."""
    return tirx.call_llvm_pure_intrin("uint8x64", "llvm.x86.avx512.vpermi2var.qi.512", low, index, high)
