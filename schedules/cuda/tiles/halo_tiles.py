"""The layout of halo tiles of the warp-specialized kernel in shared memory."""

from __future__ import annotations

import math
from dataclasses import dataclass

from im2win.common.caching import derived
from im2win.schedules.cuda.arithmetic import MULTIPLIERS
from im2win.schedules.cuda.primitives import CHUNK, padded
from im2win.schedules.cuda.tiles.persistent import EIGHT, KIB, PHASES, HaloTile, M, beyond_first_tap
from im2win.schedules.cuda.tiles.warp_specialized import WARP, WarpSpecializedTile

ROWS_OF_BANKS = 8  # pixels after which the swizzle pattern repeats


@dataclass(frozen=True)
class StagedHaloTile(HaloTile):
    """The halo tile of the warp-specialized kernel; see `HaloTile`. `conv` is the problem that `WarpSpecializedTile.field` chooses.

    Where a tile covers whole rows of the output, the zeros right of one row serve as those left of the next. Where it covers whole images,
    the zeros below one image serve as those above the next. The zeros behind the last row come from no TMA box; threads clear them.
    """

    tile: WarpSpecializedTile

    @property
    def uncopied(self) -> str | None:
        """Why no TMA boxes bring halo tiles of this shape; None if they do."""
        shared = self.shared_part is not None
        return None if shared else f"`cluster` (={self.tile.cluster}) must cut halo tiles in parts of whole images, rows or 8 pixels"

    @property
    def sums(self) -> int:
        """Accumulators of an output, which the epilogue adds; see `PixelLines`."""
        return 1

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
        return self.tile.single_taps

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
    def stored(self) -> int:
        """Neighbouring outputs that a lane stores at a time from `output_buffer`; 0 where accumulators are stored without it."""
        conv, tile = self.conv, self.tile
        if conv.layout == "NHWC" or conv.out_itemsize != 2 or tile.sum_blocks > 1:
            return 0
        (height, width), outputs = conv.output_size, tile.rows * tile.cols
        if outputs == height * width and conv.out_channels % EIGHT == 0:
            return EIGHT  # channels follow one another
        run, starts = (outputs, tile.rows * width) if tile.cols == width else (tile.cols, width)
        return math.gcd(height * width, run, starts, EIGHT)

    @derived
    def output_pitch(self) -> int:
        """Elements from one channel of the output buffer to the next: an odd number of 16 bytes against bank conflicts, where it may be."""
        outputs = self.tile.rows * self.tile.cols
        return outputs + EIGHT if outputs % (2 * EIGHT) == 0 else outputs

    @derived
    def output_buffer(self) -> tuple[int, int]:
        """Shape of the buffer for outputs of eight channels: [consumer warps, elements]."""
        return (self.tile.multipliers // WARP, self.tile.images * EIGHT * self.output_pitch) if self.stored else (0, 0)

    @derived
    def shared_bytes(self) -> int:
        """Bytes of shared memory that a block takes: pipeline stages, accumulators of other blocks, staged outputs, and all barriers."""
        tile = self.tile
        barriers = [tile.stages, tile.stages, tile.filter_stages, tile.filter_stages, tile.pingpong]
        barriers += [1, 1] if tile.sum_blocks > 1 else []
        parts: list[tuple[tuple[int, ...], str]] = [(self.window_buffer, tile.dtype), (self.filter_buffer, tile.dtype)]
        parts += [(self.received, tile.sum_dtype), (self.output_buffer, self.conv.out_dtype)]
        return sum(padded(*part) for part in parts) + sum(padded((n,), PHASES) for n in barriers)

    @derived
    def sum_registers(self) -> int:
        """Registers of a thread for accumulators."""
        return self.tile.warp_m // M * self.columns // 2
