"""The tile of the depthwise schedule on GPUs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from im2win.common.caching import derived, hashed_once
from im2win.schedules.cuda.tiles.base import BaseTile
from im2win.spec.conv2d import Conv2d

WARP = 32
ROW_ISSUES, ELEMENT_ISSUES, TURN_ISSUES = 20.0, 6.0, 4.0  # of a row that is copied, of each of its elements, of a turn of level-1 cache


@hashed_once
@dataclass(frozen=True)
class DepthwiseTile(BaseTile):
    """Outputs of neighbouring channels, `rows` x `cols` windows of each, in the registers of a thread.

    product: the kind of arithmetic, of CUDA cores.
    vector: neighbouring channels of a thread, at most 16 bytes.
    rows, cols: rows and columns of outputs of a thread.
    channels, tasks: threads of a block along vectors of channels, and along tiles of outputs.
    staged: "window": a thread loads all inputs of its outputs ahead of the products; "row": those of a kernel row at a time; "block", for
        channels first: a thread block copies whole rows of its channels to shared memory.
    """

    product: str
    vector: int
    rows: int
    cols: int
    channels: int
    tasks: int
    staged: str

    @property
    def shared(self) -> bool:
        """Whether inputs lie in shared memory."""
        return self.staged == "block"

    def row_block(self, conv: Conv2d) -> int:
        """Rows of outputs of a thread block, where whole rows lie in shared memory."""
        return self.rows * max(self.tasks // -(-conv.output_size[1] // self.cols), 1)

    def lanes(self, rows: int, width: int) -> int:
        """Lanes of a block that copy one of so many rows of so many elements; the others copy other rows at the same time."""
        fitting = [lanes for lanes in (32, 16, 8, 4, 2, 1) if self.threads % lanes == 0]
        return min(fitting, key=lambda lanes: self.copy_issues(rows, width, lanes))

    def copy_issues(self, rows: int, width: int, lanes: int) -> float:
        """Instructions of a thread to copy rows with so many lanes for each.

        Threads ask once for each row where it lies, and for each element whether it lies inside. A warp takes a turn of level-1 cache for
        every row that it reads, in which its multiprocessor begins four instructions.
        """
        return -(-rows * lanes // self.threads) * (ROW_ISSUES + -(-width // lanes) * (ELEMENT_ISSUES + TURN_ISSUES * WARP / lanes))

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
