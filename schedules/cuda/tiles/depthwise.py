"""The tile of the depthwise schedule on GPUs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from im2win.common.caching import derived, hashed_once
from im2win.schedules.cuda.tiles.base import BaseTile
from im2win.spec.conv2d import Conv2d


@hashed_once
@dataclass(frozen=True)
class DepthwiseTile(BaseTile):
    """Outputs of neighbouring channels, `rows` x `cols` windows of each, in the registers of a thread.

    product: the kind of arithmetic, of CUDA cores.
    vector: neighbouring channels of a thread, at most 16 bytes.
    rows, cols: rows and columns of outputs of a thread.
    channels, tasks: threads of a block along vectors of channels, and along tiles of outputs. Channels first, `tasks` counts the tiles of
        all channels, and `channels` is 1.
    staged: "window": a thread loads all inputs of its outputs ahead of the products; "row": those of a kernel row at a time.
    """

    product: str
    vector: int
    rows: int
    cols: int
    channels: int
    tasks: int
    staged: str

    def stores(self, conv: Conv2d) -> int:
        """Stores of a thread for each row of its outputs, channels first: neighbours that never reach over a row's end are one vector."""
        return 1 if self.cols in (1, 2, 4, 8) and conv.output_size[1] % self.cols == 0 else self.cols

    @derived
    def block_m(self) -> int:
        """Channels of a thread block."""
        return self.vector * self.channels

    @derived
    def block_n(self) -> int:
        """Outputs of a thread block for each channel."""
        return self.warp_n * self.tasks

    @property
    def warp_m(self) -> int:
        """Channels of a thread: lanes share nothing."""
        return self.vector

    @derived
    def warp_n(self) -> int:
        """Outputs of a thread for each channel."""
        return self.rows * self.cols

    @derived
    def threads(self) -> int:
        """Threads of a block."""
        return self.channels * self.tasks

    @derived
    def accumulators(self) -> int:
        """Accumulators of a thread."""
        return self.vector * self.rows * self.cols

    @property
    def deduplication_key(self) -> tuple[Any, ...]:
        """Tiles with equal keys count as alike; the tuner's first population takes one of them."""
        return self.vector, self.rows, self.cols, self.staged

    def features(self) -> dict[str, float]:
        """Numerical features of a tile, for the tuner's cost model."""
        return {"rows": self.rows, "cols": self.cols, "windows_staged": self.staged == "window"}
