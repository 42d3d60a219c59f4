"""`torch.ops.im2win.conv2d`: a convolution with its epilogue as a PyTorch operator, for compilers, exporters and autograd.

``y = activation(norm(conv(x, weight) + bias) + residual)``; norm is an optional batch normalisation with fixed statistics. The operator
takes plain parameters and the name of an artefact (`im2win.builder.cache`). The artefact runs if it was built for x's shape, type and
layout. Its filters, with the normalisation folded in, are packed at the first call and whenever a parameter's version or address changes.
For every other x, and where no artefact of that name exists, PyTorch computes the same function. This module holds everything that a call
may need. Repeated calls bypass Python where `native` has loaded its library.
"""

from __future__ import annotations

import functools
import json
import weakref
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from typing import Any

import torch

from im2win.builder.cache import conv_of
from im2win.frontends.torch.bound import BUILDERS, Bound, addresses_of, bound_for, note
from im2win.frontends.torch.plain import (
    Maybe,
    Parameters,
    Tensor,
    activate,
    alike,
    is_channels_last,
    memory_format,
    problem,
    reference,
    symmetric,
)
from im2win.spec.activations import activation_of, derivative
from im2win.spec.conv2d import ConvError

SCHEMA = (
    "conv2d(Tensor x, Tensor weight, Tensor? bias, Tensor? residual, Tensor? scale, Tensor? shift, Tensor? mean, Tensor? variance, "
    "Tensor? counter, float eps, int[] stride, int[] padding, int[] dilation, int groups, str activation, str kernel) -> Tensor"
)

SITE_SCHEMA = "site(Tensor x, Tensor? residual, str place) -> Tensor"

SITES: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
"""What is at a `Place` of this process, see `CallSite`: where no gradient is needed, compiled programs name it in place of parameters."""

_CALLS: weakref.WeakValueDictionary[Any, Bound] = weakref.WeakValueDictionary()  # the bound operator by a call's tensors and their layout


def _kernel(
    x: Tensor, weight: Tensor, bias: Maybe, residual: Maybe, scale: Maybe, shift: Maybe, mean: Maybe, variance: Maybe, counter: Maybe,
    eps: float, stride: list[int], padding: list[int], dilation: list[int], groups: int, activation: str, kernel: str,
) -> Tensor:  # fmt: skip
    parameters = (weight, bias, scale, shift, mean, variance, counter)
    given = [one for one in parameters if one is not None]
    addresses = addresses_of(given)
    call = (
        addresses, kernel, x.get_device(), x.shape, x.stride(), x.dtype, weight.shape, weight.stride(), residual is None, eps, *stride,
        *padding, *dilation, groups, activation,
    )  # fmt: skip
    bound = _CALLS.get(call)
    if bound is None:
        bound = _resolved(kernel, x, parameters, residual is not None, eps, stride, padding, dilation, groups, activation)
        if bound is not None:
            _CALLS[call] = bound
    if bound is not None and (residual is None or alike(residual, bound.output_shape, x)):
        if not bound.fresh(given, addresses):
            bound.refresh(parameters)
        y = bound(x, residual)
        bound.remember()
        return y
    with torch.no_grad():
        y = reference(x, parameters, residual, eps, stride, padding, dilation, groups, activation)
        return y.contiguous(memory_format=memory_format(x, weight))


def _resolved(
    kernel: str, x: Tensor, parameters: Parameters, residual: bool, eps: float, stride: list[int], padding: list[int], dilation: list[int],
    groups: int, activation: str,
) -> Bound | None:  # fmt: skip
    """The operator for a call that is not in the cache; None if PyTorch computes it."""
    if not kernel:
        return None
    try:
        conv = problem(x, parameters, residual, stride, padding, dilation, groups, activation)
    except ConvError as error:
        note(f"{kernel} {error}", f"{kernel}: {error}: PyTorch computes it")
        return None
    if conv == conv_of(kernel):
        return bound_for(kernel, eps, parameters)
    if kernel in BUILDERS:
        name = BUILDERS[kernel](conv)
        return bound_for(name, eps, parameters) if name else None
    note(f"shape {kernel}", f"{kernel}: called for {conv}, which it was not built for: PyTorch computes it")
    return None


def _fake(
    x: Tensor, weight: Tensor, bias: Maybe, residual: Maybe, scale: Maybe, shift: Maybe, mean: Maybe, variance: Maybe, counter: Maybe,
    eps: float, stride: list[int], padding: list[int], dilation: list[int], groups: int, activation: str, kernel: str,
) -> Tensor:  # fmt: skip
    return _empty(x, residual, weight.shape, memory_format(x, weight), stride, padding, dilation)


def _empty(x: Tensor, residual: Maybe, kernel: Any, order: torch.memory_format, stride: Any, padding: Any, dilation: Any) -> Tensor:
    """An uninitialised tensor like the output, for filters of the shape `kernel`."""

    def size(i: int) -> Any:
        return (x.shape[2 + i] + padding[i] + padding[2 + i] - dilation[i] * (kernel[2 + i] - 1) - 1) // stride[i] + 1

    shape = (x.shape[0], kernel[0], size(0), size(1))
    dtype = x.dtype if residual is None else torch.result_type(x, residual)
    return torch.empty(shape, dtype=dtype, device=x.device, memory_format=order)


@dataclass(frozen=True)
class Place:
    """Identifies a conv call site in compiled programs.

    It holds the site's number in this process, and what determines shape, type ("" for x's) and layout of its output. Compilers cache
    programs across processes, with their text as the key.
    """

    number: int
    kernel: tuple[int, ...]
    channels_last: bool
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    out_dtype: str = ""

    @property
    def text(self) -> str:
        """The call site as a string argument of an operator."""
        return json.dumps(astuple(self))

    @classmethod
    @functools.cache
    def read(cls, text: str) -> Place:
        """The inverse of `text`."""
        return cls(*json.loads(text))

    def order(self, x: Tensor) -> torch.memory_format:
        """Memory format of the output."""
        return torch.channels_last if self.channels_last or is_channels_last(x) else torch.contiguous_format


def _at_site(x: Tensor, residual: Maybe, place: str) -> Tensor:
    site = SITES.get(place)
    if site is None:
        raise RuntimeError(f"im2win: a compiled program calls a module that is there no more (place {place}); compile it again.")
    site.introduce()
    y: Tensor = site.now(x, residual)
    return y.contiguous(memory_format=Place.read(place).order(x))


def _fake_site(x: Tensor, residual: Maybe, place: str) -> Tensor:
    found = Place.read(place)
    y = _empty(x, None if found.out_dtype else residual, found.kernel, found.order(x), found.stride, found.padding, found.dilation)
    return torch.empty_like(y, dtype=getattr(torch, found.out_dtype)) if found.out_dtype else y


class _Differentiable(torch.autograd.Function):
    """A call that autograd records, with its dispatch keys."""

    @staticmethod
    def forward(ctx: Any, keyset: Any, *inputs: Any) -> Tensor:
        """The output, computed by the dispatch keys below autograd."""
        y = _redispatched(keyset, inputs)
        x, weight, bias, residual, scale, shift, mean, variance = inputs[:8]
        ctx.eps, ctx.stride, ctx.padding, ctx.dilation, ctx.groups, ctx.activation = inputs[9:15]
        ctx.save_for_backward(x, weight, bias, residual if _needs_sum(ctx.activation) else None, scale, shift, mean, variance, y)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients: none for the keys, then those of the inputs."""
        return None, *_gradients(ctx, *grads)


def _needs_sum(activation: str) -> bool:
    """Whether the gradient needs the activation's input, because its derivative does not follow from its output."""
    return activation != "none" and activation_of(activation).derivative is None


def _behind(activation: str, total: Tensor, grad: Tensor) -> Tensor:
    """The gradient with respect to the activation's input, by PyTorch's own formula."""
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        total = total if again and total.requires_grad else total.detach().requires_grad_()
        (result,) = torch.autograd.grad(activate(activation, total), total, grad, create_graph=again)
    return result


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients by PyTorch's `convolution_backward` and the formulas of the epilogue."""
    x, weight, bias, residual, scale, shift, mean, variance, y = ctx.saved_tensors
    wants = ctx.needs_input_grad[1:]
    padded, sides = symmetric(x, ctx.padding)
    plain = normal = None
    deviation = None if mean is None else torch.rsqrt(variance + ctx.eps)[:, None, None]
    if _needs_sum(ctx.activation) or wants[4]:
        plain = torch.conv2d(padded, weight, bias, ctx.stride, sides, ctx.dilation, ctx.groups)
        normal = plain if mean is None else (plain - mean[:, None, None]) * deviation
    if _needs_sum(ctx.activation):
        assert normal is not None
        z = normal if scale is None else normal * scale[:, None, None]
        z = z if shift is None else z + shift[:, None, None]
        z = z if residual is None else z + residual
        grad = _behind(ctx.activation, z, grad)
    elif ctx.activation != "none":
        factor = derivative(ctx.activation, y)
        grad = torch.where(factor, grad, 0) if factor.dtype is torch.bool else (grad * factor).to(grad.dtype)
    of_residual, of_shift = grad, grad.sum((0, 2, 3)) if wants[5] else None
    of_scale = (grad * normal).sum((0, 2, 3)) if wants[4] and normal is not None else None
    if deviation is not None:
        grad = (grad * (deviation if scale is None else deviation * scale[:, None, None])).to(x.dtype)
    sizes = None if bias is None else [bias.shape[0]]
    of_x, of_weight, of_bias = torch.ops.aten.convolution_backward(
        grad, padded, weight, sizes, ctx.stride, sides, ctx.dilation, False, [0, 0], ctx.groups, [wants[0], wants[1], bool(wants[2])]
    )
    if of_x is not None and padded is not x:
        top, left = ctx.padding[:2]
        of_x = of_x[:, :, top : top + x.shape[2], left : left + x.shape[3]]
    return (
        of_x, of_weight, of_bias if wants[2] else None, of_residual if wants[3] else None, of_scale, of_shift, *[None] * 10
    )  # fmt: skip


def _redispatched(keyset: Any, inputs: tuple[Any, ...]) -> Tensor:
    with torch._C._AutoDispatchBelowAutograd():
        y: Tensor = conv2d.redispatch(keyset & torch._C._after_autograd_keyset, *inputs)
    return y


_AFTER = torch._C._after_autograd_keyset.raw_repr()
_BACKENDS = frozenset(torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name)).raw_repr() for name in ("CPU", "CUDA"))


def _needs_grad(*inputs: Any) -> bool:
    return any(isinstance(one, Tensor) and one.requires_grad for one in inputs)


_any_requires_grad = getattr(torch._C, "_any_requires_grad", _needs_grad)


def _autograd(keyset: Any, *inputs: Any) -> Tensor:
    """The autograd kernel, like that of `torch.library.register_autograd`.

    A call without gradients goes directly to its kernel, without the dispatcher, if no tracer, dispatch mode, subclass or function
    transform is active.
    """
    if torch.is_grad_enabled() and _any_requires_grad(*inputs):
        y: Tensor = _Differentiable.apply(keyset, *inputs)  # type: ignore[no-untyped-call,unused-ignore]
        return y
    return _kernel(*inputs) if keyset.raw_repr() & _AFTER in _BACKENDS else _redispatched(keyset, inputs)


def _tags() -> Iterator[Any]:
    yield torch.Tag.pt2_compliant_tag
    # the fake kernel derives the output's strides from x's, so compilers must not change x's
    yield getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order)


# Defined through the library, since the wrapper of `torch.library.custom_op` adds checks to every call.
_make: Any = torch.library.Library
_LIBRARY = _make("im2win", "DEF")
_LIBRARY.define(SCHEMA, tags=tuple(_tags()))
_LIBRARY.define(SCHEMA.replace("conv2d", "conv2d_in_python", 1))  # `native` replaces the kernels of `conv2d` and calls these
for _name in ("conv2d", "conv2d_in_python"):
    for _key in ("CPU", "CUDA"):
        _LIBRARY.impl(_name, _kernel, _key)
    _LIBRARY.impl(_name, _autograd, "Autograd", with_keyset=True)
torch.library.register_fake("im2win::conv2d", _fake, lib=_LIBRARY)
_LIBRARY.define(SITE_SCHEMA, tags=tuple(_tags()))
_LIBRARY.define(SITE_SCHEMA.replace("site", "site_in_python", 1))
for _name in ("site", "site_in_python"):
    for _key in ("CPU", "CUDA"):
        _LIBRARY.impl(_name, _at_site, _key)
    _LIBRARY.impl(_name, torch.library.fallthrough_kernel, "Autograd")  # compilers use call sites only where no gradient is needed
torch.library.register_fake("im2win::site", _fake_site, lib=_LIBRARY)

conv2d = torch.ops.im2win.conv2d.default
at_site = torch.ops.im2win.site.default
