"""The protocol of CUDA schedules. Ranking, tuner, builder and look-up use only this protocol and no particular family."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from im2win.device.gpu import Gpu
from im2win.packing.codec import Pack
from im2win.schedules.cuda.arithmetic import NATIVE
from im2win.schedules.cuda.model.multistage import Estimate
from im2win.schedules.cuda.tiles.base import CudaTile
from im2win.spec.accuracy import Accuracy
from im2win.spec.conv2d import Conv2d


@dataclass(frozen=True)
class Reconstruction:
    """How the reconstructor rewrites generated kernels for a tile.

    rules: names of rule sets of `reconstruct.rulesets`, in order. must: whether it is an error if one changes nothing.
    wave: consumer thread blocks in a wave, 0 for a single wave; see `reconstruct.fusion.llc.fuse`.
    pipeline: name of the TVM passes that generate the source.
    """

    rules: tuple[str, ...]
    wave: int
    pipeline: str
    must: bool = True


@dataclass(frozen=True)
class CudaSchedule(ABC):
    """How an algorithm runs on GPUs: its tiles, their legality, the search space, the cost model and the kernels.

    Tiles are values of the schedule's own type. All of them implement `CudaTile`.
    """

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Element types of the problems that some schedule of this kind may compute: those that every kind of tensor-core product has."""
        return ("float32", *NATIVE)

    @abstractmethod
    def unsupported_reason(self, conv: Conv2d, accuracy: Accuracy) -> str | None:
        """Why no tile computes a problem with that accuracy; None if one does."""

    def transform_bytes(self, conv: Conv2d) -> int:
        """Least number of bytes that any tile stores between its kernels; 0 where there is one kernel."""
        return 0

    def workspace_bytes(self, conv: Conv2d, tile: Any) -> int:
        """Bytes of workspace that a call with this tile needs beside input, filters and output."""
        return 0

    @abstractmethod
    def tile(self, values: Mapping[str, Any]) -> CudaTile:
        """The tile with these plain values.

        Raises:
            ValueError: the values are not those of a tile.
        """

    @abstractmethod
    def space(self, conv: Conv2d, gpu: Gpu, accuracy: Accuracy) -> list[Any]:
        """Every legal tile worth a trial, in a fixed order. Tiles of less accuracy than asked for may be among them."""

    @abstractmethod
    def violations(self, conv: Conv2d, tile: Any, gpu: Gpu) -> list[str]:
        """Every rule that a tile breaks, as a message; empty if the tile is legal."""

    @abstractmethod
    def estimate(self, conv: Conv2d, tile: Any, gpu: Gpu) -> Estimate:
        """The cost model's estimate for a legal tile."""

    def floor(self, conv: Conv2d, gpu: Gpu, accuracy: Accuracy) -> float:
        """Seconds that no tile of the space is estimated below; 0 where nothing is known. It is far cheaper than the space."""
        return 0.0

    @abstractmethod
    def pack(self, conv: Conv2d, tile: Any) -> Pack:
        """The packing of filters for a tile."""

    @abstractmethod
    def kernels(self, conv: Conv2d, tile: Any, gpu: Gpu) -> dict[str, Any]:
        """The kernels of a legal tile by name; see `registry.cuda_lowering.lower`."""

    def reconstruction(self, tile: Any) -> Reconstruction | None:
        """How the reconstructor rewrites these kernels; None where they are final."""
        return None
