"""A conv call site: a place in a network where a convolution runs with its epilogue, its parameters, and the operators it may call."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd import forward_ad

from im2win.frontends.torch import conv_op, native
from im2win.frontends.torch.bound import Bound, note
from im2win.frontends.torch.plain import Parameters, Tensor, activate, alike, folded, is_channels_last, problem, reference
from im2win.frontends.torch.planning import SLOWER, Decision, Planner, Prepared
from im2win.frontends.torch.source import OwnPath, Source, as_image, as_line
from im2win.numerics.tolerance import tolerance
from im2win.spec.activations import activation_of
from im2win.spec.conv2d import Conv2d, ConvError

_dispatch_modes = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 0)
_transforms = getattr(torch._C, "_are_functorch_transforms_active", lambda: False)
_any_autocast = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)  # checked first: asking for one device takes thrice as long
_tracer = torch._C._get_tracing_state
_numbers = itertools.count()
_DOUBT = 4  # an error above a fourth of the tolerance, PyTorch's own rounding included, is looked at in float64
_MOST_ROUTES = 1024  # shapes and strides of inputs whose operator is remembered


def by_place() -> bool:
    """Whether a compiler traces the call and no gradient is needed. Such calls use `conv_op.at_site`."""
    # is_exporting() is true of every compiler in PyTorch 2.11; where there is no flag either, each may be an exporter
    return torch.compiler.is_compiling() and not torch.is_grad_enabled() and not getattr(torch.compiler, "_is_exporting_flag", True)


@dataclass(eq=False)
class CallSite:
    """A conv call site, which replaces a convolution and its epilogue: ``site(x)``, ``site(x, residual)``.

    A plain call in eager mode that needs no gradient goes directly to the bound operator, and from the second call on without Python
    (`native`). Exporters, tracers, dispatch modes and autograd see the operator `conv_op.conv2d`. Compilers, where no gradient is needed,
    see `conv_op.at_site`, which names this call site in one word, since compiled code would check each parameter at every call. Under
    autocast, in function transforms and forward differentiation, and while its normalisation is in training mode, PyTorch computes.

    Attributes:
        own: PyTorch's path, needed while `preparing`, if the planner has a guard.
        prepared: the decision for each problem that it met while `preparing`; the key None stands for inputs that im2win does not support.
    """

    name: str
    source: Source
    planner: Planner
    preparing: bool = False
    own: OwnPath | None = None
    prepared: dict[Conv2d | None, Prepared] = field(default_factory=dict)
    _kernels: dict[tuple[int, ...], str] = field(default_factory=dict)
    _routes: dict[Any, Bound | None] = field(default_factory=dict)
    _noted: dict[Any, Conv2d] = field(default_factory=dict)  # problems by what finds their routes, until they are decided

    def __post_init__(self) -> None:
        self._tables = [None if slot is None else (slot.table, slot.name) for slot in self.source.slots]
        self._present = [one for one in self._tables if one is not None]
        self._enter()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._enter()

    def _enter(self) -> None:
        """Takes a number by which compiled programs find it. A copy takes its own number."""
        number, s, weight = next(_numbers), self.source, self.source.parameters()[0]
        self._given = (number, s.norm, *itertools.chain.from_iterable(self._present))
        channels_last = not weight.is_quantized and is_channels_last(weight)
        self.place = conv_op.Place(number, tuple(weight.shape), channels_last, s.stride, s.padding, s.dilation, self.out_dtype).text
        conv_op.SITES[self.place] = self

    @property
    def out_dtype(self) -> str:
        """The type of the outputs; "" where it is the inputs'."""
        return ""

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """The output. `residual` is required where the source adds one, refused elsewhere."""
        if by_place():
            traced: Tensor = conv_op.at_site(x, residual, self.place)  # compiled programs check all else that is read here at each call
            return traced
        if self.preparing:
            return self._prepare(x, residual)
        if torch.compiler.is_compiling() or forward_ad._current_level >= 0:
            return self.general(x, residual)
        return self.now(x, residual)

    def introduce(self) -> None:
        """Lets compiled programs call it without Python, see `native`."""
        native.introduce(self, self._given, conv_op.Place.read(self.place).channels_last)

    def now(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """The output of a call that no compiler traces."""
        y: Tensor = native.site(self, self._given, x, residual)
        return y

    def general(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """The output of a call that is not remembered, or not plain."""
        norm = self.source.norm
        if norm is not None and norm.training:
            return self._training(x, residual)
        if torch.compiler.is_compiling() or type(x) is not Tensor:
            return self._operator(x, residual, self.source.parameters())
        if autocast_to(x) is not None or _transforms() or forward_ad._current_level >= 0:
            return self._plain(x, residual, self.source.parameters())
        given = [table[name] for table, name in self._present]
        # a dispatch mode, a tracer or autograd must see the call
        if _dispatch_modes() or _tracer() is not None or (torch.is_grad_enabled() and needs_grad(x, residual, *given)):
            return self._operator(x, residual, self.source.parameters())
        return self.run(x, residual, given)

    def run(self, x: Tensor, residual: Tensor | None, given: list[Tensor]) -> Tensor:
        """The path of a plain call: the bound operator for this input, without PyTorch's dispatcher.

        Args:
            given: the current parameters, without those that the source lacks.
        """
        try:
            bound = self._routes[_layout(x)]
        except KeyError:
            bound = self._new_route(x)
        if bound is None or not self._adds(residual, bound.output_shape, x):
            return self._plain(x, residual, self.source.parameters())
        if not bound.fresh(given):
            return self._refreshed(x, residual)
        y = bound(x, residual)
        bound.remember()
        return y

    def _adds(self, residual: Tensor | None, shape: Any, x: Tensor) -> bool:
        """Whether the operator can add what is added, for outputs of this shape."""
        return residual is None or alike(residual, shape, x)

    def _bound(self, decision: Decision) -> Bound:
        """A decision's operator, not yet bound to parameters."""
        assert decision.op is not None
        return Bound(decision.name, decision.op, self.source.eps)

    def _refreshed(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """As `run`, after a change of parameters, which may have another type or memory format now."""
        parameters, bound = self.source.parameters(), self._new_route(x)
        if bound is None:
            return self._plain(x, residual, parameters)
        bound.refresh(parameters)
        return bound(x, residual)

    def _new_route(self, x: Tensor) -> Bound | None:
        if len(self._routes) >= _MOST_ROUTES:
            self._routes.clear()
        bound = self._routes[_layout(x)] = self._route(x, self.source.parameters())
        return bound

    def repack(self) -> None:
        """Packs the filters of all its operators again, whether a change was detected or not."""
        for bound in {id(one): one for one in self._routes.values() if one is not None}.values():
            bound.refresh(self.source.parameters(), force=True)

    def _operator(self, x: Tensor, residual: Tensor | None, parameters: Parameters) -> Tensor:
        s = self.source
        weight, bias, *norm = parameters
        kernel = next(iter(self._kernels.values()), "")
        if len(self._kernels) > 1:
            kernel = self._kernels.get(tuple(x.shape), kernel)
        result: Tensor = conv_op.conv2d(
            x, weight, bias, residual, *norm, s.eps, s.stride, s.padding, s.dilation, s.groups, s.activation, kernel
        )
        return result

    def _plain(self, x: Tensor, residual: Tensor | None, parameters: Parameters) -> Tensor:
        s = self.source
        return reference(x, parameters, residual, s.eps, s.stride, s.padding, s.dilation, s.groups, s.activation)

    def _training(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """The output in training mode, where the normalisation uses the batch's statistics: PyTorch's modules, one after another."""
        s = self.source
        assert s.norm is not None
        weight, bias, *_ = s.parameters()
        y = reference(x, (weight, bias, None, None, None, None, None), None, 0.0, s.stride, s.padding, s.dilation, s.groups, "none")
        y = as_image(s.norm(as_line(y))) if s.line else s.norm(y)
        return activate(s.activation, y if residual is None else y + residual)

    def _problem(self, x: Tensor, parameters: Parameters) -> Conv2d:
        s = self.source
        return problem(x, parameters, s.residual, s.stride, s.padding, s.dilation, s.groups, s.activation)

    def _route(self, x: Tensor, parameters: Parameters) -> Bound | None:
        """The operator for an input that is not remembered."""
        try:
            conv = self._problem(x, parameters)
        except ConvError as error:
            note(f"{self.name} {error}", f"{self.name}: {error}: PyTorch computes it")
            return None
        if conv in self.prepared:
            decision = self.prepared[conv].decision
        else:
            if self.planner.dynamic != "build":
                self.planner.note_other_shape(self.name, tuple(x.shape), conv.layout)
                return None
            decision = self.planner.decide(conv, x.device.type)
        if decision.op is None or decision.target != x.device.type:
            return None
        return next(
            (one for one in self._routes.values() if one is not None and one.name == decision.name),
            self._bound(decision),
        )

    # --- with the example

    def _prepare(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """Decides for this input, checks the operator on it, and returns PyTorch's result."""
        parameters = self.source.parameters()
        y = self._plain(x, residual, parameters)
        try:
            if (dtype := autocast_to(x)) is not None:
                raise ConvError(f"it runs under autocast, where PyTorch computes in {dtype}: use a module and inputs of that type")
            conv = self._problem(x, parameters)
            if not self._adds(residual, y.shape, x):
                raise ConvError("what is added has another shape or type than the output")
        except ConvError as error:
            self.prepared[None] = Prepared(Decision("", None, str(error)))
            return y
        if self.planner.noted(conv, x.device.type):
            self._noted[_layout(x)] = conv
            return y
        if conv not in self.prepared:
            decision = self.planner.decide(conv, x.device.type)
            self.prepared[conv] = prepared = Prepared(decision)
            if decision.op is not None:
                prepared.error, allowed = self._compare(conv, x, residual, parameters, y)
                if prepared.error <= allowed:
                    self._kernels[tuple(x.shape)] = decision.name
                    self._keep_the_faster(prepared, x, residual)
                else:
                    prepared.decision = Decision("", None, f"wrong: error {prepared.error:.1e} over {allowed:.1e}")
                    self._routes.clear()
        return y

    def packings(self) -> Iterator[Callable[[], None]]:
        """Decides the noted problems of a CPU. Yields functions that pack the filters for their operators, each on any thread."""
        noted, self._noted = self._noted, {}
        for layout, conv in noted.items():
            if layout[-1].type == "cpu" and (decision := self.planner.decide(conv, "cpu")).op is not None:
                bound = self._routes[layout] = self._bound(decision)
                yield functools.partial(bound.refresh, self.source.parameters())

    def _keep_the_faster(self, prepared: Prepared, x: Tensor, residual: Tensor | None) -> None:
        """Leaves an input's shape to PyTorch if im2win's operator, which was found right, is not faster."""
        guard, own, decision = self.planner.guard, self.own, prepared.decision
        if guard is None or own is None or decision.op is None:
            return
        self.planner.reporter.step(note=f"comparing {self.name}")
        slug, assumed = self.planner.slug(decision.target), self._rival(decision.op.conv, x, residual)
        prepared.against = assumed.text.split()[0] if assumed is not None else ""
        theirs = assumed or own
        times = guard.of_site(slug, decision.name, theirs.text, lambda: self.now(x, residual), lambda: theirs.run(x, residual), x)
        prepared.times = times
        if not times.faster:
            prepared.found, prepared.decision = decision, Decision("", None, f"{SLOWER} ({decision.reason})")
            del self._kernels[tuple(x.shape)]
            self._routes.clear()

    def _rival(self, conv: Conv2d, x: Tensor, residual: Tensor | None) -> OwnPath | None:
        """What PyTorch has for this input that is faster than what the module runs, if there is such a thing."""
        return None

    @property
    def artefacts(self) -> list[str]:
        """Names of the artefacts that it runs for inputs that it met."""
        return list(self._kernels.values())

    @property
    def ready(self) -> bool:
        """Whether it has an operator for any input that it met."""
        return bool(self._kernels)

    def _compare(self, conv: Conv2d, x: Tensor, residual: Tensor | None, parameters: Parameters, y: Tensor) -> tuple[float, float]:
        """The error on this input against PyTorch, and the tolerance, both relative to the largest sum of magnitudes.

        PyTorch's output `y` of the tensors' own type is enough where the error is far below the tolerance even relative to the largest
        output, which no sum of magnitudes is below. Else PyTorch computes in float64.
        """
        s = self.source
        got = self.run(x, residual, [one for one in parameters if one is not None])
        largest = float(y.abs().max()) if y.numel() else 0.0
        if largest > 0 and not activation_of(conv.activation).squashes:
            near = float((got - y).abs().max()) / largest
            if near <= (allowed := tolerance(conv, self.planner.accuracy)) / _DOUBT:  # false for NaN
                return near, allowed
        wide: Parameters = tuple(None if one is None else one.double() for one in parameters)  # type: ignore[assignment]
        added = None if residual is None else residual.double()
        want = reference(x.double(), wide, added, s.eps, s.stride, s.padding, s.dilation, s.groups, s.activation)
        weight, bias = folded(wide, s.eps)
        magnitudes = (weight.abs(), None if bias is None else bias.abs(), None, None, None, None, None)
        added = None if added is None else added.abs()
        sums = reference(x.double().abs(), magnitudes, added, 0.0, s.stride, s.padding, s.dilation, s.groups, "none")
        finite = torch.isfinite(want) & torch.isfinite(sums)
        if not bool(finite.any()):
            return 0.0, 0.0
        difference = torch.where(finite, (got.double() - want).abs(), 0.0)
        scale = float(torch.where(finite, sums, 0.0).max()) or 1.0
        sized = conv.with_(activation="none") if activation_of(conv.activation).squashes else conv  # the scale is that of the sums
        return float(difference.max()) / scale, tolerance(sized, self.planner.accuracy)


def dispatches() -> bool:
    """Whether a dispatch mode, a tracer or a function transform must see the calls of operators."""
    return bool(_dispatch_modes() or _transforms()) or _tracer() is not None


def _layout(x: Tensor) -> tuple[Any, ...]:
    """What tells inputs apart that may need different operators."""
    return x.shape, x.stride(), x.dtype, x.device


def autocast_to(x: Tensor) -> str | None:
    """The type that autocast computes convolutions in on the device of x; None where it is off."""
    if not (_any_autocast() and torch.is_autocast_enabled(x.device.type)):
        return None
    return str(torch.get_autocast_dtype(x.device.type)).removeprefix("torch.")


def needs_grad(*tensors: Tensor | None) -> bool:
    return any(one is not None and one.requires_grad for one in tensors)
