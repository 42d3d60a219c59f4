"""CUDA schedules with tiles of their own: what ranks, tunes, builds and looks up asks the plan, not `schedules.cuda`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from im2win.device.gpu import Gpu
from im2win.packing.codec import Pack
from im2win.schedules.cuda.model.multistage import Estimate
from im2win.schedules.cuda.plan import CudaPlan
from im2win.spec.accuracy import Accuracy
from im2win.spec.conv2d import Conv2d
from im2win.spec.symbols import SYMBOL


@dataclass(frozen=True)
class CudaFamily(CudaPlan):
    """A plan whose tiles are no `CudaTile`.

    Tiles have `as_dict` and the properties of `schedules.cuda.tiles.multistage.CudaTile` that tell tiles apart.
    """

    @abstractmethod
    def unable(self, conv: Conv2d, accuracy: Accuracy) -> str | None:
        """Why no tile computes a convolution with that accuracy; None if one does."""

    @abstractmethod
    def tile(self, values: Mapping[str, Any]) -> Any:
        """A tile from its plain values; ValueError if they are none."""

    @abstractmethod
    def space(self, conv: Conv2d, gpu: Gpu) -> list[Any]:
        """Every tile worth a trial, legal all of them."""

    @abstractmethod
    def problems(self, conv: Conv2d, tile: Any, gpu: Gpu) -> list[str]:
        """Every rule that a tile breaks."""

    @abstractmethod
    def estimate(self, conv: Conv2d, tile: Any, gpu: Gpu) -> Estimate:
        """The model's estimate of a legal tile."""

    @abstractmethod
    def pack(self, conv: Conv2d, tile: Any) -> Pack:
        """How filters are packed for a tile."""

    @abstractmethod
    def kernels(self, conv: Conv2d, tile: Any, gpu: Gpu) -> dict[str, Any]:
        """The kernels of a legal tile by name, scheduled."""

    @abstractmethod
    def shape(self, tile: Any) -> tuple[Any, ...]:
        """What makes two tiles alike enough that one of them is enough to begin with."""


@dataclass(frozen=True)
class Parts:
    """What a plan of one kernel is made of: the class of its tiles, and functions as in `CudaFamily`."""

    tile: type[Any]
    unable: Callable[[Conv2d], str | None]
    problems: Callable[[Conv2d, Any, Gpu], list[str]]
    space: Callable[[Conv2d, Gpu], list[Any]]
    estimate: Callable[[Conv2d, Any, Gpu], Estimate]
    kernel: Callable[[Conv2d, Any, Gpu, str], Any]
    """kernel(conv, tile, gpu, name) over the tensors of `conv.arguments`"""


@dataclass(frozen=True)
class OneKernel(CudaFamily):
    """A plan whose tiles are of one kernel, between which and the next nothing is made, with one accuracy."""

    @abstractmethod
    def parts(self) -> Parts:
        """What it is made of."""

    def made_bytes(self, conv: Conv2d, tile: Any) -> int:
        """None."""
        return 0

    def unable(self, conv: Conv2d, accuracy: Accuracy) -> str | None:
        """Why no tile computes a convolution; None if one does."""
        return self.parts().unable(conv)

    def tile(self, values: Mapping[str, Any]) -> Any:
        """A tile from its plain values; ValueError if they are none."""
        return self.parts().tile.from_dict(values)

    def space(self, conv: Conv2d, gpu: Gpu) -> list[Any]:
        """Every tile worth a trial."""
        return self.parts().space(conv, gpu)

    def problems(self, conv: Conv2d, tile: Any, gpu: Gpu) -> list[str]:
        """Every rule that a tile breaks."""
        return self.parts().problems(conv, tile, gpu)

    def estimate(self, conv: Conv2d, tile: Any, gpu: Gpu) -> Estimate:
        """The model's estimate."""
        return self.parts().estimate(conv, tile, gpu)

    def pack(self, conv: Conv2d, tile: Any) -> Pack:
        """How filters are packed for a tile."""
        pack: Pack = tile.pack(conv)
        return pack

    def kernels(self, conv: Conv2d, tile: Any, gpu: Gpu) -> dict[str, Any]:
        """The kernel, by its name."""
        return {SYMBOL: self.parts().kernel(conv, tile, gpu, SYMBOL)}
