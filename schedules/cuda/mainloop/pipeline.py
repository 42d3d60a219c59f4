"""A pipeline of stages in shared memory between producers and consumers, as in CUTLASS: every stage has a full and an empty barrier."""

from __future__ import annotations

from tvm.tirx.script import builder as T

from im2win.schedules.cuda.primitives import Arena, Expr, call, pointer
from im2win.schedules.cuda.tiles.persistent import PHASES


class Pipeline:
    """Stages in shared memory that producers fill and consumers read, in order.

    Args:
        shape: (stages, elements of a stage).
        warps: consumer warps of a block.
        blocks: blocks of a cluster whose producers each fill a part of every block's stages; 1 without sharing.
        producers: warps that fill a stage by stores; 0 where copies fill it, whose bytes full barriers count.
    """

    def __init__(
        self, arena: Arena, name: str, shape: tuple[int, int], dtype: str, warps: int, blocks: int, producers: int = 0
    ) -> None:  # fmt: skip
        self.stages, self._consumers, self._blocks, self._producers = shape[0], warps * blocks, blocks, producers
        self.data = arena.take(name, shape, dtype)
        self._full = arena.take(f"{name}_full", (self.stages,), PHASES)
        self._empty = arena.take(f"{name}_empty", (self.stages,), PHASES)

    def start(self) -> None:
        """One thread initialises the barriers."""
        with T.unroll(self.stages) as i:
            call(f"init_empty_barrier<{self._producers}>" if self._producers else "init_full_barrier", pointer(self._full, i))
            call(f"init_empty_barrier<{self._consumers}>", pointer(self._empty, i))

    def full_barrier(self, step: Expr) -> Expr:
        """The full barrier of a step's stage, which counts the bytes that arrive."""
        return pointer(self._full, step % self.stages)

    def producer_acquire(self, step: Expr) -> None:
        """A producer waits at the empty barrier of the step's stage."""
        call("wait_empty_barrier", pointer(self._empty, step % self.stages), (step // self.stages + 1) % 2)

    def producer_commit(self, step: Expr) -> None:
        """A warp whose stores have filled its part of a step arrives at the stage's full barrier."""
        call("fence_stores")
        call("warp_barrier")
        call("arrive_empty_barrier<1>", self.full_barrier(step))

    def consumer_wait(self, step: Expr) -> None:
        """A consumer waits at the full barrier of the step's stage."""
        wait = "wait_empty_barrier" if self._producers else "wait_full_barrier"  # which differ in what they count
        call(wait, self.full_barrier(step), step // self.stages % 2)

    def consumer_release(self, step: Expr) -> None:
        """A warp that has read a step arrives at the stage's empty barrier, in every block that fills it."""
        call(f"arrive_empty_barrier<{self._blocks}>", pointer(self._empty, step % self.stages))

    def drain(self, steps: Expr) -> None:
        """After the last step: waits until no other block accesses this block's barriers any more."""
        if self._blocks > 1:
            with T.serial(self.stages) as more:
                self.producer_acquire(steps + more)
