"""Convolutions of a module that no conv call site computes, of every kind, and why: what a report lists beside the replaced ones."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as hooks
from torch.nn.modules.conv import _ConvNd
from torch.overrides import TorchFunctionMode

from im2win.frontends.torch.patterns import source_of
from im2win.frontends.torch.source import Slot
from im2win.frontends.torch.tracing import copies

UNREACHED = "the example did not reach it"
_KINDS = {
    getattr(torch, f"conv{words}{rank}d"): f"a {kind}convolution over {rank} dimension{'s' if rank > 1 else ''}"
    for words, kind in (("", ""), ("_transpose", "transposed "))
    for rank in (1, 2, 3)
}


class _Calls(TorchFunctionMode):
    """Notes the calls of PyTorch's convolutions, each with the innermost module that makes it.

    Attributes:
        seen: module, function and filters of each call.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[nn.Module | None, Any, Any]] = []
        self._modules: list[nn.Module] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _KINDS:
            weight = args[1] if len(args) > 1 else (kwargs or {}).get("weight")
            self.seen.append((self._modules[-1] if self._modules else None, func, weight))
        return func(*args, **(kwargs or {}))

    def run(self, module: nn.Module, example: tuple[Any, ...]) -> None:
        """Calls the module on the example."""

        def entered(inner: nn.Module, _: Any) -> None:
            self._modules.append(inner)

        def left(*_: Any) -> None:
            self._modules.pop()

        registered = hooks.register_module_forward_pre_hook(entered), hooks.register_module_forward_hook(left)
        try:
            with self:
                module(*copies(example))
        finally:
            for one in registered:
                one.remove()


def remaining(
    module: nn.Module, example: tuple[Any, ...], replaced: Collection[Slot], before: Collection[nn.Module] = ()
) -> Iterator[tuple[str, str]]:
    """Names and reasons of the convolutions that no conv call site computes.

    They are all convolution modules, those that the example does not reach, too, and calls of functions such as
    `torch.nn.functional.conv_transpose2d` in other modules.

    Args:
        replaced: the filters of the conv call sites.
        before: convolutions that an earlier `optimize` replaced.
    """
    calls = _Calls()
    calls.run(module, example)
    owners = {slot.owner for slot in replaced}
    filters = {id(slot()) for slot in replaced}
    reached = {inner: func for inner, func, _ in calls.seen if isinstance(inner, _ConvNd)}
    for name, one in module.named_modules():
        if one in before:
            yield name, "optimised before"
        elif isinstance(one, _ConvNd) and one not in owners:
            yield name, _reason(one) or (_KINDS[reached[one]] if one in reached else UNREACHED)
    names, paths = {one: name for name, one in module.named_modules()}, {id(one): name for name, one in module.named_parameters()}
    listed = set()
    for inner, func, weight in calls.seen:
        if isinstance(inner, _ConvNd) or id(weight) in filters:
            continue
        path = paths.get(id(weight)) or ".".join(filter(None, (names.get(inner, "") if inner is not None else "", func.__name__)))
        if path not in listed:
            listed.add(path)
            yield path, _reason_of_call(func, is_parameter=id(weight) in paths)


def _reason(conv: nn.Module) -> str:
    found = source_of(conv)
    return found if isinstance(found, str) else UNREACHED


def _reason_of_call(func: Any, *, is_parameter: bool) -> str:
    if func not in (torch.conv1d, torch.conv2d):
        return _KINDS[func]
    if not is_parameter:
        return "its filters are computed"
    return f"a call of {func.__name__} outside a traced graph, or with computed arguments"
