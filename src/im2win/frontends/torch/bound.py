"""Operators bound to the parameters of one conv call site, and their registry by artefact name."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch

from im2win.builder.cache import Artefacts
from im2win.frontends.torch import native, pool
from im2win.frontends.torch.plain import Parameters, Tensor, folded
from im2win.runtime.cuda import ALIGNMENT
from im2win.runtime.dltensor import Addressed
from im2win.runtime.op import Op
from im2win.spec.conv2d import Conv2d

log = logging.getLogger("im2win.torch")


class Bound:
    """An operator of im2win bound to the parameters of one conv call site. It packs the parameters again when they change.

    A change is another address or another version of a tensor. It detects assignment, `load_state_dict`, training and moves to a device,
    but not writes through ``.data`` or into tensors made under `inference_mode`.

    Attributes:
        output_shape: of the output, [batch, channels, height, width].
    """

    def __init__(self, name: str, op: Op, eps: float) -> None:
        self.name, self.op, self.eps = name, op, eps
        conv = op.conv
        channels, (height, width) = conv.out_channels, conv.output_size
        self.output_shape = torch.Size((conv.batch, channels, height, width))
        self._nhwc = conv.layout == "NHWC"
        self._order = torch.channels_last if self._nhwc else torch.contiguous_format
        plane = height * width
        self._strides = (channels * plane, 1, width * channels, channels) if self._nhwc else (channels * plane, plane, width, 1)
        self._dtype = getattr(torch, conv.out_dtype)
        self._layer: Any = None
        self._views: Addressed | None = None  # `DLTensor` arguments for channels-last tensors
        self._device: torch.device | None = None
        self._held: list[Tensor] = []  # keeps the tensors alive, so that no other tensor gets their addresses
        self._stamps: tuple[tuple[int, ...], tuple[int, ...]] = (), ()  # addresses and versions
        self._counted = False  # whether all of them have versions
        self._place: Any = None  # the entry for calls without Python
        self._lock = threading.Lock()

    def __deepcopy__(self, memo: Any) -> Bound:
        return Bound(self.name, self.op, self.eps)

    def fresh(self, given: Sequence[Tensor], addresses: tuple[int, ...] | None = None) -> bool:
        """Whether these are the bound parameters, unchanged.

        Args:
            addresses: of the parameters, where the caller knows them.
        """
        held, versions = self._stamps
        if (addresses or addresses_of(given)) != held:
            return False
        try:
            return (tuple(map(_version, given)) if self._counted else _versions(given)) == versions
        except RuntimeError:  # a tensor made under inference_mode has no version
            return False

    def refresh(self, parameters: Parameters, *, force: bool = False) -> None:
        """Packs filters and bias again if the parameters have changed, or always with `force`.

        The new ones overwrite the memory of the old ones if that is on the same device.
        """
        given = [one for one in parameters if one is not None]
        with self._lock:
            if force or not self.fresh(given):
                self._bind(parameters, given)

    def _bind(self, parameters: Parameters, given: list[Tensor]) -> None:
        device = parameters[0].device
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("filters are packed by a call outside a CUDA graph: call the module once before capturing it.")
        stamps = addresses_of(given), _versions(given)
        with torch.no_grad():
            weight, *others = self._folded(parameters)
        self._place = None
        if self._layer is not None and device == self._device:
            self._layer.rebind(weight, *others)
        else:
            self._layer, self._device = self.op.bind(weight, *others), device
            kind, number = weight.__dlpack_device__()
            self._views = Addressed(self.op.conv, (int(kind), int(number))) if self._nhwc else None
        if _BOUND.get(self._key()) is self:
            del _BOUND[self._key()]
        self._stamps, self._held = stamps, [one.detach() for one in given]
        self._counted = not any(one.is_inference() for one in given)
        _BOUND[self._key()] = self

    def _folded(self, parameters: Parameters) -> tuple[Any, ...]:
        """What `Op.bind` takes."""
        return folded(parameters, self.eps)

    def _key(self) -> tuple[Any, ...]:
        return self.name, self.eps, *self._stamps[0]

    def __call__(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """The output for tensors of the operator's problem on its device, in x's memory format.

        Tensors are only converted to the kernel's memory order.
        """
        if x.requires_grad:
            x = x.detach()
        x = self._laid_out(x)
        if residual is not None:
            residual = self._laid_out(residual.detach() if residual.requires_grad else residual)
        y = self._empty(x)
        if self._views is None:
            self._layer.run(x, residual, y)
        else:
            added = 0 if residual is None else residual.data_ptr()
            self._layer.run(*self._views.at(x.data_ptr(), added, y.data_ptr()), x)
        return y

    def _empty(self, x: Tensor) -> Tensor:
        """An uninitialised output."""
        return x.new_empty_strided(self.output_shape, self._strides, dtype=self._dtype)

    def remember(self) -> None:
        """Lets later calls like the one just computed bypass Python (`native`)."""
        if native.site is native.in_python:
            return
        with self._lock:
            if self._place is None:
                self._place = native.place(self._layer.launch, self.op.conv, self._held, self._stamps[1])
            self._place.remember()

    def _laid_out(self, tensor: Tensor) -> Tensor:
        """The values in the kernel's memory order, contiguous, and on a GPU aligned for its vector copies."""
        tensor = tensor.contiguous(memory_format=self._order)
        return tensor.clone() if tensor.is_cuda and tensor.data_ptr() % ALIGNMENT else tensor


_address = torch.Tensor.data_ptr
_version = attrgetter("_version")


def addresses_of(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """Addresses of the tensors' first elements."""
    return tuple(map(_address, tensors))


def _versions(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    return tuple(-1 if one.is_inference() else one._version for one in tensors)


_BOUND: weakref.WeakValueDictionary[Any, Bound] = weakref.WeakValueDictionary()  # key: name, eps and addresses of parameters
_OWN: dict[Any, Bound] = {}  # for exported or compiled programs, which have no call site that holds a reference
_OPS: dict[str, Op | None] = {}
BUILDERS: dict[str, Callable[[Conv2d], str | None]] = {}
_NOTED: set[str] = set()


def register(name: str, op: Op, builder: Callable[[Conv2d], str | None] | None = None) -> None:
    """Registers an operator under its artefact's name; `builder` returns the name of an artefact for the problem of another x, or None."""
    _OPS[name] = op
    if builder is not None:
        BUILDERS[name] = builder


def operator(name: str) -> Op | None:
    """The operator of an artefact, from this process or the cache; None if there is none."""
    if name not in _OPS:
        pool.share()
        native.load(make=False)
        _OPS[name] = Artefacts().find(name)
        if _OPS[name] is None:
            note(name, f"no artefact {name} in {Artefacts().folder}: PyTorch computes its calls")
    return _OPS[name]


def note(key: str, message: str) -> None:
    """Logs a message once."""
    if key not in _NOTED:
        _NOTED.add(key)
        log.warning(message)


def bound_for(name: str, eps: float, parameters: Parameters) -> Bound | None:
    """The operator of an artefact bound to these parameters, from an earlier call or new; None if there is no such artefact."""
    key = (name, eps, *(one.data_ptr() for one in parameters if one is not None))
    found = _BOUND.get(key)
    if found is None and (op := operator(name)) is not None:
        found = Bound(name, op, eps)
        found.refresh(parameters)
        _OWN[key] = found
        weakref.finalize(parameters[0], _OWN.pop, key, None).atexit = False
    return found
