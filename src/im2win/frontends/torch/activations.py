"""Finds activations in traced graphs: one function or module of the table, or several nodes that compute one.

See `im2win.spec.recognition`.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import fx, nn

from im2win.frontends.torch.plain import DTYPES
from im2win.spec.activations import ACTIVATIONS, Activation, Operator
from im2win.spec.recognition import LONGEST, POINTS, recognised

_functional = nn.functional
_SHAPE = (2, 3, 5, 7)  # of `POINTS` as a tensor: all sizes differ, so that transpositions and reshapes are detected


@functools.cache
def _functions() -> dict[Any, list[tuple[Activation, Operator]]]:
    """Activations of the table by the function, or the name of the method, that a node calls."""
    found: dict[Any, list[tuple[Activation, Operator]]] = {}
    for row in ACTIVATIONS.values():
        for operator in row.torch:
            for name in (operator.name, operator.name + "_"):
                packet = getattr(torch.ops.aten, name, None)
                aten = None if packet is None else getattr(packet, "default", None)
                targets = {getattr(torch, name, None), getattr(_functional, name, None), aten, packet}
                for target in (name if hasattr(torch.Tensor, name) else None, *targets):
                    if target is not None:
                        found.setdefault(target, []).append((row, operator))
    return found


def of_module(module: nn.Module) -> str | None:
    """The activation that a module computes, as a word of a problem's key; None if it is none of the table's."""
    for row in ACTIVATIONS.values():
        for operator in row.torch:
            if operator.module and type(module) is getattr(nn, operator.module):
                parameters = operator.parameters({name: getattr(module, name) for name in operator.arguments})
                if parameters is not None:
                    return row.key(*parameters)
    return None


def of_call(node: fx.Node) -> str | None:
    """The activation of a call of a function or method with a tensor as its first argument; None if it is none of the table's."""
    for row, operator in _functions().get(node.target, ()):
        given = dict(zip(operator.arguments, node.args[1:], strict=False)) | node.kwargs
        parameters = operator.parameters(given)
        if parameters is not None:
            return row.key(*parameters)
    return None


def taken_apart(
    root: nn.Module, first: fx.Node, dtype: torch.dtype, writers: Collection[fx.Node], strange: Collection[fx.Node]
) -> tuple[str, list[fx.Node]] | None:
    """The activation of `first` that several later nodes compute together, and these nodes in the graph's order; None if there is none.

    If one match is the beginning of another, the longer one is returned.

    Args:
        dtype: of the tensors.
        writers: nodes of the graph that may write into memory. Such a node is accepted only if it can write only into its first argument,
            which no other node reads.
        strange: nodes that are never accepted, nor evaluated at other arguments.
    """
    known: dict[fx.Node, Any] = {first: torch.from_numpy(POINTS).reshape(_SHAPE)}
    numbers: set[float] = set()
    longest = None
    nodes = list(first.graph.nodes)
    for node in nodes[nodes.index(first) + 1 :]:
        inputs = node.all_input_nodes
        if not any(one in known for one in inputs):
            continue
        alone = node.args and node.args[0] in known and len(node.args[0].users) == 1
        if len(known) > LONGEST or node in strange or not all(one in known for one in inputs) or (node in writers and not alone):
            break
        made = _computed(root, node, known, node in writers)
        if made is None:
            break
        numbers |= set(_numbers((node.args, node.kwargs)))
        known[node] = made
        if all(user in known for one in known if one is not node for user in one.users):
            word = recognised(made.reshape(-1).numpy(), numbers, DTYPES.get(dtype, "float32"))
            if word is not None:
                longest = word, list(known)[1:]
    return longest


def _computed(root: nn.Module, node: fx.Node, known: Mapping[fx.Node, Any], writes: bool) -> Any | None:
    """The node's output at `POINTS`.

    None if it is no float64 tensor of their shape, or if it shares its input's memory without writing to it.
    """
    given = {one: known[one].clone() for one in node.all_input_nodes}
    try:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda one: given[one])
        with torch.no_grad():
            if node.op == "call_function":
                made = node.target(*args, **kwargs)  # type: ignore[operator]
            elif node.op == "call_method":
                made = getattr(args[0], str(node.target))(*args[1:], **kwargs)
            elif node.op == "call_module":
                made = root.get_submodule(str(node.target))(*args, **kwargs)
            else:
                return None
    except Exception:  # PyTorch's functions raise any class for arguments that they refuse
        return None
    if not isinstance(made, torch.Tensor) or made.shape != _SHAPE or made.dtype is not torch.float64:
        return None
    return made if writes or all(made.data_ptr() != one.data_ptr() for one in given.values()) else None


def _numbers(value: Any) -> Iterable[float]:
    if isinstance(value, int | float):
        yield float(value)
    elif isinstance(value, tuple | list):
        for one in value:
            yield from _numbers(one)
    elif isinstance(value, dict):
        yield from _numbers(tuple(value.values()))
