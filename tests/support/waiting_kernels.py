"""One kernel of each kind that waits at barriers, with what each barrier is for."""

from __future__ import annotations

from emulated import Kernel

from im2win.schedules.cuda.tiles.multistage import MultistageTile

# One kernel of each kind: two warps down and two across, more steps than stages, and halo tiles of more chunks than are held at a time.
# In order: what each barrier is for.
TABLE, OFFSETS, STEP, PIXELS, OUTPUTS = (
    "the table of taps is filled by all",
    "the offsets of pixels are filled by all",
    "copies of a step have landed for all",
    "the pixels of tiles are loaded by all",
    "the outputs of tiles are made by all",
)
KERNELS: dict[str, tuple[str, Kernel, tuple[str, ...]]] = {
    "gather, fma": (
        "n1-c20x5x6-k32x3x3-p1", ("implicit_gemm/tiled", MultistageTile("fma", 32, 32, 16, 16, 1, 3, "uvc")), (TABLE, STEP),
    ),
    "gather, tensor cores": (
        "n1-c20x5x6-k32x3x3-p1-float16-NHWC", ("implicit_gemm/tiled", MultistageTile("f16", 32, 32, 16, 16, 1, 3, "uvc")), (TABLE, STEP),
    ),
    "gather without a table": (
        "n1-c32x5x6-k32x3x3-p1-float16-NHWC", ("implicit_gemm/tiled", MultistageTile("f16", 32, 32, 16, 16, 1, 2, "uvc")), (STEP,),
    ),
    "gather fetched": (
        "n1-c20x5x6-k32x3x3-p1-float16", ("implicit_gemm/tiled", MultistageTile("f16", 32, 32, 16, 16, 1, 3, "uvc")), (TABLE, STEP),
    ),
    "halo tile, fma": (
        "n1-c60x5x6-k32x3x3-p1", ("direct/tiled", MultistageTile("fma", 32, 32, 16, 16, 1, 3, "Cuvc", 1, 5, 6)), (OFFSETS, STEP),
    ),
    "halo tile, tensor cores": (
        "n1-c60x5x6-k32x3x3-p1-NHWC", ("im2win/fused", MultistageTile("tf32x3", 32, 32, 16, 16, 1, 2, "Cuvc", 1, 5, 6)), (OFFSETS, STEP),
    ),
    "halo tile fetched": (
        "n1-c100x5x6-k32x3x3-p1-float16", ("direct/tiled", MultistageTile("f16", 32, 32, 16, 16, 1, 3, "Cuvc", 1, 5, 6)), (OFFSETS, STEP),
    ),
    "warpgroups, gather": (
        "n1-c20x5x6-k32x3x3-p1", ("implicit_gemm/tiled", MultistageTile("wg_tf32", 32, 128, 16, 64, 2, 3, "uvc")), (TABLE, STEP),
    ),
    "warpgroups, slabs in turn": (
        "n1-c64x5x6-k32x3x3-p1-float16-NHWC", ("implicit_gemm/tiled", MultistageTile("wg_f16", 32, 64, 16, 64, 1, 4, "uvc")), (STEP, STEP),
    ),
    "warpgroups, halo tile": (
        "n1-c60x5x6-k32x3x3-p1", ("direct/tiled", MultistageTile("wg_tf32x3", 32, 64, 16, 64, 1, 3, "Cuvc", 1, 5, 6)),
        (OFFSETS, STEP, STEP),
    ),
    "warpgroups, halo tile fetched": (
        "n1-c100x5x6-k32x3x3-p1-float16", ("direct/tiled", MultistageTile("wg_f16", 32, 64, 32, 64, 2, 3, "Cuvc", 1, 5, 6)),
        (OFFSETS, STEP),
    ),
    "warpgroups, tiles of rows": (
        "n1-c60x5x6-k32x3x3-p1", ("winograd/tiled", MultistageTile("wg_tf32x3", 32, 64, 16, 64, 1, 3, "Cuvc", 1, 5, 3, outputs=2)),
        (OFFSETS, STEP, STEP),
    ),
    "winograd": (
        "n1-c20x5x6-k32x3x3-p1", ("winograd/tiled", MultistageTile("fma", 32, 32, 16, 16, 1, 3, "uvc", outputs=2)),
        (PIXELS, TABLE, STEP, OUTPUTS),
    ),
    "in parts": (
        "n1-c20x5x6-k32x3x3-p1", ("mcfa/tiled", MultistageTile("fma", 32, 32, 16, 16, 1, 3, "uvc")), (TABLE, STEP),
    ),
    "planes": (
        "n1-c3x10x9-k16x5x5-p2", ("direct/tiled", MultistageTile("fma", 16, 64, 8, 32, 3, 3, "cuv", 1, 7, 9)), (STEP,),
    ),
}  # fmt: skip
