"""The GPU ladder of the im2win thesis (Lu 2023, chapter 4; arXiv 2306.14316): one im2win convolution, one more scheduling step a rung.

Every rung schedules the definition in compute/im2win.py with the im2win tensor stored, so that rungs differ in nothing but these steps. The
seven loops are mapped as in Alg. 7: channels M = Co, windows N = No*Ho*Wo, terms K = Ci*Wf*Hf in the order of an im2win window.

    plain           Alg. 8: 32 x 32 threads, one output each, everything from global memory
    blocks          section 4.3.1: a thread block has a tile of M_B x N_B outputs and K_B terms, a thread M_T x N_T of the outputs
    shared          section 4.3.2: the tile's operands are staged in shared memory
    micro_kernel    section 4.3.3: outer products of operands in registers
    vectorized      section 4.3.4: loads and stores of four neighbours
    prefetch        section 4.3.5, Alg. 9: double buffers in shared memory and registers, one filled while the other is used
    production      the project's im2win schedules, with the tile recorded for the layer, or the cost model's

TVM inserts the barriers. Where it has made a pipeline, the reconstructor removes the barrier that double buffers need not have. The steps
are in cuda_ladder_schedule.py.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from im2win.compute import im2win
from im2win.packing.cpu_blocked import FilterPack
from im2win.spec.conv2d import Conv2d

ALIGNMENT = 128  # bytes, of a tensor between kernels


@dataclass(frozen=True)
class CudaRung:
    """The scheduling steps that are on. Each can be switched by itself; it has no effect where there is nothing for it to work on.

    blocks, shared, micro_kernel, vectorized, prefetch: see the functions of cuda_ladder_schedule.py.
    production: the schedule of the registry instead of all these steps.
    """

    title: str
    source: str
    blocks: bool = False
    shared: bool = False
    micro_kernel: bool = False
    vectorized: bool = False
    prefetch: bool = False
    production: bool = False

    def __post_init__(self) -> None:
        for name, reason in (
            ("shared", "threads share the tile of their block"),
            ("micro_kernel", "the one output of a thread has no outer product"),
            ("vectorized", "the one output of a thread has no neighbours"),
        ):
            if getattr(self, name) and not self.blocks:
                raise ValueError(f"`{name}` (=True) needs `blocks`: {reason}.")
        if self.prefetch and not (self.shared or self.micro_kernel):
            raise ValueError("`prefetch` (=True) needs `shared` or `micro_kernel`: there is no buffer to double.")
        if self.production and self.blocks:
            raise ValueError("`production` (=True) stands alone: it is no kernel of the ladder.")

    @property
    def techniques(self) -> tuple[str, ...]:
        """Names of the techniques that are on, in the ladder's order."""
        return tuple(field.name for field in fields(self) if getattr(self, field.name) is True)

    @property
    def rules(self) -> tuple[str, ...]:
        """Rule sets by which the reconstructor rewrites what TVM generates."""
        return ("pipelines",) if self.prefetch and self.shared else ()


@dataclass(frozen=True)
class Sizes:
    """The tiles: M_B, N_B, K_B of a thread block, M_T, N_T of a thread (channels, windows, terms of the sum)."""

    block_m: int
    block_n: int
    block_k: int
    thread_m: int
    thread_n: int

    @property
    def lanes(self) -> tuple[int, int]:
        """(threads of a block along channels, threads along windows)."""
        return self.block_m // self.thread_m, self.block_n // self.thread_n

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.lanes[0] * self.lanes[1]


PLAIN = Sizes(32, 32, 1, 1, 1)
# 64 accumulators a thread leave registers for two sets of 16 operands and the 12 elements of the next step; four warps share a tile.
TILED = Sizes(64, 128, 8, 8, 8)
CHANNELS = (8, 12, 4, 2)  # of a thread, the first of these with which blocks divide the channels of a group

ALGORITHM_9 = CudaRung(
    "double buffers, prefetch", "thesis Alg. 9", blocks=True, shared=True, micro_kernel=True, vectorized=True, prefetch=True
)
RUNGS: dict[str, CudaRung] = {
    "plain": CudaRung("an output a thread", "thesis Alg. 8"),
    "blocks": CudaRung("block tiles", "thesis 4.3.1", blocks=True),
    "shared": CudaRung("shared memory", "thesis 4.3.2", blocks=True, shared=True),
    "micro_kernel": CudaRung("outer product in registers", "thesis 4.3.3", blocks=True, shared=True, micro_kernel=True),
    "vectorized": CudaRung("vector loads and stores", "thesis 4.3.4", blocks=True, shared=True, micro_kernel=True, vectorized=True),
    "prefetch": ALGORITHM_9,
    "production": CudaRung("the project's kernel", "schedules/cuda", production=True),
}
WITHOUT: dict[str, CudaRung] = {
    f"without_{name}": replace(ALGORITHM_9, title=f"without {title}", source="thesis fig. 4-9", **{name: False})
    for name, title in (
        ("micro_kernel", "micro-kernel"),
        ("shared", "shared memory"),
        ("vectorized", "vector loads and stores"),
        ("prefetch", "prefetch"),
    )
}


def supports(conv: Conv2d) -> str | None:
    """Why the ladder cannot compute a problem; None if it can."""
    if conv.dtype != "float32":
        return f"the GPU's ladder computes float32, not {conv.dtype}"
    if conv.layout != "NCHW":
        return f"the GPU's ladder is written for NCHW, not {conv.layout}"
    channels = conv.out_channels // conv.groups
    least = min(CHANNELS) * TILED.lanes[0]
    if channels % least:
        return f"thread blocks of the GPU's ladder have a multiple of {least} channels of one group, which has {channels}"
    return None


def sizes_of(conv: Conv2d, rung: CudaRung) -> Sizes:
    """The tiles of a rung of the thesis for a problem that the ladder supports."""
    if not rung.blocks:
        return PLAIN
    channels, (across, _) = conv.out_channels // conv.groups, TILED.lanes
    own = next(count for count in CHANNELS if channels % (count * across) == 0)
    return replace(TILED, block_m=own * across, thread_m=own)


def pack_of(conv: Conv2d, rung: CudaRung) -> FilterPack:
    """The packing of filters for a rung of the thesis: in the order of a window, one by one or by block."""
    return FilterPack(sizes_of(conv, rung).block_m if rung.blocks else 1, "cvu")


def workspace_bytes(conv: Conv2d) -> int:
    """Bytes of the im2win tensor, rounded up to whole lines."""
    return -(-im2win.transform_bytes(conv) // ALIGNMENT) * ALIGNMENT
