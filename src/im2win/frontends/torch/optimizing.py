"""`im2win.torch.optimize`: returns a module that computes the same as the given one, with im2win's operators for its convolutions."""

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
from im2win.frontends.torch.call_site import CallSite, by_place
from im2win.frontends.torch.patterns import Pattern, patterns_of, source_of
from im2win.frontends.torch.planning import Dynamic, Planner
from im2win.frontends.torch.report import LayerReport, Report
from im2win.frontends.torch.tracing import Call, Traced, TraceFailure
from im2win.records.tiers import Untuned
from im2win.spec.accuracy import Accuracy

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


class OptimizedConv2d(nn.Conv2d):
    """Replaces one convolution of a module tree, and shares the parameters of the one that it replaces."""

    _im2win_site: CallSite

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """As `Conv2d.forward`."""
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
    """A module of the same class that computes the same in eval mode, with im2win's operators for its convolutions.

    Every `Conv2d` gets the operator that the look-up selects for the shape, type, memory format and device of its input on the example. The
    batch normalisation, addition and activation (`im2win.spec.activations`) that follow it are fused into the same kernel, if the graph
    that torch.fx traces shows that nothing else reads the values in between. Where torch.fx cannot trace the module, convolutions are
    replaced one by one and nothing is fused. Each operator is checked on the example against PyTorch, and a wrong one is not used.
    `im2win_report` of the result says what was done with each layer.

    The result shares parameters, buffers and submodules with `module`, which is not changed: `state_dict` has the same keys and tensors.
    Filters are packed once, which doubles their memory, and packed again when their tensors change. A change is detected in the call after
    `load_state_dict`, an optimizer's step, ``.to(...)`` or any assignment that PyTorch counts; for other changes there is `repack`. The
    result can be copied (`copy.deepcopy`) but not pickled: save its `state_dict`, or export it with `torch.export`.

    PyTorch computes instead in these cases: in training mode; for inputs of another shape, type or memory format than the example's (a note
    is logged once); under autocast; in the transforms of `torch.func`. Gradients are always computed by PyTorch's `convolution_backward`.
    Hooks of fused modules do not run, and modules that have hooks already are not replaced.

    Calls run on the current stream. They allocate only with PyTorch's allocator and never synchronise, so a CUDA graph can capture them
    after one call. A later change of filters reaches the graph with the next call outside it, or with `repack`. `torch.compile` and
    `torch.export` see `torch.ops.im2win.conv2d`. A process that loads an exported program imports `im2win.torch` and finds the operators in
    the cache (`IM2WIN_CACHE` names another folder than the platform's; without the operators PyTorch computes).

    Args:
        module: in eval mode.
        example_input: a tensor, or a tuple of the positional arguments of `module.forward`; on the module's device.
        logs: folders of tuning records (a path, or several), searched before the user's own (`IM2WIN_LOGS`) and those of the package.
        cache: folder of built operators, from which the next process loads them; the platform's cache folder if None.
        untuned: layers without a tuning record of this device: "default" uses a neighbouring layer's tile or the analytic model's, "keep"
            leaves them to PyTorch.
        dynamic: inputs of other shapes: "fallback" leaves them to PyTorch, "build" builds (or loads) an operator at the first such call.
        accuracy: the rounding that kernels may use, as for `im2win.build`.
        threads: CPUs to schedule CPU kernels for, as for `im2win.build`.

    Raises:
        ValueError: `module` is in training mode, a ScriptModule or a result of this function; or an argument has an unknown value.
        TypeError: `module` is no module.
        NoGpuError: tensors on a GPU that kernels cannot be built for.
        ToolchainError: a compiler or linker is missing.
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
    """Packs the filters of all of a module's operators again, for changes that a call does not detect.

    Such changes are values written through ``.data``, and any change where calls replay a CUDA graph, as with `torch.compile` in mode
    "reduce-overhead": graphs read the memory that this overwrites.

    Args:
        module: a result of `optimize`, or a module that contains one.

    Raises:
        ValueError: the module has no operator of im2win.
    """
    held = [one.__dict__[HOLDER] for one in module.modules() if HOLDER in one.__dict__]
    sites = [site for one in held for site in one.sites.values()]
    sites += [one._im2win_site for one in module.modules() if isinstance(one, OptimizedConv2d)]
    if not held:
        raise ValueError(f"`module` (a {type(module).__name__}) must be a result of im2win.torch.optimize, or hold one.")
    for site in sites:
        site.repack()


def _prepare(module: nn.Module, example: tuple[Any, ...], planner: Planner, sites: int) -> None:
    """Runs the example through conv call sites in preparing mode.

    If there are many, a first run notes their problems, which are then built in a batch.
    """
    if sites >= LEAST:
        with planner.ahead():
            module(*tracing.copies(example))
    module(*tracing.copies(example))


# --- traced


def _in_graph(traced: Traced, example: tuple[Any, ...], planner: Planner) -> Any:
    patterns = {f"site_{i}": pattern for i, pattern in enumerate(patterns_of(traced))}
    sites = {name: CallSite(pattern.name, pattern.source, planner, preparing=True) for name, pattern in patterns.items()}
    _prepare(_with_sites(traced, patterns, sites), example, planner, len(sites))
    ready = {name: site for name, site in sites.items() if site.ready}
    for site in sites.values():
        site.preparing = False
    result = _with_sites(traced, {name: patterns[name] for name in ready}, ready)
    result._im2win.report = _report(traced.module, sites.values(), planner, "graph", "")
    return result


def _with_sites(traced: Traced, patterns: dict[str, Pattern], sites: dict[str, CallSite]) -> Any:
    """A module like the traced one whose forward runs its graph with these conv call sites."""

    def graph(calls: Mapping[str, Call]) -> Callable[..., Any]:
        return tracing.compiled(traced.graph, patterns, calls)

    return _like(traced.module, Holder(Report("graph"), traced.given, graph, sites))


def _like(module: nn.Module, held: Holder) -> Any:
    """A module with all attributes of `module`, whose class is a subclass of its class."""
    kind = type(module)

    @functools.wraps(kind.forward)  # and its signature, which exporters read
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return Optimized.forward(self, *args, **kwargs)

    own: Any = forward
    own.__code__ = own.__code__.replace()  # torch.compile allows eight programs for each code object
    members = {"__module__": kind.__module__, "forward": forward}
    result: Any = object.__new__(type(f"Optimized{kind.__name__}", (Optimized, kind), members))
    result.__dict__.update(vars(module))
    result.__dict__[HOLDER] = held
    return result


# --- one by one


def _one_by_one(module: nn.Module, example: tuple[Any, ...], planner: Planner, note: str) -> Any:
    sites: dict[int, CallSite] = {}
    left: list[LayerReport] = []
    for name, one in module.named_modules():
        source = source_of(one)
        if isinstance(source, str):
            left += [LayerReport(name, None, "", source)] if source else []
        else:
            sites[id(one)] = CallSite(name, source, planner, preparing=True)
    held = Holder(Report("modules"))
    _prepare(_swapped(module, sites, {}, held), example, planner, len(sites))
    for site in sites.values():
        site.preparing = False
    result = _swapped(module, {key: site for key, site in sites.items() if site.ready}, {}, held)
    report = _report(None, sites.values(), planner, "modules", note)
    held.report = replace(report, layers=[*report.layers, *left])
    return result


def _swapped(module: nn.Module, sites: dict[int, CallSite], done: dict[int, nn.Module], held: Holder | None = None) -> nn.Module:
    """A module tree with these convolutions replaced.

    A submodule without any of them is shared; one with some is a copy that shares the rest.
    """
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


def _rows(site: CallSite) -> Iterator[LayerReport]:
    if not site.prepared:
        yield LayerReport(site.name, None, "", "the example did not reach it")
    for conv, prepared in site.prepared.items():
        decision = prepared.decision
        algorithm = decision.op.method if decision.op is not None else ""
        target = site.source.weight().device.type
        yield LayerReport(site.name, conv, algorithm, decision.reason, site.source.fused, prepared.error, target)


def _others(module: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Convolutions with which no pattern of the graph begins: their names and the reasons."""
    held = [one.__dict__[HOLDER] for one in module.modules() if HOLDER in one.__dict__]
    before = {site.source.weight.owner for one in held for site in one.sites.values()}
    for name, one in module.named_modules():
        if isinstance(one, nn.Conv2d):
            reason = "optimised before" if one in before or isinstance(one, OptimizedConv2d) else source_of(one)
            yield name, one, reason if isinstance(reason, str) else "the example did not reach it"
