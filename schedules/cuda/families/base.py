"""The one protocol of CUDA schedules: whoever ranks, tunes, builds or looks up asks it, and knows no family."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from im2win.device.gpu import Gpu
from im2win.packing.codec import Pack
from im2win.schedules.cuda.model.multistage import Estimate
from im2win.schedules.cuda.tiles.base import CudaTile
from im2win.spec.accuracy import Accuracy
from im2win.spec.conv2d import Conv2d


@dataclass(frozen=True)
class Reconstruction:
    """How the reconstructor makes of generated kernels what a tile says.

    rules: rule sets of `reconstruct.rulesets`, in order; one that does not match is an error. wave: see there.
    pipeline: TVM's passes that generate the source.
    """

    rules: tuple[str, ...]
    wave: int
    pipeline: str


@dataclass(frozen=True)
class CudaSchedule(ABC):
    """How an algorithm runs on GPUs: its tiles, which of them are legal and worth a trial, what they cost, and their kernels.

    Tiles are values of the schedule's own type, all of them a `CudaTile`.
    """

    @abstractmethod
    def unsupported_reason(self, conv: Conv2d, accuracy: Accuracy) -> str | None:
        """Why no tile computes a convolution with that accuracy; None if one does."""

    def transform_bytes(self, conv: Conv2d) -> int:
        """Least bytes that any tile stores between its kernels; 0 where there is one kernel."""
        return 0

    def workspace_bytes(self, conv: Conv2d, tile: Any) -> int:
        """Bytes beside its tensors that a call with this tile needs."""
        return 0

    @abstractmethod
    def tile(self, values: Mapping[str, Any]) -> CudaTile:
        """A tile from its plain values; ValueError if they are none."""

    @abstractmethod
    def space(self, conv: Conv2d, gpu: Gpu, accuracy: Accuracy) -> list[Any]:
        """Every tile worth a trial, legal all of them, in a fixed order. Those of less accuracy may be among them."""

    @abstractmethod
    def violations(self, conv: Conv2d, tile: Any, gpu: Gpu) -> list[str]:
        """Every rule that a tile breaks; empty if it is legal."""

    @abstractmethod
    def estimate(self, conv: Conv2d, tile: Any, gpu: Gpu) -> Estimate:
        """The model's estimate of a legal tile."""

    @abstractmethod
    def pack(self, conv: Conv2d, tile: Any) -> Pack:
        """How filters are packed for a tile."""

    @abstractmethod
    def kernels(self, conv: Conv2d, tile: Any, gpu: Gpu) -> dict[str, Any]:
        """The kernels of a legal tile by name: see `registry.cuda_lowering.lower`."""

    def reconstruction(self, tile: Any) -> Reconstruction | None:
        """What the reconstructor makes of these kernels; None where they are final."""
        return None
