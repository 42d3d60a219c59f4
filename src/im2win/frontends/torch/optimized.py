"""What an optimised module adds to the module that it was made from."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from im2win.frontends.torch import conv_op
from im2win.frontends.torch.bound import note
from im2win.frontends.torch.call_site import CallSite, by_place
from im2win.frontends.torch.report import Report
from im2win.frontends.torch.source import as_image, as_line
from im2win.frontends.torch.tracing import Call

HOLDER = "_im2win"
Graph = Callable[[Mapping[str, Call]], Callable[..., Any]]  # builds a module's graph with these calls at its conv call sites


class Holder:
    """The state that an optimised module adds: its conv call sites, also as attributes, the functions that run them, and the report.

    Attributes:
        given: number of arguments of the example.
        forward: runs the call sites; None where submodules run them.
        by_place: as `forward`, but names the call sites by number, so that compiled programs have nothing to check at a call.
    """

    def __init__(self, report: Report, given: int = -1, graph: Graph | None = None, sites: Mapping[str, CallSite] | None = None) -> None:
        self.report, self.given, self.sites, self._graph = report, given, dict(sites or {}), graph
        vars(self).update(self.sites)
        self.forward = None if graph is None else graph({name: ("call_module", f"{HOLDER}.{name}", ()) for name in self.sites})
        self._name_places()

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._name_places()

    @property
    def names(self) -> list[str]:
        """The call sites with the artefacts that they run on the example."""
        return [f"{name} {' '.join(site.artefacts)}" for name, site in self.sites.items()]

    def _name_places(self) -> None:
        """Builds `by_place` for the current call sites; those of a copy have their own numbers."""
        calls: dict[str, Call] = {name: ("call_function", conv_op.at_site, (site.place,)) for name, site in self.sites.items()}
        self.by_place = None if self._graph is None else self._graph(calls)


class Optimized(nn.Module):
    """Mixin of the class of an optimised module that was traced.

    In training mode, and for calls with more or fewer arguments than the example had, the module's own `forward` runs.
    """

    _im2win: Holder

    @property
    def im2win_report(self) -> Report:
        """What `optimize` did with each convolution."""
        return self._im2win.report

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the module's own `forward`."""
        held = self._im2win
        run = held.by_place if by_place() else held.forward
        if self.training or run is None:
            return super().forward(*args, **kwargs)
        if len(args) + len(kwargs) != held.given:
            name = type(self).__name__
            note(f"arguments {name}", f"{name}: called with other arguments than the example's: PyTorch computes such calls")
            return super().forward(*args, **kwargs)
        return run(self, *args, **kwargs)


def copied(self: Any, memo: dict[int, Any]) -> Any:
    """A deep copy of an optimised module with all its attributes."""
    result: Any = object.__new__(type(self))
    memo[id(self)] = result
    result.__dict__.update(copy.deepcopy(self.__dict__, memo))
    return result


class OptimizedConv2d(nn.Conv2d):
    """Replaces one convolution of a module tree, and shares the parameters of the one that it replaces."""

    _im2win_site: CallSite

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """As `Conv2d.forward`."""
        if self.training:
            return super().forward(input)
        return self._im2win_site(input)


class OptimizedConv1d(nn.Conv1d):
    """As `OptimizedConv2d`, for a convolution over one dimension."""

    _im2win_site: CallSite

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """As `Conv1d.forward`."""
        if self.training:
            return super().forward(input)
        return as_line(self._im2win_site(as_image(input)))


REPLACEMENTS = {nn.Conv1d: OptimizedConv1d, nn.Conv2d: OptimizedConv2d}
