"""`im2win.torch.optimize`: returns a module that computes the same as the given one, with im2win's operators for its convolutions."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn

from im2win.builder.batch import LEAST
from im2win.common.progress import Reporter, reporting
from im2win.device.cpu import usable_cpus
from im2win.frontends.torch import tracing
from im2win.frontends.torch.bound import log
from im2win.frontends.torch.call_site import CallSite
from im2win.frontends.torch.integer_site import IntegerSite
from im2win.frontends.torch.integers import IntegerSource
from im2win.frontends.torch.inventory import rows_of
from im2win.frontends.torch.optimized import HOLDER, REPLACEMENTS, Holder, Optimized, copied
from im2win.frontends.torch.patterns import Pattern, patterns_of, source_of
from im2win.frontends.torch.planning import Dynamic, Listing, Planner
from im2win.frontends.torch.quantised import quantised_patterns
from im2win.frontends.torch.report import LayerReport, Report
from im2win.frontends.torch.source import OwnPath, Source, as_line
from im2win.frontends.torch.tracing import Call, Traced, TraceFailure
from im2win.records.folders import named_folders
from im2win.records.tiers import Untuned
from im2win.spec.accuracy import Accuracy
from im2win.spec.conv2d import Conv2d


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
    trials: int | None = None,
    guard: bool = True,
) -> Any:
    """A module of the same class that computes the same in eval mode, with im2win's operators for its convolutions.

    Every `Conv2d` and `Conv1d` gets the operator that the look-up selects for the shape, type, memory format and device of its input on the
    example; one over one dimension is computed as one over images of one row. The batch normalisation, addition and activation
    (`im2win.spec.activations`) that follow it are fused into the same kernel, if the graph that torch.fx traces shows that nothing else
    reads the values in between. Where torch.fx cannot trace the module, convolutions are replaced one by one and nothing is fused. Each
    operator is checked on the example against PyTorch, and a wrong one is not used. Each is
    then timed against what the module runs there itself, and where it is not faster PyTorch's path stays. At the end the whole is timed: if
    it is slower than `module`, the result runs the module's own `forward`. `im2win_report` of the result says what was done with each
    layer, with both times.

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
        trials: candidates to tune each layer with that has no record of this device, as for `im2win.tune`. The records go to the first
            folder of `logs`, else to the user's, where later calls find them. None tunes nothing.
        guard: keep PyTorch's path where im2win's is not faster; False uses every operator that is right.

    Raises:
        LogError: with `trials`, the records cannot be written.
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
    if module.training and not _is_exported(module):
        raise ValueError("`module` must be in eval mode, since normalisation is fused as it is then: call module.eval() first.")
    name = type(module).__name__
    example = example_input if isinstance(example_input, tuple) else (example_input,)
    with torch.no_grad(), reporting(f"optimizing {name}") as reporter:
        planner = Planner(
            logs=logs, cache=cache, untuned=untuned, dynamic=dynamic, accuracy=accuracy, threads=threads, trials=trials, guard=guard,
            reporter=reporter,
        )  # fmt: skip
        reporter.step(note="tracing")
        path = ""
        try:
            traced = tracing.trace(module, example)
            result, path = _in_graph(traced, example, planner), traced.text
        except TraceFailure as failure:
            log.info("%s: %s; its convolutions are swapped one by one, without fusion", name, failure)
            result = _one_by_one(module, example, planner, str(failure))
        result._im2win.report = replace(result.im2win_report, asked=_asked(logs, threads, accuracy))
        result = _unless_slower(result, module, path, example, planner)
        planner.reporter = Reporter(reporter.what)
    report: Report = result.im2win_report
    if report.layers and not report.swapped and not report.given_back:
        log.warning("%s: none of its %d convolutions runs on im2win: %s", name, len(report.layers), report.refusals)
    return result


def problems(module: nn.Module, example_input: Any) -> list[tuple[Conv2d, str]]:
    """The problems for which `optimize` would select operators, with their kinds of device ("cpu", "cuda").

    Arguments as for `optimize`. Nothing is looked up or built, and `module` is not changed.
    """
    example = example_input if isinstance(example_input, tuple) else (example_input,)
    planner = Listing()
    with torch.no_grad():
        try:
            _in_graph(tracing.trace(module, example), example, planner)
        except TraceFailure as failure:
            _one_by_one(module, example, planner, str(failure))
    return list(planner.found)


def _asked(logs: Any, threads: int | None, accuracy: Accuracy) -> dict[str, Any]:
    """What `Report.asked` holds; of several folders of records the first one, to which tuning writes."""
    first = next(iter(named_folders(logs)), None)
    given = {"logs": first, "threads": threads, "accuracy": None if accuracy == "float32" else accuracy}
    return {name: value for name, value in given.items() if value is not None}


def _unless_slower(result: Any, module: nn.Module, path: str, example: tuple[Any, ...], planner: Planner) -> Any:
    """The result with the time of the whole in its report; a module that runs PyTorch's path if the result is slower than that.

    Args:
        path: what `module` runs, in words; "" where it is not known.
    """
    report: Report = result.im2win_report
    if planner.guard is None or not report.swapped:
        return result
    planner.reporter.step(note="comparing the whole")
    targets = [layer.target for layer in report.layers if layer.algorithm]
    whole = planner.guard.of_whole(planner.slug(targets[0]), result._im2win.names, path, result, module, example)
    report = replace(report, whole=whole)
    if report.whole is not None and report.whole.slower:
        log.warning("%s: slower as a whole (%s): PyTorch's own path stays", type(module).__name__, report.whole)
        return _like(module, Holder(replace(report, given_back=True)))
    result._im2win.report = report
    return result


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
    sites += [one._im2win_site for one in module.modules() if isinstance(one, tuple(REPLACEMENTS.values()))]
    if not held:
        raise ValueError(f"`module` (a {type(module).__name__}) must be a result of im2win.torch.optimize, or hold one.")
    for site in sites:
        site.repack()


def _prepare(module: nn.Module, example: tuple[Any, ...], planner: Planner, sites: Collection[CallSite]) -> None:
    """Runs the example through conv call sites in preparing mode.

    If there are many, a first run notes their problems. Their operators are then built in a batch, and their filters packed on all CPUs.
    """
    if len(sites) >= LEAST or planner.trials is not None:
        with planner.ahead():
            module(*tracing.copies(example))
        with ThreadPoolExecutor(usable_cpus()) as threads:
            packings = [pack for site in sites for pack in site.packings()]
            for _ in threads.map(lambda pack: pack(), packings):
                pass
    module(*tracing.copies(example))


# --- traced


def _in_graph(traced: Traced, example: tuple[Any, ...], planner: Planner) -> Any:
    plain = patterns_of(traced)
    integers, refused = quantised_patterns(traced, {node for pattern in plain for node in pattern.nodes})
    patterns = {f"site_{i}": pattern for i, pattern in enumerate([*plain, *integers])}
    sites = {name: _site(traced, pattern, planner) for name, pattern in patterns.items()}
    result = _with_sites(traced, patterns, sites)
    _prepare(result, example, planner, sites.values())
    ready = {name: site for name, site in sites.items() if site.ready}
    _end_preparing(sites.values())
    if len(ready) < len(sites):
        result = _with_sites(traced, {name: patterns[name] for name in ready}, ready)
    rows = [*rows_of(traced.module, example, list(sites.values())), *(LayerReport(name, None, "", reason) for name, reason in refused)]
    result._im2win.report = Report("graph", "", planner.artefacts.built, rows)
    return result


def _site(traced: Traced, pattern: Pattern, planner: Planner) -> CallSite:
    """The conv call site of a pattern."""
    source = pattern.source
    if isinstance(source, IntegerSource):
        return IntegerSite(pattern.name, source, planner, preparing=True, own=OwnPath(source.run, source.text))
    return CallSite(pattern.name, source, planner, preparing=True, own=_own_path(traced, pattern))


def _is_exported(module: nn.Module) -> bool:
    """Whether a module is a graph of PyTorch's operators, as `torch.export` makes them: no training mode changes what it computes."""
    if not isinstance(module, fx.GraphModule):
        return False
    called = [str(node.target) for node in module.graph.nodes if node.op == "call_module"]
    return any(isinstance(node.target, torch._ops.OpOverload) for node in module.graph.nodes) and called in ([], ["_guards_fn"])


def _own_path(traced: Traced, pattern: Pattern) -> OwnPath | None:
    """What the module runs at a pattern."""
    run = tracing.alone(traced, pattern)
    if run is None:
        return None
    if pattern.source.line:
        run = _over_images(run)
    steps = (str(traced.module.get_submodule(str(one.target)) if one.op == "call_module" else one.target) for one in pattern.nodes)
    return OwnPath(functools.partial(run, traced.module), "; ".join(steps))


def _over_images(run: Callable[..., Any]) -> Callable[..., Any]:
    """A path over lines as one over images of one row."""

    def called(module: nn.Module, x: torch.Tensor, residual: torch.Tensor | None) -> Any:
        return run(module, as_line(x), None if residual is None else as_line(residual))

    return called


def _end_preparing(sites: Iterable[CallSite]) -> None:
    for site in sites:
        site.preparing, site.own = False, None


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
    # torch.compile allows eight programs for each code object, and takes sizes that differ between calls of one place and name as dynamic
    own.__code__ = own.__code__.replace(co_name=f"forward_{kind.__name__}")
    members: dict[str, Any] = {"__module__": kind.__module__, "forward": forward}
    if isinstance(module, fx.GraphModule):
        members["__deepcopy__"] = copied  # its own makes a new one of its graph alone
    result: Any = object.__new__(type(f"Optimized{kind.__name__}", (Optimized, kind), members))
    result.__dict__.update(vars(module))
    result.__dict__[HOLDER] = held
    if _is_exported(module):
        result.__dict__["training"] = False
    return result


# --- one by one


def _one_by_one(module: nn.Module, example: tuple[Any, ...], planner: Planner, note: str) -> Any:
    sites: dict[int, CallSite] = {}
    for name, one in module.named_modules():
        if isinstance(source := source_of(one), Source):
            own = OwnPath(functools.partial(_forward, one), str(one))
            sites[id(one)] = CallSite(name, source, planner, preparing=True, own=own)
    held = Holder(Report("modules"))
    _prepare(_swapped(module, sites, {}, held), example, planner, sites.values())
    _end_preparing(sites.values())
    result = _swapped(module, {key: site for key, site in sites.items() if site.ready}, {}, held)
    held.report = Report("modules", note, planner.artefacts.built, rows_of(module, example, list(sites.values())))
    return result


def _forward(conv: nn.Module, x: torch.Tensor, residual: torch.Tensor | None) -> Any:
    """A convolution by itself, as a call site's path."""
    return conv(as_line(x) if isinstance(conv, nn.Conv1d) else x)


def _swapped(module: nn.Module, sites: dict[int, CallSite], done: dict[int, nn.Module], held: Holder | None = None) -> nn.Module:
    """A module tree with these convolutions replaced.

    A submodule without any of them is shared; one with some is a copy that shares the rest.
    """
    if id(module) in done:
        return done[id(module)]
    children = {name: None if child is None else _swapped(child, sites, done) for name, child in module._modules.items()}
    result = module
    if id(module) in sites:
        kind: Any = type(module)
        result = object.__new__(REPLACEMENTS[kind])
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
