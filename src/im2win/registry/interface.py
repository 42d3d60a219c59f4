"""What ranking, tuning, look-up and building ask of a device with its schedules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from im2win.registry.schedules import Schedule
from im2win.spec.accuracy import Accuracy
from im2win.spec.conv2d import Conv2d

Tile = Any
"""`schedules.cpu.tile.Tile`, `DepthwiseTile` or `WinogradTile` of the folders beside it, or a `schedules.cuda.tiles.base.CudaTile`."""


@dataclass(frozen=True)
class Kernel:
    """What was compiled: its fingerprint (`im2win.records.emission`), and the bytes of what it takes beside its arguments.

    That is, on a CPU, what a call allocates and what packed filters grow by; on a GPU, the tensor that a call makes before the product.
    """

    extra_bytes: int
    fingerprint: str


class Backend(Protocol):
    """A device with its schedules.

    target: kind of target; name: the device's folder in a log; threads: of the CPU that run a kernel; workers: processes that build.
    """

    target: str
    name: str
    threads: int
    runner: str

    @property
    def workers(self) -> int: ...
    def check_tools(self) -> None: ...
    def measurement_slots(self) -> list[dict[str, str]]: ...
    def tile(self, row: Schedule, values: Mapping[str, Any]) -> Tile: ...
    def ranked(self, conv: Conv2d, row: Schedule) -> list[tuple[float, Tile]]: ...
    def floor(self, conv: Conv2d, row: Schedule) -> float: ...
    def cost(self, conv: Conv2d, row: Schedule, tile: Tile) -> float: ...
    def features(self, conv: Conv2d, row: Schedule, tile: Tile, cost: float) -> list[float]: ...
    def shape(self, row: Schedule, tile: Tile) -> tuple[Any, ...]: ...
    def violations(self, conv: Conv2d, row: Schedule, tile: Tile) -> list[str]: ...
    def pack(self, conv: Conv2d, row: Schedule, tile: Tile) -> Any: ...
    def workspace_bytes(self, conv: Conv2d, row: Schedule, tile: Tile) -> int: ...
    def build(self, conv: Conv2d, row: Schedule, tile: Tile, path: Path) -> Kernel: ...
    def accuracy(self, tile: Tile) -> Accuracy: ...
    def proven(self, conv: Conv2d, tile: Tile) -> bool: ...
    def alike(self, conv: Conv2d, other: Conv2d) -> bool: ...
