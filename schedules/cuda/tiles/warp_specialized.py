"""The tile of the warp-specialized kernel, and the layout of its halo tiles in shared memory."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, ClassVar

from im2win.common.caching import derived, hashed_once
from im2win.packing.wgmma_smem import ChunkPack
from im2win.schedules.cuda.arithmetic import MULTIPLIERS
from im2win.schedules.cuda.primitives import CHUNK, Expr, padded
from im2win.schedules.cuda.tiles.persistent import (
    EIGHT,
    KIB,
    LANES,
    MAX_BOX,
    PHASES,
    HaloTile,
    M,
    PersistentTile,
    beyond_first_tap,
    channel_run,
)  # fmt: skip
from im2win.spec.conv2d import Conv2d

WARP = 32  # threads of a warp
ROWS_OF_BANKS = 8  # pixels after which the swizzle pattern repeats
REARRANGERS = 2  # warps that rearrange
TOGETHER = 8  # matrices, of eight pixels and 32 channels, that such a warp takes at a time
QUAD = 4  # 16-byte units of each of these pixels at a time
LINE = 64  # pixels of a line of a raw box, 128 bytes


@hashed_once
@dataclass(frozen=True)
class WarpSpecializedTile(PersistentTile):
    """Output channels of a tile of outputs, which consumer warpgroups compute from filters and windows that producer warps copy.

    product: the kind of arithmetic of a warpgroup: "wg_f16", "wg_bf16" or "wg_s8".
    block_m: output channels of a thread block, divided among the warpgroups that compute a tile.
    images, rows, cols: images, rows and columns of a tile of outputs; several images only if the tile covers each of them.
    slabs: number of 64-byte slabs of every input pixel that one step copies to shared memory, for all taps.
    stages: pipeline stages of windows, and of the TMA boxes that they are rearranged from.
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
        what one tap reads, a pixel for every output, so that no column of a product lies between outputs. "rearranged", channels first:
        pixels of each channel as they lie in memory, from which two more producer warps gather the channels of every pixel.
    """

    LATER: ClassVar[tuple[str, ...]] = (("shared", "tma_boxes"))

    cluster: int = 1
    images: int = 1
    taps: int = 1
    filter_stages: int = 2
    pingpong: int = 1
    shared: str = "windows"
    tma_boxes: str = "halo"

    def pack(self, conv: Conv2d) -> ChunkPack:
        """The packing of filters."""
        return ChunkPack(self.block_m, self.slabs, channel_run(conv), channel_phases(conv) if self.rearranged else 1)

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
    def sum_blocks(self) -> int:  # type: ignore[override]
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

    @property
    def rearranged(self) -> bool:
        """Whether producer warps rearrange windows, with channels first."""
        return self.tma_boxes == "rearranged"

    @derived
    def threads(self) -> int:
        """Threads of a block: the consumers, and producers of which two warps copy, one windows and one filters, and two may rearrange."""
        return self.multipliers + (LANES if self.exchanges else (2 + REARRANGERS * self.rearranged) * WARP)

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
    return halo_tile(of_a_tap(conv) if tile.tma_boxes == "taps" else flat(conv), tile)


def halo_tile(conv: Conv2d, tile: WarpSpecializedTile) -> StagedHaloTile:
    """The halo tile of a problem that it is copied from."""
    return (RearrangedHaloTile if tile.rearranged else StagedHaloTile)(conv, tile)


@functools.lru_cache(maxsize=1024)
def flat(conv: Conv2d) -> Conv2d:
    """The problem that halo tiles are copied from: for a 1x1 kernel without stride and padding, all images as one row of pixels.

    Channels first, every image is such a row.
    """
    if conv.kernel == (1, 1) and conv.stride == (1, 1) and not any(conv.padding):
        if conv.layout == "NCHW":
            return conv.with_(height=1, width=conv.height * conv.width)
        return conv.with_(batch=1, height=1, width=conv.batch * conv.height * conv.width)
    return conv


def channel_phases(conv: Conv2d) -> int:
    """Least number of channels, with channels first, that together are a multiple of 16 bytes."""
    return CHUNK // math.gcd(conv.height * conv.width * conv.itemsize, CHUNK)


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

    @property
    def stored(self) -> int:
        """Neighbouring outputs that a lane stores at a time from `output_buffer`; 0 where accumulators are stored without it."""
        return 0

    @property
    def output_buffer(self) -> tuple[int, int]:
        """Shape of the buffer for outputs of eight channels: [consumer warps, elements]."""
        return 0, 0

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


@dataclass(frozen=True)
class RearrangedHaloTile(StagedHaloTile):
    """The halo tile with channels first, which warps rearrange from raw boxes; see `HaloTile` for the result.

    What raw boxes bring, in `form`, depends on what begins at a multiple of 16 bytes, as TMA requires.
    "runs": lines of 64 neighbouring pixels of one channel, the same pixels of all channels of a step one after the other. Lines are cut
    from whole input rows without gaps. "rows": the same with lines cut from each row, for tiles narrower than the output.
    "images": all pixels of whole images, as they lie in memory. `phases` channels then begin at as many places modulo 16 bytes.

    Zeros around an image that lie in no box come from threads, which clear stages once.
    """

    margin = 0

    @derived
    def form(self) -> str:
        """What raw boxes bring: "runs", "rows" or "images"."""
        if self.phases > 1:
            return "images"
        return "runs" if self.one_row or self.tile.cols == self.conv.output_size[1] else "rows"

    @derived
    def phases(self) -> int:
        """Least number of channels that together are a multiple of 16 bytes."""
        return channel_phases(self.conv)

    @property
    def one_row(self) -> bool:
        """Whether an image is one row of pixels, of which tiles take parts."""
        return self.conv.height == 1 and self.conv.kernel == (1, 1) and not any(self.conv.padding)

    @derived
    def uncopied(self) -> str | None:
        """Why no raw boxes bring halo tiles of this shape; None if they do."""
        tile, conv, unit, (height, width) = self.tile, self.conv, self.tile.unit, self.conv.output_size
        if self.form == "images":
            if (tile.rows, tile.cols) != (height, width):
                return f"`rows` and `cols` must be {height} and {width}: channels of {conv.height}x{conv.width} pixels come whole"
            if tile.units % self.phases:
                return f"`slabs` (={tile.slabs}) must be 2: 16 bytes hold every {self.phases}th channel"
            return None if self.run else f"`slabs` (={tile.slabs}) must divide channels in equal steps"
        if self.form == "rows" and conv.width % unit:
            return f"`cols` (={tile.cols}) must be {width}: rows of {conv.width} pixels do not begin at multiples of {CHUNK} bytes"
        if tile.cols != width and tile.cols * conv.stride[1] % unit:
            return f"`cols` (={tile.cols}) times the stride must be a multiple of {unit}: boxes begin at multiples of {CHUNK} bytes"
        return None

    @derived
    def raw_rows(self) -> int:
        """Input rows of an image in raw boxes. Of rows cut in parts, those that no window reads are left out if windows have one tap."""
        if self.form == "images":
            return self.conv.height
        return self.lines if self.row_step > 1 else (self.lines - 1) * self.conv.stride[0] + self.planes[0]

    @property
    def row_step(self) -> int:
        """Input rows from one row of raw boxes to the next."""
        return self.conv.stride[0] if self.form == "rows" and self.planes[0] == 1 else 1

    @derived
    def raw_cols(self) -> int:
        """Pixels of an input row in raw boxes."""
        if self.one_row and self.form == "runs":
            return (self.tile.cols - 1) * self.conv.stride[1] + 1
        return (self.pitch - 1) * self.conv.stride[1] + self.planes[1] if self.form == "rows" else self.conv.width

    @derived
    def _row_pixels(self) -> int:
        """Pixels of a channel from one row of tiles to the next."""
        return self.tile.rows * self.conv.stride[0] * self.conv.width

    def lead_of(self, row: Expr) -> Expr:
        """Elements of a run before the first row of the tiles in row `row`: boxes begin at multiples of 16 bytes."""
        unit = self.tile.unit
        return (row * self._row_pixels + -self.conv.padding[0] * self.conv.width % unit) % unit

    @derived
    def leads(self) -> list[int]:
        """Elements of a channel in raw boxes before what windows read, a number for each table: of rows, of runs, of a phase in images."""
        if self.form == "rows":
            return [self.lead]
        if self.form == "runs":
            return [0] if self.one_row else [self.lead_of(row) for row in range(self._lead_period)]
        return [phase * self.raw_rows * self.raw_cols % self.tile.unit for phase in range(self.phases)]

    @derived
    def _lead_period(self) -> int:
        """Rows of tiles after which leads of runs repeat."""
        return min(self.tile.unit // math.gcd(self._row_pixels, self.tile.unit), self.counts[0])

    @derived
    def eights(self) -> tuple[int, int, int]:
        """Eights of neighbouring elements of a channel in raw boxes: [images, rows, eights of a row], where a run counts as one row."""
        rows, cols = (self.raw_rows, self.raw_cols) if self.form == "rows" else (1, self.raw_rows * self.raw_cols)
        return self.tile.images, rows, -(-(cols + max(self.leads)) // EIGHT)

    @derived
    def together(self) -> int:
        """Eights that a warp takes at a time: of all channels of a step, or in images of 32 channels."""
        return TOGETHER if self.form == "images" else TOGETHER * QUAD // self.tile.units

    @derived
    def steps_of_eights(self) -> int:
        """Eights of one table, padded to as many as the warps take at a time."""
        return -(-math.prod(self.eights) // (REARRANGERS * self.together)) * REARRANGERS * self.together

    @derived
    def places(self) -> int:
        """Entries of the tables of where pixels go."""
        return len(self.leads) * self.steps_of_eights * EIGHT

    @derived
    def channels(self) -> int:
        """Channels of a step."""
        return self.tile.units * self.tile.unit

    @derived
    def run(self) -> int:
        """Elements of the innermost axis of boxes of images: a divisor of all that they begin at, at most 256; 0 if there is none."""
        together = math.gcd(self.conv.in_channels, self.channels, self.tile.pack(self.conv).channels(self.conv))
        whole = together * self.raw_rows * self.raw_cols
        return max((run for run in range(self.tile.unit, MAX_BOX + 1, self.tile.unit) if whole % run == 0), default=0)

    @derived
    def raw_box(self) -> tuple[int, int, int, int]:
        """Elements of a raw box along the axes of its tensor map."""
        if self.form == "images":
            return self.run, self.channels * self.raw_rows * self.raw_cols // max(self.run, 1), self.tile.images, 1
        if self.form == "runs":
            return LINE, self.channels, self.tile.images, 1
        return LINE, self.channels, (self.raw_rows - 1) * self.row_step + 1, 1

    @derived
    def raw_boxes(self) -> int:
        """Raw boxes of a step, one after the other in a stage."""
        return 1 if self.form == "images" else -(-self.eights[2] * EIGHT // LINE)

    @derived
    def box_elements(self) -> int:
        """Elements of a raw box."""
        if self.form == "images":
            return self.tile.images * self.channels * self.raw_rows * self.raw_cols
        return self.tile.images * (self.raw_rows if self.form == "rows" else 1) * self.channels * LINE

    @derived
    def pixels(self) -> int:
        """Pixels that a step copies."""
        return self.raw_boxes * self.box_elements // self.channels

    @derived
    def stage_pixels(self) -> int:
        """Pixels that a stage has room for, with eight for those that no window reads."""
        return super().stage_pixels + EIGHT

    @derived
    def raw_buffer(self) -> tuple[int, int]:
        """Shape of the pipeline stages of raw boxes: [stages, elements], padded to whole KiB with room for eights behind the last pixel."""
        size = (self.raw_boxes * self.box_elements + (EIGHT if self.form == "images" else 0)) * self.conv.itemsize
        return self.tile.stages, -(-size // KIB) * KIB // self.conv.itemsize

    @derived
    def stored(self) -> int:
        """See `StagedHaloTile.stored`."""
        conv, tile = self.conv, self.tile
        if conv.out_itemsize != 2 or tile.sum_blocks > 1:
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
        """See `StagedHaloTile.output_buffer`."""
        return (self.tile.multipliers // WARP, self.tile.images * EIGHT * self.output_pitch) if self.stored else (0, 0)

    @derived
    def shared_bytes(self) -> int:
        """Bytes of shared memory that a block takes."""
        conv, tile = self.conv, self.tile
        buffers = padded(self.raw_buffer, tile.dtype) + padded(self.output_buffer, conv.out_dtype) + padded((self.places,), "int32")
        return super().shared_bytes + buffers + 2 * padded((tile.stages,), PHASES)
