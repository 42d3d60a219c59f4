"""Every convolution of a module, with what `optimize` did with it: the rows of the report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from im2win.frontends.torch.call_site import CallSite
from im2win.frontends.torch.optimized import HOLDER, REPLACEMENTS
from im2win.frontends.torch.remaining import remaining
from im2win.frontends.torch.report import LayerReport


def rows_of(module: nn.Module, example: tuple[Any, ...], sites: Sequence[CallSite]) -> list[LayerReport]:
    """A row for each problem of a call site, and for each convolution without one."""
    held = [one.__dict__[HOLDER] for one in module.modules() if HOLDER in one.__dict__]
    before = {site.source.weight.owner for one in held for site in one.sites.values()}
    before |= {one for one in module.modules() if isinstance(one, tuple(REPLACEMENTS.values()))}
    others = remaining(module, example, [site.source.weight for site in sites], before)
    return [*(row for site in sites for row in _of_site(site)), *(LayerReport(name, None, "", reason) for name, reason in others)]


def _of_site(site: CallSite) -> Iterator[LayerReport]:
    if not site.prepared:
        yield LayerReport(site.name, None, "", "the example did not reach it")
    for conv, prepared in site.prepared.items():
        found, decision = prepared.found or prepared.decision, prepared.decision
        algorithm = decision.op.method if decision.op is not None else ""
        target = site.source.weight().device.type
        fused, times = site.source.fused, prepared.times
        yield LayerReport(site.name, conv, algorithm, decision.reason, fused, prepared.error, target, times, found.tuned, prepared.against)
