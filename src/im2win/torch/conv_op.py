"""`torch.ops.im2win.conv2d`: a convolution and what follows it as an operator of PyTorch, which compilers, exporters and autograd see.

``y = activation(norm(conv(x, weight) + bias) + residual)``, norm being a batch normalisation with fixed statistics, where there is one. The
operator takes plain parameters and the name of an artefact (`im2win.artefacts`). Where that was built for x's shape, type and layout it
runs; its filters, normalisation folded in, are packed at the first call and whenever a parameter's version or address changes. For every
other x, and where no artefact of that name is found, PyTorch computes the same.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from im2win.artefacts import Artefacts, conv_of
from im2win.problem import Conv2d, ConvError
from im2win.runtime import Op

log = logging.getLogger("im2win.torch")

Tensor = torch.Tensor
Maybe = Tensor | None
Parameters = tuple[Tensor, Maybe, Maybe, Maybe, Maybe, Maybe, Maybe]
"""weight, bias, and of the normalisation scale, shift, mean, variance and counter.

counter: `num_batches_tracked`. Nothing computes with it; but training writes mean and variance without PyTorch counting that as a change of
theirs, and counts batches here.
"""

SCHEMA = (
    "conv2d(Tensor x, Tensor weight, Tensor? bias, Tensor? residual, Tensor? scale, Tensor? shift, Tensor? mean, Tensor? variance, "
    "Tensor? counter, float eps, int[] stride, int[] padding, int[] dilation, int groups, str activation, str kernel) -> Tensor"
)
DTYPES = {torch.float32: "float32", torch.float16: "float16"}

_functional = torch.nn.functional
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda y: y,
    "relu": torch.relu,
    "relu6": _functional.relu6,
    "silu": _functional.silu,
}


# --- what PyTorch computes


def _symmetric(x: Tensor, padding: Sequence[int]) -> tuple[Tensor, tuple[int, int]]:
    """x with what PyTorch's convolution cannot pad by itself, and what it can."""
    top, left, bottom, right = padding
    if (top, left) == (bottom, right):
        return x, (top, left)
    return _functional.pad(x, (left, right, top, bottom)), (0, 0)


def reference(
    x: Tensor, parameters: Parameters, residual: Tensor | None, eps: float, stride: Any, padding: Any, dilation: Any, groups: int,
    activation: str,
) -> Tensor:  # fmt: skip
    """The same by PyTorch's own operators, differentiable as they are."""
    weight, bias, scale, shift, mean, variance, _ = parameters
    padded, sides = _symmetric(x, padding)
    y = torch.conv2d(padded, weight, bias, stride, sides, dilation, groups)
    if mean is not None:
        y = _functional.batch_norm(y, mean, variance, scale, shift, False, 0.0, eps)
    return activate(activation, y if residual is None else y + residual)


def activate(name: str, y: Tensor) -> Tensor:
    """An activation of `im2win.problem.ACTIVATIONS`."""
    return _ACTIVATIONS[name](y)


def memory_format(x: Tensor, weight: Tensor) -> torch.memory_format:
    """Of the output: channels-last if x or the weight is, as for PyTorch's convolution."""
    return torch.channels_last if _is_channels_last(x) or _is_channels_last(weight) else torch.contiguous_format


def _is_channels_last(tensor: Tensor) -> bool:
    """Whether the strides are those of channels-last memory, or of a part of it; decided by them even where a size is 1."""
    _, channels, height, width = tensor.shape
    batch_stride, channel_stride, row_stride, column_stride = tensor.stride()
    if channel_stride < 1 or column_stride < channel_stride * channels or channels == height == width == 1:
        return False
    return row_stride >= column_stride * width and batch_stride >= row_stride * height


def problem(
    x: Tensor, parameters: Parameters, residual: bool, stride: Any, padding: Any, dilation: Any, groups: int, activation: str
) -> Conv2d:
    """The problem that a call is.

    Raises:
        ConvError: none of im2win's; the message says why.
    """
    weight, bias, mean = parameters[0], parameters[1], parameters[4]
    if x.dim() != 4:
        raise ConvError(f"the input has {x.dim()} dimensions, not 4")
    if x.dtype not in DTYPES or weight.dtype != x.dtype:
        raise ConvError(f"input and filters are {_plain(x.dtype)} and {_plain(weight.dtype)}, not both {' or '.join(DTYPES.values())}")
    if x.device != weight.device or x.device.type not in ("cpu", "cuda"):
        raise ConvError(f"input and filters are on {x.device} and {weight.device}, not both on the CPU or on one GPU")
    batch, channels, height, width = x.shape
    layout = "NHWC" if memory_format(x, weight) == torch.channels_last else "NCHW"
    return Conv2d(
        batch, channels, height, width, weight.shape[0], tuple(weight.shape[2:]), stride, padding, dilation, groups, DTYPES[x.dtype],
        layout, bias is not None or mean is not None, residual, activation,
    )  # fmt: skip


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def folded(parameters: Parameters, eps: float) -> tuple[Tensor, Tensor | None]:
    """Filters and bias with the normalisation in them, computed in float64, of the weight's type."""
    weight, bias, scale, shift, mean, variance = (None if one is None else one.detach() for one in parameters[:6])
    assert weight is not None
    if mean is None or variance is None:
        return weight, bias
    factor = 1 / torch.sqrt(variance.double() + eps)
    if scale is not None:
        factor = factor * scale.double()
    offset = ((0 if bias is None else bias.double()) - mean.double()) * factor
    if shift is not None:
        offset = offset + shift.double()
    return (weight.double() * factor[:, None, None, None]).to(weight.dtype), offset.to(weight.dtype)


# --- operators with filters


class Bound:
    """An operator of im2win with the parameters of one place in a network, packed again when these change.

    A change is another address or another version of a tensor: assignment, `load_state_dict`, training and moves to a device are seen,
    writing through ``.data`` and into tensors made under `inference_mode` is not.

    output_shape: of the output, [batch, channels, height, width].
    """

    def __init__(self, name: str, op: Op, eps: float) -> None:
        self.name, self.op, self.eps = name, op, eps
        conv = op.conv
        channels, (height, width) = conv.out_channels, conv.output_size
        self.output_shape = torch.Size((conv.batch, channels, height, width))
        self._nhwc = conv.layout == "NHWC"
        plane = height * width
        self._strides = (channels * plane, 1, width * channels, channels) if self._nhwc else (channels * plane, plane, width, 1)
        self._layer: Any = None
        self._device: torch.device | None = None
        self._held: list[Tensor] = []  # so that addresses stay their own
        self._stamps: list[tuple[int, int]] = []  # address and version
        self._counted = False  # whether all of them have versions
        self._lock = threading.Lock()

    def __deepcopy__(self, memo: Any) -> Bound:
        return Bound(self.name, self.op, self.eps)

    def fresh(self, given: Sequence[Tensor]) -> bool:
        """Whether these are the parameters that it was bound with, unchanged."""
        if not self._counted:
            return [_stamp(one) for one in given] == self._stamps
        try:
            for one, (address, version) in zip(given, self._stamps, strict=True):
                if one._version != version or one.data_ptr() != address:
                    return False
        except RuntimeError:  # one that was made under inference_mode has no version
            return False
        return True

    def refresh(self, parameters: Parameters, *, force: bool = False) -> None:
        """Packs filters and bias anew unless they are fresh, or in any case: where the last ones lie, if that is on the same device."""
        given = [one for one in parameters if one is not None]
        with self._lock:
            if force or not self.fresh(given):
                self._bind(parameters, given)

    def _bind(self, parameters: Parameters, given: list[Tensor]) -> None:
        device = parameters[0].device
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("filters are packed by a call outside a CUDA graph: call the module once before capturing it.")
        stamps = [_stamp(one) for one in given]
        with torch.no_grad():
            weight, bias = folded(parameters, self.eps)
        if self._layer is not None and device == self._device:
            self._layer.rebind(weight, bias)
        else:
            self._layer, self._device = self.op.bind(weight, bias), device
        if _BOUND.get(self._key()) is self:
            del _BOUND[self._key()]
        self._stamps, self._held = stamps, [one.detach() for one in given]
        self._counted = not any(one.is_inference() for one in given)
        _BOUND[self._key()] = self

    def _key(self) -> tuple[Any, ...]:
        return self.name, self.eps, *(address for address, _ in self._stamps)

    def __call__(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """The output for an x of the operator's problem, in its memory format. Nothing is checked but the order of memory."""
        if x.requires_grad:
            x = x.detach()
        if residual is not None and residual.requires_grad:
            residual = residual.detach()
        y = x.new_empty_strided(self.output_shape, self._strides)
        if self._nhwc:
            added = None if residual is None else residual.permute(0, 2, 3, 1).contiguous()
            self._layer.run(x.permute(0, 2, 3, 1).contiguous(), added, y.permute(0, 2, 3, 1))
        else:
            self._layer.run(x.contiguous(), None if residual is None else residual.contiguous(), y)
        return y


def _stamp(tensor: Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), -1 if tensor.is_inference() else tensor._version


_BOUND: weakref.WeakValueDictionary[Any, Bound] = weakref.WeakValueDictionary()  # by name, eps and addresses of parameters
_CALLS: weakref.WeakValueDictionary[Any, Bound] = weakref.WeakValueDictionary()  # what a call's tensors, as they are laid out, resolve to
_OWN: dict[Any, Bound] = {}  # of programs that were exported or compiled elsewhere: these have no place of ours to hold them
_OPS: dict[str, Op | None] = {}
_BUILDERS: dict[str, Callable[[Conv2d], str | None]] = {}
_NOTED: set[str] = set()


def register(name: str, op: Op, builder: Callable[[Conv2d], str | None] | None = None) -> None:
    """Makes an operator known by its artefact's name; `builder` names an artefact for the problem of another x, or None."""
    _OPS[name] = op
    if builder is not None:
        _BUILDERS[name] = builder


def operator(name: str) -> Op | None:
    """The operator of an artefact, from this process or the cache; None if there is none."""
    if name not in _OPS:
        _OPS[name] = Artefacts().find(name)
        if _OPS[name] is None:
            note(name, f"no artefact {name} in {Artefacts().folder}: PyTorch computes its calls")
    return _OPS[name]


def note(key: str, message: str) -> None:
    """Logs a message once."""
    if key not in _NOTED:
        _NOTED.add(key)
        log.warning(message)


def _bound(name: str, eps: float, parameters: Parameters) -> Bound | None:
    key = (name, eps, *(one.data_ptr() for one in parameters if one is not None))
    found = _BOUND.get(key)
    if found is None and (op := operator(name)) is not None:
        found = Bound(name, op, eps)
        found.refresh(parameters)
        _OWN[key] = found
        weakref.finalize(parameters[0], _OWN.pop, key, None).atexit = False
    return found


# --- the operator


def _kernel(
    x: Tensor, weight: Tensor, bias: Maybe, residual: Maybe, scale: Maybe, shift: Maybe, mean: Maybe, variance: Maybe, counter: Maybe,
    eps: float, stride: list[int], padding: list[int], dilation: list[int], groups: int, activation: str, kernel: str,
) -> Tensor:  # fmt: skip
    parameters = (weight, bias, scale, shift, mean, variance, counter)
    given = [one for one in parameters if one is not None]
    numbers = (*stride, *padding, *dilation, groups, eps, activation, residual is None)
    call = (kernel, x.shape, x.stride(), x.dtype, weight.stride(), numbers, *[one.data_ptr() for one in given])
    bound = _CALLS.get(call)
    if bound is None:
        bound = _resolved(kernel, x, parameters, residual is not None, eps, stride, padding, dilation, groups, activation)
        if bound is not None:
            _CALLS[call] = bound
    if bound is not None and (residual is None or (residual.shape == bound.output_shape and residual.dtype == x.dtype)):
        if not bound.fresh(given):
            bound.refresh(parameters)
        return bound(x, residual)
    with torch.no_grad():
        y = reference(x, parameters, residual, eps, stride, padding, dilation, groups, activation)
        return y.contiguous(memory_format=memory_format(x, weight))


def _resolved(
    kernel: str, x: Tensor, parameters: Parameters, residual: bool, eps: float, stride: list[int], padding: list[int], dilation: list[int],
    groups: int, activation: str,
) -> Bound | None:  # fmt: skip
    """The operator for a call that has not been here before; None where PyTorch computes it."""
    if not kernel:
        return None
    try:
        conv = problem(x, parameters, residual, stride, padding, dilation, groups, activation)
    except ConvError as error:
        note(f"{kernel} {error}", f"{kernel}: {error}: PyTorch computes it")
        return None
    if conv == conv_of(kernel):
        return _bound(kernel, eps, parameters)
    if kernel in _BUILDERS:
        name = _BUILDERS[kernel](conv)
        return _bound(name, eps, parameters) if name else None
    note(f"shape {kernel}", f"{kernel}: called for {conv}, which it was not built for: PyTorch computes it")
    return None


def _fake(
    x: Tensor, weight: Tensor, bias: Maybe, residual: Maybe, scale: Maybe, shift: Maybe, mean: Maybe, variance: Maybe, counter: Maybe,
    eps: float, stride: list[int], padding: list[int], dilation: list[int], groups: int, activation: str, kernel: str,
) -> Tensor:  # fmt: skip
    def size(i: int) -> Any:
        return (x.shape[2 + i] + padding[i] + padding[2 + i] - dilation[i] * (weight.shape[2 + i] - 1) - 1) // stride[i] + 1

    shape = (x.shape[0], weight.shape[0], size(0), size(1))
    dtype = x.dtype if residual is None else torch.result_type(x, residual)
    return torch.empty(shape, dtype=dtype, device=x.device, memory_format=memory_format(x, weight))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias, residual, scale, shift, mean, variance = inputs[:8]
    ctx.eps, ctx.stride, ctx.padding, ctx.dilation, ctx.groups, ctx.activation = inputs[9:15]
    ctx.save_for_backward(x, weight, bias, residual if ctx.activation == "silu" else None, scale, shift, mean, variance, output)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """PyTorch's gradients: its `convolution_backward`, and the formulas of the epilogue round it."""
    x, weight, bias, residual, scale, shift, mean, variance, y = ctx.saved_tensors
    wants = ctx.needs_input_grad
    padded, sides = _symmetric(x, ctx.padding)
    plain = normal = None
    deviation = None if mean is None else torch.rsqrt(variance + ctx.eps)[:, None, None]
    if ctx.activation == "silu" or wants[4]:
        plain = torch.conv2d(padded, weight, bias, ctx.stride, sides, ctx.dilation, ctx.groups)
        normal = plain if mean is None else (plain - mean[:, None, None]) * deviation
    if ctx.activation == "relu":
        grad = torch.where(y > 0, grad, 0)
    elif ctx.activation == "relu6":
        grad = torch.where((y > 0) & (y < 6), grad, 0)
    elif ctx.activation == "silu":
        assert normal is not None
        z = normal if scale is None else normal * scale[:, None, None]
        z = z if shift is None else z + shift[:, None, None]
        z = z if residual is None else z + residual
        gate = torch.sigmoid(z)
        grad = grad * gate * (1 + z * (1 - gate))
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


def _tags() -> Iterator[Any]:
    yield torch.Tag.pt2_compliant_tag
    # the fake kernel tells the output's strides from x's, so compilers must not change these
    yield getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order)


# Defined with the library rather than `torch.library.custom_op`, whose wrapper adds checks to every call.
_make: Any = torch.library.Library
_LIBRARY = _make("im2win", "DEF")
_LIBRARY.define(SCHEMA, tags=tuple(_tags()))
for _key in ("CPU", "CUDA"):
    _LIBRARY.impl("conv2d", _kernel, _key)
torch.library.register_fake("im2win::conv2d", _fake, lib=_LIBRARY)
torch.library.register_autograd("im2win::conv2d", _backward, setup_context=_save, lib=_LIBRARY)

conv2d = torch.ops.im2win.conv2d.default
