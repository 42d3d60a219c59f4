"""`im2win.torch.optimize`: a module that computes what the given one does, with its convolutions on im2win's operators."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from im2win.builder.batch import LEAST
from im2win.frontends.torch import conv_op, tracing
from im2win.frontends.torch.bound import log, note
from im2win.frontends.torch.patterns import Pattern, patterns_of, source_of
from im2win.frontends.torch.planning import Dynamic, Planner
from im2win.frontends.torch.report import LayerReport, Report
from im2win.frontends.torch.site import Site, by_place
from im2win.frontends.torch.tracing import Call, Traced, TraceFailure
from im2win.records.tiers import Untuned
from im2win.spec.accuracy import Accuracy

HOLDER = "_im2win"
Graph = Callable[[Mapping[str, Call]], Callable[..., Any]]  # a module's graph with these calls for its sites


class Holder:
    """What an optimised module holds beside its own: its sites, also as attributes, functions that run them, the report.

    given: how many arguments the example had.
    forward: runs the sites; None where modules do.
    by_place: names the sites by their places, so that compiled programs have nothing to check at a call.
    """

    def __init__(self, report: Report, given: int = -1, graph: Graph | None = None, sites: Mapping[str, Site] | None = None) -> None:
        self.report, self.given, self.sites, self._graph = report, given, dict(sites or {}), graph
        vars(self).update(self.sites)
        self.forward = None if graph is None else graph({name: ("call_module", f"{HOLDER}.{name}", ()) for name in self.sites})
        self._name_places()

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._name_places()

    def _name_places(self) -> None:
        """For the sites as they are; a copy's have places of their own."""
        calls: dict[str, Call] = {name: ("call_function", conv_op.at_site, (site.place,)) for name, site in self.sites.items()}
        self.by_place = None if self._graph is None else self._graph(calls)


class Optimized(nn.Module):
    """Mixed into the class of an optimised module that was traced.

    In training mode, and for calls with more or fewer arguments than the example had, the module's own `forward` runs.
    """

    _im2win: Holder

    @property
    def im2win_report(self) -> Report:
        """What became of each convolution."""
        return self._im2win.report

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the module's own."""
        held = self._im2win
        run = held.by_place if by_place() else held.forward
        if self.training or run is None:
            return super().forward(*args, **kwargs)
        if len(args) + len(kwargs) != held.given:
            name = type(self).__name__
            note(f"arguments {name}", f"{name}: called with other arguments than the example's: PyTorch computes such calls")
            return super().forward(*args, **kwargs)
        return run(self, *args, **kwargs)


class OptimizedConv2d(nn.Conv2d):
    """A convolution that was swapped for its own; it shares the parameters of the one it stands for."""

    _im2win_site: Site

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """As `Conv2d`."""
        if self.training:
            return super().forward(input)
        return self._im2win_site(input)


def optimize(
    module: nn.Module,
    example_input: Any,
    *,
    logs: Any = None,
    cache: Any = None,
    untuned: Untuned = "default",
    dynamic: Dynamic = "fallback",
    accuracy: Accuracy = "float32",
    threads: int | None = None,
) -> Any:
    """A module of the same class that computes the same in eval mode, its convolutions on im2win's operators.

    Every `Conv2d` gets the operator that the look-up ladder names for the shape, type, memory format and device that the example brings to
    it, with the batch normalisation, addition and activation (`im2win.spec.activations`) behind it in the same kernel where the graph that
    torch.fx traces shows that nobody else sees what is between. Where torch.fx cannot trace the module, convolutions are swapped one by
    one and nothing is fused. Each operator is checked on the example against PyTorch; one that is wrong is not used. `im2win_report`
    of the result says what became of each layer.

    The result shares parameters, buffers and submodules with `module`, which stays as it is: `state_dict` has the same keys and tensors.
    Filters are packed once, which takes as much memory again, and packed anew when their tensors change: in the call after
    `load_state_dict`, an optimizer's step, ``.to(...)`` or any assignment that PyTorch counts (for what it does not count there is
    `repack`). It can be copied (`copy.deepcopy`) but not pickled: save its `state_dict`, or export it with `torch.export`.

    PyTorch computes instead: in training mode; for inputs of another shape, type or memory format than the example's (a note is logged
    once); under autocast; in the transforms of `torch.func`. Gradients are always PyTorch's own, of its `convolution_backward`, whatever
    computed the output. Hooks of modules that are fused do not run; modules that have hooks now are left alone.

    Calls run on the current stream. They allocate with PyTorch's allocator only and wait for nothing, so a CUDA graph can capture them
    after one call; a later change of filters reaches the graph with the next call outside it, or `repack`. `torch.compile` and
    `torch.export` see `torch.ops.im2win.conv2d`; a process that loads an exported program imports `im2win.torch`, and finds the operators
    in the cache (`IM2WIN_CACHE` names another folder than the platform's; without them PyTorch computes).

    Args:
        module: in eval mode.
        example_input: a tensor, or a tuple of the positional arguments of `module.forward`; on the module's device.
        logs: a folder of tuning records looked up before those that ship with the package.
        cache: folder that keeps built operators, so that the next process compiles nothing; the platform's cache folder if None.
        untuned: what layers get that no record of this device is about: "default", a neighbour's tile or the model's; "keep", PyTorch's.
        dynamic: what inputs of other shapes get: "fallback" is PyTorch's, "build" an operator built (or loaded) at the first such call.
        accuracy: what rounding is allowed, as for `im2win.build`.
        threads: that kernels on a CPU are made for, as for `im2win.build`.

    Raises:
        ValueError: `module` is in training mode, a ScriptModule or a result of this function; or an argument is no word it may be.
        TypeError: `module` is no module.
        NoGpuError, ToolchainError: tensors on a GPU that no kernel can be built for, or nothing to build with.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"`module` (a {type(module).__name__}) must be a torch.nn.Module.")
    if isinstance(module, torch.jit.ScriptModule):
        raise ValueError("`module` is a ScriptModule, which cannot be changed; pass the module it was made from.")
    if isinstance(module, Optimized):
        raise ValueError("`module` is a result of optimize already: pass the module that it was made from.")
    if module.training:
        raise ValueError("`module` must be in eval mode, since normalisation is fused as it is then: call module.eval() first.")
    planner = Planner(logs=logs, cache=cache, untuned=untuned, dynamic=dynamic, accuracy=accuracy, threads=threads)
    example = example_input if isinstance(example_input, tuple) else (example_input,)
    with torch.no_grad():
        try:
            return _in_graph(tracing.trace(module, example), example, planner)
        except TraceFailure as failure:
            log.info("%s: %s; its convolutions are swapped one by one, without fusion", type(module).__name__, failure)
            return _one_by_one(module, example, planner, str(failure))


def repack(module: nn.Module) -> None:
    """Packs the filters of all of a module's operators anew, now, for changes that a call does not see.

    These are values written through ``.data``, and any change where calls are replays of a CUDA graph, as with `torch.compile` in mode
    "reduce-overhead": graphs read the memory that this packs into.

    Args:
        module: what `optimize` gave, or a module that holds such.

    Raises:
        ValueError: there is no operator of im2win in it.
    """
    held = [one.__dict__[HOLDER] for one in module.modules() if HOLDER in one.__dict__]
    sites = [site for one in held for site in one.sites.values()]
    sites += [one._im2win_site for one in module.modules() if isinstance(one, OptimizedConv2d)]
    if not held:
        raise ValueError(f"`module` (a {type(module).__name__}) must be a result of im2win.torch.optimize, or hold one.")
    for site in sites:
        site.repack()


def _prepare(module: nn.Module, example: tuple[Any, ...], planner: Planner, sites: int) -> None:
    """Shows the example to sites that prepare themselves: where they are many, first for what they will need, which is built at once."""
    if sites >= LEAST:
        with planner.ahead():
            module(*tracing.copies(example))
    module(*tracing.copies(example))


# --- traced


def _in_graph(traced: Traced, example: tuple[Any, ...], planner: Planner) -> Any:
    patterns = {f"site_{i}": pattern for i, pattern in enumerate(patterns_of(traced))}
    sites = {name: Site(pattern.name, pattern.source, planner, preparing=True) for name, pattern in patterns.items()}
    _prepare(_with_sites(traced, patterns, sites), example, planner, len(sites))
    ready = {name: site for name, site in sites.items() if site.ready}
    for site in sites.values():
        site.preparing = False
    result = _with_sites(traced, {name: patterns[name] for name in ready}, ready)
    result._im2win.report = _report(traced.module, sites.values(), planner, "graph", "")
    return result


def _with_sites(traced: Traced, patterns: dict[str, Pattern], sites: dict[str, Site]) -> Any:
    """A module like the traced one whose forward runs its graph with these sites."""

    def graph(calls: Mapping[str, Call]) -> Callable[..., Any]:
        return tracing.compiled(traced.graph, patterns, calls)

    return _like(traced.module, Holder(Report("graph"), traced.given, graph, sites))


def _like(module: nn.Module, held: Holder) -> Any:
    """A module with everything that is `module`'s, of a class that is a subclass of its."""
    kind = type(module)

    @functools.wraps(kind.forward)  # and its signature, which exporters look at
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return Optimized.forward(self, *args, **kwargs)

    own: Any = forward
    own.__code__ = own.__code__.replace()  # torch.compile allows eight programs for each
    members = {"__module__": kind.__module__, "forward": forward}
    result: Any = object.__new__(type(f"Optimized{kind.__name__}", (Optimized, kind), members))
    result.__dict__.update(vars(module))
    result.__dict__[HOLDER] = held
    return result


# --- one by one


def _one_by_one(module: nn.Module, example: tuple[Any, ...], planner: Planner, note: str) -> Any:
    sites: dict[int, Site] = {}
    left: list[LayerReport] = []
    for name, one in module.named_modules():
        source = source_of(one)
        if isinstance(source, str):
            left += [LayerReport(name, None, "", source)] if source else []
        else:
            sites[id(one)] = Site(name, source, planner, preparing=True)
    held = Holder(Report("modules"))
    _prepare(_swapped(module, sites, {}, held), example, planner, len(sites))
    for site in sites.values():
        site.preparing = False
    result = _swapped(module, {key: site for key, site in sites.items() if site.ready}, {}, held)
    report = _report(None, sites.values(), planner, "modules", note)
    held.report = replace(report, layers=[*report.layers, *left])
    return result


def _swapped(module: nn.Module, sites: dict[int, Site], done: dict[int, nn.Module], held: Holder | None = None) -> nn.Module:
    """A module tree with these convolutions swapped; what holds none of them is shared, what holds one is a copy that shares the rest."""
    if id(module) in done:
        return done[id(module)]
    children = {name: None if child is None else _swapped(child, sites, done) for name, child in module._modules.items()}
    result = module
    if id(module) in sites:
        result = object.__new__(OptimizedConv2d)
        result.__dict__.update(vars(module))
        result.__dict__["_im2win_site"] = sites[id(module)]
    elif held is not None:
        result = _like(module, held)
    elif any(children[name] is not child for name, child in module._modules.items()):
        result = object.__new__(type(module))
        result.__dict__.update(vars(module))
    if result is not module:
        result.__dict__["_modules"] = children
    done[id(module)] = result
    return result


def _report(module: nn.Module | None, sites: Any, planner: Planner, mode: str, note: str) -> Report:
    layers = [row for site in sites for row in _rows(site)]
    if module is not None:
        seen = {site.source.weight.owner for site in sites}
        layers += [LayerReport(name, None, "", reason) for name, one, reason in _others(module) if one not in seen]
    return Report(mode, note, planner.artefacts.built, layers)


def _rows(site: Site) -> Iterator[LayerReport]:
    if not site.prepared:
        yield LayerReport(site.name, None, "", "the example did not reach it")
    for conv, prepared in site.prepared.items():
        decision = prepared.decision
        algorithm = decision.op.method if decision.op is not None else ""
        target = site.source.weight().device.type
        yield LayerReport(site.name, conv, algorithm, decision.reason, site.source.fused, prepared.error, target)


def _others(module: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Convolutions that no graph's pattern began with: their names and why."""
    held = [one.__dict__[HOLDER] for one in module.modules() if HOLDER in one.__dict__]
    before = {site.source.weight.owner for one in held for site in one.sites.values()}
    for name, one in module.named_modules():
        if isinstance(one, nn.Conv2d):
            reason = "optimised before" if one in before or isinstance(one, OptimizedConv2d) else source_of(one)
            yield name, one, reason if isinstance(reason, str) else "the example did not reach it"
