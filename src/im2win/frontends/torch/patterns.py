"""Finds the nodes of a traced graph that one operator can compute: convolution, normalisation, addition, activation.

A node is fused only if no other node reads its input. The operator runs at the position of its last node. No node in between may write into
memory, since the convolution would then read other values.
"""

from __future__ import annotations

import operator
import types
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn

from im2win.frontends.torch import activations, tracing
from im2win.frontends.torch.source import Slot, Source
from im2win.frontends.torch.tracing import Traced

_functional = nn.functional
_aten = torch.ops.aten  # the operators in graphs of `torch.export`
_OVER_LINES: tuple[Any, ...] = (torch.conv1d, _functional.conv1d, _aten.conv1d.default, _aten.conv1d.padding)
CONVOLUTIONS_2D: tuple[Any, ...] = (torch.conv2d, _functional.conv2d, _aten.conv2d.default, _aten.conv2d.padding)
_CONVOLUTIONS: tuple[Any, ...] = (*CONVOLUTIONS_2D, *_OVER_LINES)
_ADDITIONS: tuple[Any, ...] = (operator.add, operator.iadd, torch.add, "add", "add_", _aten.add.Tensor, _aten.add_.Tensor)
_INTO_FIRST: tuple[Any, ...] = (operator.iadd, "add_", _aten.add_.Tensor)
_NORMS: dict[Any, tuple[str, ...]] = {
    _functional.batch_norm: ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps"),
    _aten.batch_norm.default: ("input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps"),
}
_NOTHING = (nn.Identity, nn.Dropout, nn.Dropout2d)
_WRITERS: tuple[Any, ...] = (
    operator.setitem, operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv, operator.imod, operator.ipow,
    operator.imatmul, operator.iand, operator.ior, operator.ixor, operator.ilshift, operator.irshift, operator.iconcat,
)  # fmt: skip


@dataclass
class Pattern:
    """The nodes that one operator computes: the convolution first, then the others; the last node's output is the operator's output.

    Attributes:
        name: of the convolution's module, or of its weight.
        operands: nodes before the convolution that the operator makes needless, where nothing else reads them.
    """

    name: str
    nodes: list[fx.Node]
    x: fx.Node
    source: Source
    added: fx.Node | None = None
    operands: tuple[fx.Node, ...] = ()


def patterns_of(traced: Traced) -> list[Pattern]:
    """Every convolution that an operator may compute, each with the longest safe epilogue, in the order of the graph."""
    found = []
    taken: set[fx.Node] = set()
    for node in traced.graph.nodes:
        begun = _convolution(traced.module, node)
        if begun is not None:
            pattern = grown(traced, begun, taken)
            taken |= set(pattern.nodes)
            found.append(pattern)
    return found


Step = Callable[[Traced, Pattern, fx.Node], "Pattern | None"]


def grown(traced: Traced, pattern: Pattern, taken: Collection[fx.Node], steps: Sequence[Step] | None = None) -> Pattern:
    """The longest pattern that begins with the convolution of `pattern`.

    Args:
        taken: nodes that other operators compute.
        steps: what may follow, in order; normalisation, addition and activation if None.
    """
    nodes = list(traced.graph.nodes)
    order = {node: i for i, node in enumerate(nodes)}
    best = pattern
    for step in (_with_norm, with_addition, with_activation) if steps is None else steps:
        passed, reader = _reader(traced.module, best)
        trial = replace(best, nodes=[*best.nodes, *passed])
        longer = step(traced, trial, reader) if reader is not None and reader not in taken else None
        if longer is not None:
            between = nodes[order[longer.nodes[0]] : order[longer.nodes[-1]]]
            if not any(writes(traced.module, one) for one in between if one not in longer.nodes):
                best = longer
    return best if best.source.activation != "none" else _with_activation_taken_apart(traced, best, taken)


def _with_activation_taken_apart(traced: Traced, pattern: Pattern, taken: Collection[fx.Node]) -> Pattern:
    """The pattern with several nodes that compute an activation; the pattern itself if there are none."""
    passed, _ = _reader(traced.module, pattern)
    last = [*pattern.nodes, *passed][-1]
    if last not in traced.facts:
        return pattern
    order = list(traced.graph.nodes)
    writers = {node for node in order if writes(traced.module, node)}
    strange = {node for node in writers if not _writes_into_first(traced.module, node)}
    found = activations.taken_apart(traced.module, last, traced.facts[last][1], writers, strange)
    if found is None or any(node in taken for node in found[1]):
        return pattern
    nodes = [*pattern.nodes, *passed, *found[1]]
    between = order[order.index(nodes[0]) : order.index(nodes[-1])]
    if any(one in writers and one not in nodes for one in between):
        return pattern
    return replace(pattern, nodes=nodes, source=replace(pattern.source, activation=found[0]))


def _reader(module: nn.Module, pattern: Pattern) -> tuple[list[fx.Node], fx.Node | None]:
    """The only node that reads a pattern's output, and before it modules that do nothing in eval mode."""
    passed: list[fx.Node] = []
    last = pattern.nodes[-1]
    while len(last.users) == 1:
        reader = next(iter(last.users))
        if reader.op != "call_module" or not _is_plain(_module(module, reader), _NOTHING) or _module(module, reader).training:
            return passed, reader
        passed.append(reader)
        last = reader
    return passed, None


def _convolution(root: nn.Module, node: fx.Node) -> Pattern | None:
    """A pattern of one node, if that is a convolution over one or two dimensions with parameters of its own."""
    if node.op == "call_module":
        conv = _module(root, node)
        source = source_of(conv)
        x = argument_of(node, 0, "input")
        return Pattern(str(node.target), [node], x, source) if isinstance(source, Source) and isinstance(x, fx.Node) else None
    if node.op == "call_function" and node.target in _CONVOLUTIONS:
        return _functional_convolution(root, node)
    return None


def source_of(conv: nn.Module) -> Source | str:
    """The convolution that a module computes; or the reason why it is left to PyTorch, "" where it is of no kind that im2win computes."""
    kind = next((one for one in (nn.Conv1d, nn.Conv2d) if isinstance(conv, one)), None)
    if kind is None:
        return ""
    if type(conv) is not kind:
        return f"a subclass of {kind.__name__} ({type(conv).__name__})"
    if _hooked(conv):
        return "it has hooks"
    if conv.padding_mode != "zeros":
        return f"padding mode {conv.padding_mode!r}"
    if "weight" not in conv._parameters:
        return "its weight is no parameter of its own"
    return _source(Slot(conv, "weight"), Slot(conv, "bias") if conv.bias is not None else None, *_numbers_of(conv), line=kind is nn.Conv1d)


def _numbers_of(conv: Any) -> tuple[Any, Any, Any, int]:
    return conv.stride, conv.padding, conv.dilation, conv.groups


def _source(weight: Slot, bias: Slot | None, stride: Any, padding: Any, dilation: Any, groups: int, *, line: bool) -> Source:
    """The source of a convolution, whose numbers are in PyTorch's notation.

    Raises:
        TypeError, ValueError: a number is none that PyTorch documents.
    """
    if line:
        stride, padding, dilation = over_images(stride, padding, dilation)
    kernel = ((1,) if line else ()) + tuple(weight().shape[2:])
    sides = sides_of(padding, kernel, pair_of(dilation))
    return Source(weight, bias, pair_of(stride), sides, pair_of(dilation), int(groups), line=line)


def over_images(stride: Any, padding: Any, dilation: Any) -> tuple[Any, Any, Any]:
    """The numbers of a convolution over one dimension, each an integer or a sequence of one, for images of one row."""

    def one_of(number: Any) -> int:
        (one,) = (number,) if isinstance(number, int) else number
        return int(one)

    return (1, one_of(stride)), padding if isinstance(padding, str) else (0, one_of(padding)), (1, one_of(dilation))


def _functional_convolution(root: nn.Module, node: fx.Node) -> Pattern | None:
    x, filters, shift, *numbers = numbers_of_call(node)
    weight, bias = slot_of(root, filters), slot_of(root, shift)
    if not isinstance(x, fx.Node) or weight is None or (shift is not None and bias is None) or any(map(_has_nodes, numbers)):
        return None
    stride, padding, dilation, groups = numbers
    try:
        source = _source(weight, bias, stride, padding, dilation, groups, line=node.target in _OVER_LINES)
    except (TypeError, ValueError):
        return None
    return Pattern(f"{filters.target}", [node], x, source)


def numbers_of_call(node: fx.Node) -> list[Any]:
    """The arguments of a call of a convolution's function: input, weight, bias, stride, padding, dilation, groups."""
    names = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
    values: dict[str, Any] = {"bias": None, "stride": 1, "padding": 0, "dilation": 1, "groups": 1}
    values |= dict(zip(names, node.args, strict=False)) | node.kwargs
    return [values[name] for name in names]


def _with_norm(traced: Traced, pattern: Pattern, node: fx.Node) -> Pattern | None:
    if node.op == "call_module":
        changes = _norm_of_module(_module(traced.module, node))
    elif node.op == "call_function" and node.target in _NORMS:
        changes = _norm_of_function(traced.module, node, pattern.nodes[-1])
    else:
        return None
    return replace(pattern, nodes=[*pattern.nodes, node], source=replace(pattern.source, **changes)) if changes else None


def _norm_of_module(norm: nn.Module) -> dict[str, Any]:
    """Fields of a `Source`; none where a module is no batch normalisation with fixed statistics."""
    if not _is_plain(norm, tracing.norms()) or norm.training or norm.running_mean is None:
        return {}
    scale, shift = (Slot(norm, name) if getattr(norm, name) is not None else None for name in ("weight", "bias"))
    statistics = {"mean": Slot(norm, "running_mean"), "variance": Slot(norm, "running_var"), "counter": _counter(norm)}
    return {"scale": scale, "shift": shift, **statistics, "eps": norm.eps, "norm": norm}


def _norm_of_function(root: nn.Module, node: fx.Node, x: fx.Node) -> dict[str, Any]:
    """Fields of a `Source` for a call, which has no module that could enter training mode."""
    slotted = ("running_mean", "running_var", "weight", "bias")
    values: dict[str, Any] = {"input": None, **dict.fromkeys(slotted), "training": False, "momentum": 0.1, "eps": 1e-5}
    values |= dict(zip(_NORMS[node.target], node.args, strict=False)) | node.kwargs
    mean, variance, scale, shift = slots = [slot_of(root, values[name]) for name in slotted]
    known = all((slot is None) == (values[name] is None) for slot, name in zip(slots, slotted, strict=True))
    fixed = values["training"] is False and isinstance(values["eps"], float) and values["input"] is x
    if not (known and fixed) or mean is None or variance is None:
        return {}
    statistics = {"mean": mean, "variance": variance, "counter": _counter(mean.owner)}
    return {"scale": scale, "shift": shift, **statistics, "eps": values["eps"]}


def with_addition(traced: Traced, pattern: Pattern, node: fx.Node) -> Pattern | None:
    last = pattern.nodes[-1]
    if node.op not in ("call_function", "call_method") or node.target not in _ADDITIONS or len(node.args) != 2 or node.kwargs:
        return None
    first, second = node.args
    if (node.target in _INTO_FIRST and first is not last) or first is second:  # the addition would write into the other operand's memory
        return None
    other = second if first is last else first
    if not isinstance(other, fx.Node) or traced.facts.get(other) != traced.facts.get(last) or other not in traced.facts:
        return None
    return replace(pattern, nodes=[*pattern.nodes, node], source=replace(pattern.source, residual=True), added=other)


def with_activation(traced: Traced, pattern: Pattern, node: fx.Node) -> Pattern | None:
    name = None
    if node.op == "call_module":
        module = _module(traced.module, node)
        name = activations.of_module(module) if not _hooked(module) else None
    elif node.op in ("call_function", "call_method") and node.args and node.args[0] is pattern.nodes[-1]:
        name = activations.of_call(node)
    if name is None:
        return None
    return replace(pattern, nodes=[*pattern.nodes, node], source=replace(pattern.source, activation=name))


# --- nodes and modules


def argument_of(node: fx.Node, place: int, name: str) -> Any:
    return node.args[place] if len(node.args) > place else node.kwargs.get(name)


def _module(root: nn.Module, node: fx.Node) -> nn.Module:
    return root.get_submodule(str(node.target))


def slot_of(root: nn.Module, node: Any) -> Slot | None:
    """The parameter or buffer that a node reads; None if it reads none."""
    if not isinstance(node, fx.Node) or node.op != "get_attr":
        return None
    path, _, name = str(node.target).rpartition(".")
    owner = root.get_submodule(path)
    return Slot(owner, name) if owner._parameters.get(name) is not None or owner._buffers.get(name) is not None else None


def _counter(norm: nn.Module) -> Slot | None:
    return Slot(norm, "num_batches_tracked") if norm._buffers.get("num_batches_tracked") is not None else None


def _hooked(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks)


def _is_plain(module: nn.Module, kinds: tuple[type[nn.Module], ...]) -> bool:
    """Whether a module is exactly of one of these classes, without hooks."""
    return type(module) in kinds and not _hooked(module)


def _has_nodes(value: Any) -> bool:
    return isinstance(value, fx.Node) or (isinstance(value, tuple | list) and any(map(_has_nodes, value)))


def pair_of(value: Any) -> tuple[int, int]:
    """(vertical, horizontal) from an integer, or one or two of them."""
    first, second = (value, value) if isinstance(value, int) else value if len(value) == 2 else (value[0], value[0])
    return int(first), int(second)


def sides_of(padding: Any, kernel: tuple[int, ...], dilation: tuple[int, int]) -> tuple[int, int, int, int]:
    """Padding in PyTorch's notation as (top, left, bottom, right); for "same" the odd element goes behind, as in PyTorch."""
    if padding == "valid":
        return 0, 0, 0, 0
    if padding == "same":
        total = [step * (taps - 1) for step, taps in zip(dilation, kernel, strict=True)]
        top, left = (one // 2 for one in total)
        return top, left, total[0] - top, total[1] - left
    if isinstance(padding, str):
        raise ValueError(padding)
    vertical, horizontal = pair_of(padding)
    return vertical, horizontal, vertical, horizontal


def _writes_into_first(root: nn.Module, node: fx.Node) -> bool:
    """Whether a node that may write is PyTorch's own function, and writes into its first argument only."""
    if node.op == "call_module":
        return type(_module(root, node)).__module__.startswith("torch.nn") and not _hooked(_module(root, node))
    if node.op == "call_method":
        return True
    if "out" in node.kwargs or node.target is operator.setitem or isinstance(node.target, torch._ops.OpOverload):
        return False
    target: Any = node.target
    return target in _WRITERS or str(getattr(target, "__module__", None) or "torch").split(".")[0] == "torch"


def writes(root: nn.Module, node: fx.Node) -> bool:
    """Whether a node may write into memory that others read. A node that is not known to be pure may."""
    if node.op == "call_module":
        module = _module(root, node)
        return bool(getattr(module, "inplace", False)) or not type(module).__module__.startswith("torch.nn") or _hooked(module)
    if node.op == "call_method":
        return str(node.target).endswith("_") and not str(node.target).endswith("__")
    if node.op != "call_function":
        return False
    target: Any = node.target
    if isinstance(target, torch._ops.OpOverload):
        return bool(target._schema.is_mutable)
    name = str(getattr(target, "__name__", ""))
    told = "out" in node.kwargs or node.kwargs.get("inplace") or any(one is True for one in node.args)  # a positional True may be `inplace`
    if told or target in _WRITERS or name.endswith("_"):
        return True
    home = str(getattr(target, "__module__", None) or "torch")
    return not (isinstance(target, types.BuiltinFunctionType) or home.split(".")[0] in ("torch", "_operator", "operator", "builtins"))
