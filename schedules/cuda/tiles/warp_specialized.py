"""The tile of the warp-specialized kernel, and the layout of its halo tiles in shared memory."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, ClassVar

from im2win.common.caching import derived, hashed_once
from im2win.schedules.cuda.arithmetic import MULTIPLIERS
from im2win.schedules.cuda.primitives import CHUNK, padded
from im2win.schedules.cuda.tiles.persistent import EIGHT, KIB, LANES, PHASES, HaloTile, M, PersistentTile, beyond_first_tap
from im2win.spec.conv2d import Conv2d

WARP = 32  # threads of a warp
ROWS_OF_BANKS = 8  # pixels after which the swizzle pattern repeats


@hashed_once
@dataclass(frozen=True)
class WarpSpecializedTile(PersistentTile):
    """Output channels of a tile of outputs, which consumer warpgroups compute from filters and windows that producer warps copy.

    product: the kind of arithmetic of a warpgroup: "wg_f16", "wg_bf16" or "wg_s8".
    block_m: output channels of a thread block, divided among the warpgroups that compute a tile.
    images, rows, cols: images, rows and columns of a tile of outputs; several images only if the tile covers each of them.
    slabs: number of 64-byte slabs of every input pixel that one step copies to shared memory, for all taps.
    stages: pipeline stages of windows.
    taps: taps whose filters, for the channels of a step, one copy brings.
    filter_stages: pipeline stages of filters.
    groups: consumer warpgroups that compute a tile together, each a part of the channels.
    pingpong: number of such teams of `groups` warpgroups; with more than one they are ping-pong consumers: while one is in its epilogue,
        the next one multiplies.
    cluster: thread blocks of a cluster.
    shared: what the blocks of a cluster share. "windows": they compute neighbouring channels of one tile of outputs, and each copies a part
        of its halo tile for all. "filters": they compute neighbouring tiles with the same channels, and each copies a part of the filters
        for all. "accumulators": they compute the same outputs, each for its part of the steps.
    tma_boxes: what the TMA boxes of a step bring. "halo": the halo tile, whose pixels several taps read. "taps": TMA im2col-style loads of
        what one tap reads, a pixel for every output, so that no column of a product lies between outputs.
    """

    LATER: ClassVar[tuple[str, ...]] = (("shared", "tma_boxes"))

    cluster: int = 1
    images: int = 1
    taps: int = 1
    filter_stages: int = 2
    pingpong: int = 1
    shared: str = "windows"
    tma_boxes: str = "halo"

    def field(self, conv: Conv2d) -> StagedHaloTile:
        """The halo tile."""
        return _field(conv, self)

    def steps(self, conv: Conv2d) -> int:
        """Steps of a tile of outputs: one for each block of channels, and for each tap where `tma_boxes` is "taps"."""
        return self.pack(conv).steps(conv) * (math.prod(conv.kernel) if self.tma_boxes == "taps" else 1)

    @property
    def window_blocks(self) -> int:
        """Blocks of a cluster that copy windows for each other."""
        return self.cluster if self.shared == "windows" else 1

    @property
    def filter_blocks(self) -> int:
        """Blocks of a cluster that copy filters for each other."""
        return self.cluster if self.shared == "filters" else 1

    @property
    def sum_blocks(self) -> int:
        """Blocks of a cluster that compute the same outputs."""
        return self.cluster if self.shared == "accumulators" else 1

    @derived
    def multipliers(self) -> int:
        """Consumer threads of a block. The producer threads follow them."""
        return LANES * self.groups * self.pingpong

    @derived
    def exchanges(self) -> bool:
        """Whether the producers are a warpgroup that releases registers to the consumers (`setmaxnreg`).

        True with more than one consumer warpgroup: a thread's equal share of registers would be too small.
        """
        return self.multipliers > LANES

    @derived
    def threads(self) -> int:
        """Threads of a block: the consumers, and producers of which two warps copy, one windows and one filters."""
        return self.multipliers + (LANES if self.exchanges else 2 * WARP)

    @property
    def block_n(self) -> int:
        """Outputs of a tile."""
        return self.warp_n

    @derived
    def warp_m(self) -> int:
        """Channels of a warpgroup."""
        return self.block_m // self.groups

    @derived
    def warp_n(self) -> int:
        """Outputs of a tile."""
        return self.images * self.rows * self.cols

    @property
    def accumulators(self) -> int:
        """Accumulators of a thread that are outputs. Columns between the rows of a halo tile do not count."""
        return -(-self.warp_m * self.warp_n // LANES)

    @property
    def deduplication_key(self) -> tuple[Any, ...]:
        """Tiles with equal keys count as alike; the tuner's first population takes one of them."""
        return self.block_m, self.groups, self.pingpong, -(-self.warp_n // 64), self.filter_blocks > 1, self.sum_blocks, self.tma_boxes

    def features(self) -> dict[str, float]:
        """Numerical features of a tile, for the tuner's cost model."""
        more = {"images": self.images, "pingpong": self.pingpong, "taps": self.taps, "filter_stages": self.filter_stages}
        return super().features() | more | {"cluster": self.cluster, "filter_blocks": self.filter_blocks}


@functools.lru_cache(maxsize=4096)
def _field(conv: Conv2d, tile: WarpSpecializedTile) -> StagedHaloTile:
    return StagedHaloTile(of_a_tap(conv) if tile.tma_boxes == "taps" else flat(conv), tile)


@functools.lru_cache(maxsize=1024)
def flat(conv: Conv2d) -> Conv2d:
    """The problem that halo tiles are copied from: for a 1x1 kernel without stride and padding, all images as one row of pixels."""
    if conv.kernel == (1, 1) and conv.stride == (1, 1) and not any(conv.padding):
        return conv.with_(batch=1, height=1, width=conv.batch * conv.height * conv.width)
    return conv


@functools.lru_cache(maxsize=1024)
def of_a_tap(conv: Conv2d) -> Conv2d:
    """The problem whose halo tile is what one tap reads: a pixel for every output, as far apart as windows are."""
    height, width = ((size - 1) * s + 1 for size, s in zip(conv.output_size, conv.stride, strict=True))
    return conv.with_(height=height, width=width, kernel=1, padding=0, dilation=1)


@dataclass(frozen=True)
class StagedHaloTile(HaloTile):
    """The halo tile of the warp-specialized kernel; see `HaloTile`. `conv` is the problem that `WarpSpecializedTile.field` chooses.

    Where a tile covers whole rows of the output, the zeros right of one row serve as those left of the next. Where it covers whole images,
    the zeros below one image serve as those above the next. The zeros behind the last row come from no TMA box; threads clear them.
    """

    tile: WarpSpecializedTile

    def _shared_zeros(self, axis: int) -> int:
        """Zeros along an axis that a row, or an image, shares with the next: at most as many as the halo has."""
        whole = (self.tile.rows, self.tile.cols)[axis] == self.conv.output_size[axis] and self.conv.stride == (1, 1)
        return min(self.conv.padding[axis], self.conv.padding[axis + 2], beyond_first_tap(self.conv)[axis]) if whole else 0

    @derived
    def lines(self) -> int:
        """Rows of an image in a plane."""
        return self.tile.rows + beyond_first_tap(self.conv)[0] - self._shared_zeros(0)

    @derived
    def pitch(self) -> int:
        """Pixels of a row of a plane."""
        return self.tile.cols + beyond_first_tap(self.conv)[1] - self._shared_zeros(1)

    @property
    def images(self) -> int:  # type: ignore[override]
        """Images of a tile of outputs."""
        return self.tile.images

    @property
    def sharing(self) -> int:  # type: ignore[override]
        """Blocks of a cluster that each copy a part of the halo tile for all."""
        return self.tile.window_blocks

    @property
    def single_taps(self) -> bool:  # type: ignore[override]
        """Whether a step brings only what one tap reads."""
        return self.tile.tma_boxes == "taps"

    @derived
    def part(self) -> tuple[int, int, int]:
        """(images, rows, pixels of a row) of a plane that one block of a cluster copies.

        Only for a halo tile that the cluster can share; see `shared_part`.
        """
        part = self.shared_part
        assert part is not None, "see `legality`"
        return part

    @derived
    def shared_part(self) -> tuple[int, int, int] | None:
        """`part`, or None where a cluster cannot share the halo tile."""
        cluster, images = self.tile.window_blocks, self.tile.images
        if cluster == 1:
            return images, self.lines, self.pitch
        if images > 1:
            part = images // cluster, self.lines, self.pitch
            return part if images % cluster == 0 and math.prod(part) % ROWS_OF_BANKS == 0 else None
        if self.lines > 1:
            step = ROWS_OF_BANKS // math.gcd(ROWS_OF_BANKS, self.pitch)
            return 1, -(-self.lines // (cluster * step)) * step, self.pitch
        return (1, 1, self.pitch // cluster) if self.pitch % (cluster * ROWS_OF_BANKS) == 0 else None

    @derived
    def copied(self) -> int:
        """Pixels of a plane that TMA boxes bring."""
        return self.tile.window_blocks * math.prod(self.part)

    @derived
    def reach(self) -> int:
        """Pixels of a plane from the first to the last that a window of an output reads."""
        down, across = beyond_first_tap(self.conv)
        return self._outputs + down * self.pitch + across

    @derived
    def plane(self) -> int:
        """Pixels of a plane, padded to a multiple of 8."""
        return -(-max(self.copied, self.reach) // ROWS_OF_BANKS) * ROWS_OF_BANKS

    @derived
    def _outputs(self) -> int:
        """Columns of a product from the first output to the last."""
        tile = self.tile
        return ((tile.images - 1) * self.lines + tile.rows - 1) * self.pitch + tile.cols

    @derived
    def stage_pixels(self) -> int:
        """Pixels that a stage has room for, with those that the last columns of a product read."""
        return math.prod(self.planes) * self.plane + self.columns - self._outputs

    @derived
    def pixels(self) -> int:
        """Pixels that a step copies, in all planes."""
        return math.prod(self.planes) * self.copied

    @derived
    def columns(self) -> int:
        """Columns of a product: outputs of the tile and columns between its rows and images, padded to a size that `wgmma` has."""
        multiple = MULTIPLIERS[self.tile.dtype].columns
        return -(-self._outputs // multiple) * multiple

    @derived
    def output_tiles(self) -> int:
        """Tiles that cover the output."""
        return -(-self.conv.batch // self.tile.images) * math.prod(self.counts)

    @derived
    def window_buffer(self) -> tuple[int, int]:
        """Shape of the pipeline stages of windows: [stages, elements], a stage padded to whole KiB."""
        size = self.stage_pixels * self.tile.units * CHUNK
        return self.tile.stages, -(-size // KIB) * KIB // self.conv.itemsize

    @derived
    def filter_buffer(self) -> tuple[int, int]:
        """Shape of the pipeline stages of filters: [stages, elements]."""
        return self.tile.filter_stages, self.tile.taps * self.tile.block_m * self.tile.units * self.tile.unit

    @derived
    def kept(self) -> list[int]:
        """Indices of those runs of eight columns that contain an output."""
        return [j for j in range(self.columns // EIGHT) if any(map(self._is_output, range(j * EIGHT, (j + 1) * EIGHT)))]

    def _is_output(self, column: int) -> bool:
        (line, x), tile = divmod(column, self.pitch), self.tile
        return x < tile.cols and line % self.lines < tile.rows and line // self.lines < tile.images

    @derived
    def written(self) -> list[list[int]]:
        """For every block that shares accumulators, the runs of `kept` that it writes to the output."""
        blocks, kept = self.tile.sum_blocks, self.kept
        return [kept[len(kept) * rank // blocks : len(kept) * (rank + 1) // blocks] for rank in range(blocks)]

    @derived
    def received(self) -> tuple[int, int]:
        """Shape of the buffer for accumulators of other blocks: [blocks, elements]."""
        if self.tile.sum_blocks == 1:
            return 0, 0
        return self.tile.sum_blocks - 1, max(map(len, self.written)) * self.tile.block_m * EIGHT

    @derived
    def shared_bytes(self) -> int:
        """Bytes of shared memory that a block takes: pipeline stages, accumulators of other blocks, and all barriers."""
        tile = self.tile
        barriers = [tile.stages, tile.stages, tile.filter_stages, tile.filter_stages, tile.pingpong]
        barriers += [1, 1] if tile.sum_blocks > 1 else []
        parts = ((self.window_buffer, tile.dtype), (self.filter_buffer, tile.dtype), (self.received, tile.sum_dtype))
        return sum(padded(*part) for part in parts) + sum(padded((n,), PHASES) for n in barriers)

    @derived
    def sum_registers(self) -> int:
        """Registers of a thread for accumulators."""
        return self.tile.warp_m // M * self.columns // 2
