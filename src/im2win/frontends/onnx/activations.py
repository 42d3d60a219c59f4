"""Reads and writes activations in ONNX graphs: one operator of the table, or several nodes that compute one; see `recognition`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from im2win.frontends.onnx.graph import Graph, attributes_of
from im2win.spec.activations import INPUT, Activation, Step, found, of_onnx
from im2win.spec.arithmetic import Float64
from im2win.spec.recognition import LONGEST, POINTS, recognised

if TYPE_CHECKING:
    from onnx import NodeProto

_Function = Callable[..., Any]

_ELEMENTWISE: dict[str, _Function] = {
    "Add": np.add, "Sub": np.subtract, "Mul": np.multiply, "Div": np.divide, "Pow": np.power, "Neg": np.negative, "Exp": np.exp,
    "Reciprocal": np.reciprocal, "Erf": Float64().erf, "Tanh": np.tanh, "Max": np.maximum, "Min": np.minimum, "Sqrt": np.sqrt,
    "Clip": lambda x, low=-np.inf, high=np.inf: np.minimum(np.maximum(x, low), high), "Identity": lambda x: x,
}  # fmt: skip
"""What activations are taken apart to, of float64 arrays; their attributes, if they have any, are given as inputs."""


def activation_behind(graph: Graph, value: str) -> tuple[str, list[int], str]:
    """The activation after `value`: its word in a problem's key, its nodes, and their output. No other node may read `value`.

    Returns:
        ("none", [], value) if there is none. If one match is the beginning of another, the longer one.
    """
    known = {value: POINTS}
    numbers: set[float] = set()
    taken: list[int] = []
    passed: set[int] = set()
    longest: tuple[str, list[int], str] = ("none", [], value)
    while len(taken) < LONGEST and (reader := _next(graph, known, passed)) is not None:
        index, node = reader
        passed.add(index)
        made = _computed(graph, node, known, numbers, value)
        if made is None:
            continue
        taken.append(index)
        output = node.output[0]
        known[output] = made
        if all(_hidden(graph, name, taken) for name in known if name != output):
            dtype = graph.dtype(value)
            if (word := recognised(made, numbers, dtype)) is not None:
                longest = word, list(taken), output
    return longest


def _next(graph: Graph, known: Mapping[str, Any], passed: set[int]) -> tuple[int, NodeProto] | None:
    """The first node in the graph's order that reads a known value and was not examined before."""
    readers = {index: node for name in known for index, node in graph.readers(name) if index not in passed}
    return min(readers.items()) if readers else None


def _hidden(graph: Graph, name: str, taken: list[int]) -> bool:
    """Whether some of these nodes read a value and no other node does."""
    readers = graph.readers(name)
    return bool(readers) and all(index in taken for index, _ in readers)


def _computed(graph: Graph, node: NodeProto, known: Mapping[str, Any], numbers: set[float], first: str) -> Any | None:
    """The node's output at `POINTS`, if it is computed elementwise from known values and single numbers, which are added to `numbers`."""
    if node.domain not in ("", "ai.onnx"):
        return None
    stated = attributes_of(node)
    inputs = [known[name] if name in known else graph.single(name, first) for name in node.input if name]
    if any(one is None for one in inputs) or len(inputs) != len(node.input):
        return None
    computing = _function(node.op_type, stated)
    if computing is None:
        return None
    function, parameters = computing
    numbers.update(one for one in (*inputs, *parameters) if isinstance(one, float))
    try:
        with np.errstate(all="ignore"):
            return np.asarray(function(*inputs), np.float64)
    except (TypeError, ValueError):  # more inputs than the function has
        return None


def _function(operator: str, stated: Mapping[str, Any]) -> tuple[_Function, tuple[float, ...]] | None:
    """The function of an operator with these attributes, and the activation's parameters if it is an activation."""
    if (named := of_onnx(operator, stated)) is not None:
        return partial(_activated, *named), named[1]
    if operator == "Clip" and stated:  # its bounds are attributes up to operator set 10, inputs since
        return partial(_ELEMENTWISE["Clip"], low=stated.get("min", -np.inf), high=stated.get("max", np.inf)), ()
    return None if stated or operator not in _ELEMENTWISE else (_ELEMENTWISE[operator], ())


def _activated(row: Activation, parameters: tuple[float, ...], x: Any) -> Any:
    return row.formula(Float64(), x, *parameters)


def onnx_nodes(word: str, value: str, first: int) -> tuple[list[tuple[str, list[str], dict[str, Any]]], dict[str, float], int]:
    """The nodes that compute an activation of `value` in ONNX.

    Args:
        first: number of the first node, whose output is called ``step{number}``.

    Returns:
        (operator, inputs, attributes) of each node; constants by name; the operator set that defines them.
    """
    named = found(word)
    assert named is not None, word
    row, parameters = named
    nodes: list[tuple[str, list[str], dict[str, Any]]] = []
    numbers: dict[str, float] = {}
    operator = row.onnx[0] if row.onnx else None

    def write(step: Step) -> str:
        names = []
        for one in step[1:]:
            if isinstance(one, float):
                numbers[f"number{len(numbers)}"] = one
            names.append(value if one == INPUT else write(one) if isinstance(one, tuple) else f"number{len(numbers) - 1}")
        called = operator.called(parameters) if operator is not None and row.written is None else {}
        nodes.append((step[0], names, called))
        return f"step{first + len(nodes) - 1}"

    if row.written is not None:
        write(row.written)
    elif operator is not None:
        write((operator.name, INPUT))
    return nodes, numbers, operator.since if operator is not None and row.written is None else 1
