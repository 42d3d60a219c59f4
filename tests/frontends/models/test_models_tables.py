"""Quantised models between convolutions: tables of 256 integers, and operators that move integers, against ONNX Runtime."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from model_graphs import check, compiled, graph, integers, node, peer

from im2win.frontends.models import tables
from im2win.frontends.models.parts import Parts, take_apart
from im2win.frontends.models.source import at_batch
from im2win.frontends.onnx.layers import import_onnx

U8, S8 = np.uint8, np.int8


def quantised(value: str, steps: str, integers: str, real: str) -> list[Any]:
    """A QuantizeLinear and a DequantizeLinear."""
    return [node("QuantizeLinear", f"{value} {steps}", integers), node("DequantizeLinear", f"{integers} {steps}", real)]


STEPS = {"sx": np.float32(1 / 16), "zx": U8(120), "s8": np.float32(1 / 32), "z8": S8(-3), "sy": np.float32(1 / 64), "zy": U8(9)}
SIGMOID = [*quantised("x", "sx zx", "a", "b"), node("Sigmoid", "b", "c"), *quantised("c", "sy zy", "d", "e")]


def parts_of(model: Any) -> Parts:
    return take_apart(at_batch(model, "model", None), 1)


def left(model: Any) -> list[str]:
    """Operators that TVM computes."""
    source = at_batch(model, "model", None)
    return [source.graph.nodes[index].op_type for index in parts_of(model).rest]


@pytest.mark.parametrize(
    ("nodes", "tables_found", "rest"),
    [
        ([*SIGMOID, node("Mul", "b e", "f"), *quantised("f", "s8 z8", "g", "y")], 1, ["QuantizeLinear", "DequantizeLinear"]),
        ([*SIGMOID, node("Mul", "b e", "f"), *quantised("f", "s8 z8", "g", "h"), node("Sub", "h e", "y")], 2, None),
        ([*quantised("x", "s8 z8", "a", "b"), node("HardSwish", "b", "c"), *quantised("c", "sx zx", "d", "y")], 1, None),
        ([*quantised("x", "sx zx", "a", "b"), *quantised("b", "s8 z8", "c", "d"), node("Neg", "d", "y")], 1, None),
        ([*SIGMOID, node("Mul", "x e", "f"), *quantised("f", "s8 z8", "g", "y")], 1, None),
    ],
    ids=["silu", "read-twice", "hardswish", "another-scale", "a-float-beside"],
)
def test_tables(nodes: list[Any], tables_found: int, rest: list[str] | None) -> None:
    model = graph(nodes, {"x": (1, 3, 5, 7)}, STEPS)
    assert len(parts_of(model).tables) == tables_found and (rest is None or left(model) == rest)
    made, feeds = compiled(model), {"x": integers(1, 3, 5, 7)}
    # products often lie in the middle between two integers, which ONNX Runtime rounds to either side
    assert np.abs(made.run(feeds)["y"] - peer(model, feeds)[0]).max() <= (STEPS["s8"] if any(one.op_type == "Mul" for one in nodes) else 0)


@pytest.mark.parametrize(
    "nodes",
    [
        [*quantised("x", "sx zx", "a", "b"), node("Softmax", "b", "c"), *quantised("c", "sy zy", "d", "y")],
        [*quantised("x", "sx zx", "a", "b"), node("Mul", "b v", "c"), *quantised("c", "sy zy", "d", "y")],
        [*quantised("x", "sx zx", "a", "b"), node("Add", "b x", "c"), *quantised("c", "sy zy", "d", "y")],
        [*quantised("x", "sx zx", "a", "y")],
    ],
    ids=["rows", "a-constant-for-each-column", "a-float-beside", "only-quantised"],
)
def test_no_tables(nodes: list[Any]) -> None:
    assert not parts_of(graph(nodes, {"x": (1, 3, 5, 7)}, {**STEPS, "v": np.arange(7, dtype=np.float32)})).tables


def test_only_costly_functions_are_tables_without_vectors_of_bytes() -> None:
    begun = quantised("x", "sx zx", "a", "b")
    for operator, expected in (("Sigmoid", 1), ("Neg", 0)):
        model = graph([*begun, node(operator, "b", "c"), *quantised("c", "s8 z8", "d", "y")], {"x": (1, 3, 5, 7)}, STEPS)
        assert len(take_apart(at_batch(model, "model", None), 1, vectors=False).tables) == expected


@pytest.mark.parametrize("vectors", [True, False])
@pytest.mark.parametrize("count", [1, 63, 64, 16384 + 70])
def test_look_up(count: int, vectors: bool) -> None:
    from ops import host
    from tvm import IRModule, compile, runtime

    from im2win.codegen.llvm import any_alignment, llvm_target
    from im2win.frontends.models.host import CpuKernels

    if vectors and not CpuKernels(host()).vectors_of_bytes:
        pytest.skip("this CPU has no AVX512-VBMI")
    random = np.random.default_rng(count)
    values, data = random.integers(0, 256, 256).astype(U8).view(S8), random.integers(0, 256, count).astype(U8)
    function = tables.look_up(count, ("uint8", "int8"), vectors=vectors).with_attr("global_symbol", "main")
    given = [runtime.tensor(one) for one in (data, values, np.zeros(count, S8))]
    compile(any_alignment(IRModule({"main": function}), 1), llvm_target(host()))["main"](*given)
    assert (given[2].numpy() == values[data]).all()


POOL = {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]}


@pytest.mark.parametrize("zero", [U8(7), S8(-5)], ids=["uint8", "int8"])
def test_integers_are_moved(zero: Any) -> None:
    """Maxima, concatenations, transpositions and views read and write 8 bits; other scales are applied before them."""
    steps = {"sa": np.float32(0.5), "sb": np.float32(0.25), "zero": zero, "shape": np.array([1, 2, 3, 3, 4])}
    nodes = [
        *quantised("x", "sa zero", "a", "b"), node("MaxPool", "b", "c", **POOL), *quantised("c", "sa zero", "d", "e"),
        node("Concat", "e e", "f", axis=1), *quantised("f", "sb zero", "g", "h"), node("Reshape", "h shape", "i"),
        *quantised("i", "sb zero", "j", "k"), node("Transpose", "k", "l", perm=[0, 2, 1, 3, 4]), *quantised("l", "sb zero", "m", "y"),
    ]  # fmt: skip
    model = graph(nodes, {"x": (1, 3, 6, 7)}, steps)
    parts, source = parts_of(model), at_batch(model, "model", None)
    [pool], [view], [join] = parts.pools, parts.views, parts.joins
    assert pool.dtype == str(zero.dtype) and len(parts.tables) == 1
    types = {source.graph.types[name] for name in (pool.output, view.output, join.output)}
    assert types == {import_onnx().helper.np_dtype_to_tensor_dtype(zero.dtype)}
    assert left(model) == ["QuantizeLinear", "Transpose", "DequantizeLinear"]
    check(model)


def test_integers_that_stay() -> None:
    """Values that are read elsewhere, scales by channel, and 16 bits."""
    steps = {"sa": np.float32(0.5), "zero": U8(7), "z16": np.uint16(7)}
    begun = [*quantised("x", "sa zero", "a", "b"), node("MaxPool", "b", "c", **POOL)]
    twice = [*begun, *quantised("c", "sa zero", "d", "e"), node("Add", "e c", "y")]
    wide = [*quantised("x", "sa z16", "a", "b"), node("MaxPool", "b", "c", **POOL), *quantised("c", "sa z16", "d", "y")]
    for nodes, opset in ((twice, 17), (wide, 21)):
        [pool] = parts_of(graph(nodes, {"x": (1, 3, 6, 7)}, steps, opset=opset)).pools
        assert pool.dtype == "float32"
