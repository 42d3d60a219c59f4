"""Finds the convolutions of quantised modules in traced graphs, with what follows them up to the quantisation of their outputs.

There are two forms. Graphs that `torch.export` and a quantiser made (PT2E) compute with real numbers between the operators
`quantized_decomposed.dequantize_per_tensor` and `quantize_per_tensor`. Modules of `torch.ao.nn.quantized` take and return PyTorch's own
quantised tensors.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import fx, nn

from im2win.frontends.quantisation import Step, Steps
from im2win.frontends.torch import tracing
from im2win.frontends.torch.integers import INTEGERS, Filters, IntegerSource, Quantised
from im2win.frontends.torch.patterns import (
    CONVOLUTIONS_2D,
    Pattern,
    argument_of,
    grown,
    numbers_of_call,
    pair_of,
    sides_of,
    slot_of,
    with_activation,
    with_addition,
    writes,
)
from im2win.frontends.torch.source import Slot, Source
from im2win.frontends.torch.tracing import Traced
from im2win.spec.conv2d import ConvError
from im2win.spec.dtypes import ELEMENT_TYPES

_MODULES = ("torch.ao.nn.quantized", "torch.ao.nn.intrinsic.quantized")  # have Conv2d, and ConvReLU2d
_ACTIVATIONS = {"Conv2d": "none", "ConvReLU2d": "relu"}


def quantised_patterns(traced: Traced, taken: Collection[fx.Node]) -> tuple[list[Pattern], list[tuple[str, str]]]:
    """The convolutions of integers, in the order of the graph; and names and reasons of those that no operator computes.

    Args:
        taken: nodes that other operators compute.
    """
    found: list[Pattern] = []
    refused: list[tuple[str, str]] = []
    nodes = set(taken)
    for node in traced.graph.nodes:
        try:
            pattern = _of_module(traced, node) or _of_operators(traced, node, nodes)
        except ConvError as error:
            refused.append((_name_of(node), str(error)))
            continue
        if pattern is not None:
            nodes |= set(pattern.nodes)
            found.append(pattern)
    return found, refused


def _name_of(node: fx.Node) -> str:
    """Path of a convolution's module, of its bias' module, or its node's name."""
    if node.op == "call_module":
        return str(node.target)
    bias = node.args[2] if len(node.args) > 2 else None
    return str(bias.target).rpartition(".")[0] or node.name if isinstance(bias, fx.Node) and bias.op == "get_attr" else node.name


# --- PyTorch's quantised modules


@functools.cache
def _classes() -> dict[type, str]:
    """Classes of quantised convolutions over two dimensions, with the activation that each has; none where PyTorch has no such module."""
    found: dict[type, str] = {}
    for home in _MODULES:
        try:
            module = importlib.import_module(home)
        except ImportError:
            continue
        found |= {getattr(module, name): word for name, word in _ACTIVATIONS.items() if hasattr(module, name)}
    return found


@dataclass(frozen=True)
class _PackedSlot(Slot):
    """The filters of a quantised module, which PyTorch keeps packed."""

    def __call__(self) -> Any:
        """Unpacks them."""
        return self.owner.weight()  # type: ignore[operator]


def _of_module(traced: Traced, node: fx.Node) -> Pattern | None:
    if node.op != "call_module":
        return None
    conv: Any = traced.module.get_submodule(str(node.target))
    kind, x = type(conv), argument_of(node, 0, "input")
    home = kind.__module__
    if kind not in _classes():
        if any(home.startswith(one) for one in _MODULES) and "Conv" in kind.__name__:
            raise ConvError(f"a quantised {kind.__name__}, which is none over two dimensions of quantised inputs")
        return None
    if not isinstance(x, fx.Node):
        return None
    if conv.padding_mode != "zeros":
        raise ConvError(f"padding mode {conv.padding_mode!r}")
    if conv._forward_hooks or conv._forward_pre_hooks:
        raise ConvError("it has hooks")
    if x not in traced.steps:
        raise ConvError("its input is quantised by channel")
    (step, zero), (shape, dtype, _) = traced.steps[x], traced.facts[x]
    data = Steps(np.array([step], np.float32), np.array([zero]), 0)
    dilation = pair_of(conv.dilation)
    source = IntegerSource(
        _PackedSlot(conv, "weight"), None, pair_of(conv.stride), sides_of(conv.padding, tuple(conv.kernel_size), dilation), dilation,
        conv.groups, activation=_classes()[kind], data=data,
        out=Quantised(float(conv.scale), int(conv.zero_point), INTEGERS[dtype]), run=functools.partial(_forward, conv),
        text=str(conv), read=functools.partial(_packed, conv), state=functools.partial(_state, conv), whole=True,
    )  # fmt: skip
    source.problem(shape, dtype, channels_last=True)
    return Pattern(str(node.target), [node], x, source)


def _forward(conv: Any, x: Any, residual: Any) -> Any:
    return conv(x)


def _packed(conv: Any) -> Filters:
    """Filters and bias of a quantised module."""
    weight, bias = conv.weight(), conv.bias()
    stored = weight.int_repr().numpy()
    if weight.qscheme() == torch.per_tensor_affine:
        steps = Steps(np.array([weight.q_scale()], np.float32), np.array([weight.q_zero_point()]), 0)
    else:
        zeros = weight.q_per_channel_zero_points().numpy().astype(np.int64)
        steps = Steps(weight.q_per_channel_scales().numpy().astype(np.float32), zeros, weight.q_per_channel_axis())
        if steps.axis != 0:
            raise ConvError("its filters are quantised along another axis than that of the output's channels")
    return Filters(stored, steps, None if bias is None else bias.detach().numpy().astype(np.float64))


def _state(conv: Any) -> tuple[Any, ...]:
    """What changes when a quantised module's parameters do; the object is held, so that no other gets its address."""
    return conv._packed_params, float(conv.scale), int(conv.zero_point)


# --- operators between pairs of quantisation and its inverse


def _operator(name: str, overload: str = "default") -> Any:
    """An operator of `torch.ops.quantized_decomposed`; None where PyTorch has none of that name, or nothing has loaded these yet."""
    packet = getattr(torch.ops.quantized_decomposed, name, None)
    return getattr(packet, overload, None)


def _calls(node: Any, *names: str) -> bool:
    if not isinstance(node, fx.Node) or node.op != "call_function":
        return False
    return any(node.target is not None and node.target is _operator(name) for name in names)


def _of_operators(traced: Traced, node: fx.Node, taken: Collection[fx.Node]) -> Pattern | None:
    if node.op != "call_function" or node.target not in CONVOLUTIONS_2D:
        return None
    x, weight, bias, *numbers = numbers_of_call(node)
    if not _calls(weight, "dequantize_per_channel", "dequantize_per_tensor"):
        return None
    if not _calls(x, "dequantize_per_tensor"):
        raise ConvError("its filters are quantised and its input is not, or by computed scales")
    scale, zero = x.args[1:3]
    integers = x.args[0]
    shift = None if bias is None else slot_of(traced.module, bias)
    if not isinstance(scale, float) or not isinstance(zero, int) or not isinstance(integers, fx.Node):
        raise ConvError("its input is quantised by computed scales")
    if bias is not None and shift is None:
        raise ConvError("its bias is computed")
    held, read = _reader_of(traced.module, weight, shift)
    stride, padding, dilation, groups = numbers
    try:
        sides = sides_of(padding, tuple(held[0]().shape[2:]), pair_of(dilation))
    except (TypeError, ValueError):
        raise ConvError(f"padding {padding!r}") from None
    source = IntegerSource(
        held[0], shift, pair_of(stride), sides, pair_of(dilation), int(groups), held=held, read=read, run=_unset,
        data=Steps(np.array([scale], np.float32), np.array([zero]), 0),
    )  # fmt: skip
    begun = Pattern(_name_of(node), [node], integers, source, operands=(x, weight))
    pattern = grown(traced, begun, taken, (with_addition, with_activation))
    return _with_own_path(traced, _requantised(traced, pattern) or pattern)


def _unset(x: Any, residual: Any) -> Any:
    """What a source runs until the whole pattern is known."""
    raise AssertionError


def _reader_of(root: nn.Module, node: fx.Node, bias: Slot | None) -> tuple[tuple[Slot, ...], Callable[[], Filters]]:
    """The tensors that hold quantised filters and their bias, and what reads them."""
    by_channel = _calls(node, "dequantize_per_channel")
    stored = slot_of(root, node.args[0])
    if stored is None or stored().dtype not in INTEGERS:
        raise ConvError("its filters are quantised at every call: let convert_pt2e fold that (fold_quantize=True)")
    held: list[Slot] = [stored]
    given: list[Slot | float | int | None] = [stored, bias]
    for value in node.args[1:3]:
        slot = slot_of(root, value) if isinstance(value, fx.Node) else None
        if slot is not None:
            held.append(slot)
        elif value is not None and not isinstance(value, int | float):
            raise ConvError("the scales of its filters are computed")
        given.append(slot if slot is not None else value)  # type: ignore[arg-type]
    if by_channel and node.args[3] != 0:
        raise ConvError("its filters are quantised along another axis than that of the output's channels")
    return (*held, *(() if bias is None else (bias,))), functools.partial(_decomposed, given)


def _decomposed(given: list[Any]) -> Filters:
    """Filters and bias of a pair of operators, from slots and numbers: filters, bias, scales, zero points."""
    stored, bias, scale, zero = (one().detach().cpu().numpy() if isinstance(one, Slot) else one for one in given)
    zeros = np.zeros(1, np.int64) if zero is None else np.atleast_1d(np.asarray(zero)).astype(np.int64)
    steps = Steps(np.atleast_1d(np.asarray(scale, np.float32)), zeros, 0)
    return Filters(stored, steps, None if bias is None else bias.astype(np.float64))


def _requantised(traced: Traced, pattern: Pattern) -> Pattern | None:
    """The pattern with the quantisation of its outputs; None if nothing quantises them in a way that integers can."""
    readers = list(pattern.nodes[-1].users)
    if len(readers) != 1 or not _calls(readers[0], "quantize_per_tensor"):
        return None
    node = readers[0]
    given: tuple[Any, ...] = tuple(node.args)
    step, zero, least, most, dtype = given[1:6]
    name = INTEGERS.get(dtype)
    if name is None or (least, most) != ELEMENT_TYPES[name].limits or not isinstance(step, float) or not isinstance(zero, int):
        return None
    added, before, operands = pattern.added, None, pattern.operands
    if added is not None:
        if not _calls(added, "dequantize_per_tensor") or not isinstance(added.args[1], float) or added.args[5] != dtype:
            return None
        operands, before, added = (*operands, added), Step(added.args[1], int(added.args[2]), name), added.args[0]  # type: ignore[arg-type,assignment]
    source = replace(pattern.source, out=Quantised(step, zero, name, before))  # type: ignore[call-arg]
    assert isinstance(source, IntegerSource)
    order = list(traced.graph.nodes)
    between = order[order.index(pattern.nodes[0]) : order.index(node)]
    shape, kind, _ = traced.facts[pattern.x]
    if any(writes(traced.module, one) for one in between if one not in pattern.nodes):
        return None
    try:
        source.problem(shape, kind, channels_last=False)
    except ConvError:
        return None
    return replace(pattern, nodes=[*pattern.nodes, node], source=source, added=added, operands=operands)


def _with_own_path(traced: Traced, pattern: Pattern) -> Pattern:
    """The pattern with what the module itself runs there.

    Raises:
        ConvError: no operator computes it.
    """
    source: Source = pattern.source
    assert isinstance(source, IntegerSource)
    shape, kind, _ = traced.facts[pattern.x]
    source.problem(shape, kind, channels_last=False)
    order = {node: place for place, node in enumerate(traced.graph.nodes)}
    nodes = sorted({*pattern.operands, *pattern.nodes}, key=order.__getitem__)
    run = tracing.alone(traced, replace(pattern, nodes=nodes))
    if run is None:
        raise ConvError("what is computed in between is read elsewhere")
    text = "; ".join(str(node.target) for node in nodes)
    return replace(pattern, source=replace(source, run=functools.partial(run, traced.module), text=text))
