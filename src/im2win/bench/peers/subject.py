"""The subjects of a benchmark: what is prepared for a layer and its tensors, and then timed.

A subject has a `name` and `prepare(conv, tensors, threads) -> Trial`. Everything that a deployed model does once (session creation, filter
packing, tuning, layout conversion of the input) happens in `prepare`. `Trial.call` is what a caller waits for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from numpy.typing import NDArray

from im2win.numerics.reference import reference, typed_tensors
from im2win.runtime.tensors import aligned
from im2win.spec.conv2d import Conv2d

Array = NDArray[Any]


class PeerError(RuntimeError):
    """A peer that cannot run here (not installed, layer not supported). The message says why."""


@dataclass(frozen=True)
class Tensors:
    """The arguments of one layer, in the layout and dtype of its `Conv2d`."""

    data: Array
    filter: Array
    bias: Array | None = None
    residual: Array | None = None
    scale: Array | None = None

    @classmethod
    def random(cls, conv: Conv2d, seed: int = 0) -> Tensors:
        """Random tensors (`typed_tensors`), aligned to cache lines as in PyTorch and ONNX Runtime.

        Constant tensors are no choice, since some libraries and CPUs are faster on zeros or ones.
        """
        named = {name: aligned(array) for name, array in typed_tensors(conv, seed).items()}
        return cls(named["data"], named["filter"], named.get("bias"), named.get("residual"), named.get("scale"))

    def expected(self, conv: Conv2d) -> Array:
        """The layer's output in float64."""
        return reference(conv, self.data, self.filter, self.bias, self.residual, self.scale)


@dataclass(frozen=True)
class Trial:
    """A prepared subject: `call()` runs the layer once; `read()` is the result of the last call in the layout of the `Conv2d`.

    The other fields are facts of im2win's subjects; `tier` is the tier of the look-up that chose the tile.
    """

    call: Callable[[], object]
    read: Callable[[], Array]
    algorithm: str = ""
    tuned: bool = False
    extra_bytes: int = 0
    tile: dict[str, Any] = field(default_factory=dict)
    tier: str = ""


class Subject(Protocol):
    """A subject: anything that can be timed on a layer."""

    @property
    def name(self) -> str:
        """Name in results."""
        ...

    def prepare(self, conv: Conv2d, tensors: Tensors, threads: int) -> Trial:
        """Does everything that is done once for a layer. Raises PeerError (or any exception of the library) if it cannot."""
        ...


def to_nchw(array: Array, conv: Conv2d) -> Array:
    """A view of an input, residual or output of `conv` as [batch, channels, height, width]."""
    return array if conv.layout == "NCHW" else array.transpose(0, 3, 1, 2)


def from_nchw(array: Array, conv: Conv2d) -> Array:
    """The inverse of `to_nchw`."""
    return array if conv.layout == "NCHW" else array.transpose(0, 2, 3, 1)
