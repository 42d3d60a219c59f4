"""The tile of TVM schedules of dense layers on GPUs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from im2win.common.caching import derived, hashed_once
from im2win.schedules.cuda.tiles.base import BaseTile

ORDERS = ("uvc", "cuv", "cvu")


@hashed_once
@dataclass(frozen=True)
class ScheduledTile(BaseTile):
    """A product of filters [channels, K] by windows [K, outputs] in three levels: thread blocks, steps of the sum, threads.

    product: the kind of arithmetic, of CUDA cores.
    block_m, block_n: output channels and outputs (pixels) of a thread block. block_k: elements of the sum in a step, which are copied to
        shared memory.
    thread_m, thread_n: output channels and outputs of a thread, in its registers.
    order: loop order of the sum, outermost first: c channel, u kernel row, v kernel column. Filters are packed in it.
    stages: buffers in shared memory of a pipeline, which copies `stages - 1` steps ahead of the products; 1: copies and products alternate.
    lanes: neighbouring outputs whose elements the lanes of a warp copy at a time: a thread then has few steps of the sum and several
        outputs, whose addresses it computes once; 0: threads take elements in the order of shared memory.
    strip: neighbouring outputs of a thread; between its strips lie those of its neighbours. 4: operands are read 16 bytes at a time, and
        outputs stored so where a map's outputs allow it; 1: lanes store neighbouring outputs.
    rules: how the reconstructor rewrites what TVM generates: names of rule sets with "+" between them, or "".
    """

    product: str
    block_m: int
    block_n: int
    block_k: int
    thread_m: int
    thread_n: int
    order: str
    stages: int
    lanes: int
    strip: int
    rules: str

    @property
    def warp_m(self) -> int:
        """Channels of a thread: lanes share only what is in shared memory."""
        return self.thread_m

    @property
    def warp_n(self) -> int:
        """Outputs of a thread for each channel."""
        return self.thread_n

    @property
    def layout(self) -> tuple[int, int]:
        """(threads of a block along channels, those along outputs)."""
        return self.block_m // self.thread_m, self.block_n // self.thread_n

    @derived
    def threads(self) -> int:
        """Threads of a block."""
        return self.layout[0] * self.layout[1]

    @property
    def strips(self) -> tuple[int, int]:
        """(strips of channels, strips of outputs) of a thread: neighbours read neighbouring banks of a strip."""
        return 2 if self.thread_m >= 8 and self.thread_m % 2 == 0 else 1, self.thread_n // self.strip

    @derived
    def accumulators(self) -> int:
        """Accumulators of a thread."""
        return self.thread_m * self.thread_n

    @derived
    def shared_elements(self) -> int:
        """Elements of filters and windows in shared memory."""
        return self.stages * self.block_k * (self.block_m + self.block_n)

    @derived
    def rule_names(self) -> tuple[str, ...]:
        """Names of the reconstructor's rule sets, in order."""
        return tuple(self.rules.split("+")) if self.rules else ()

    @property
    def deduplication_key(self) -> tuple[Any, ...]:
        """Tiles with equal keys count as alike; the tuner's first population takes one of them."""
        return self.block_m, self.block_n, self.thread_m, self.thread_n, self.strip, self.rules

    def features(self) -> dict[str, float]:
        """Numerical features of a tile, for the tuner's cost model."""
        return {"stages": self.stages, "slabs": self.block_k, "cols": self.strip, "asynchronous": "copies" in self.rule_names}
