"""The numbers of a schedule whose filters and patches come in steps, and where the pixels of its patches lie."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, ClassVar

from im2win.schedules.cuda.arithmetic import MULTIPLIERS
from im2win.schedules.cuda.primitives import CHUNK, padded
from im2win.schedules.cuda.tiles.persistent import EIGHT, KIB, LANES, PHASES, HaloTile, M, PersistentTile
from im2win.spec.conv2d import Conv2d

WARP = 32  # threads
ROWS_OF_BANKS = 8  # pixels, after which the unit's order of banks repeats


@dataclass(frozen=True)
class WarpSpecializedTile(PersistentTile):
    """Output channels of a patch of the output, computed by some warpgroups, to which other warps copy filters and windows.

    product: the arithmetic, of a warpgroup: "wg_f16" or "wg_s8".
    block_m: output channels of a thread block, shared out among its warpgroups.
    images, rows, cols: of a patch of the output; of several images only where it has all of each.
    slabs: slabs of 64 bytes of every pixel of the input that one step takes to shared memory, for all taps.
    stages: steps that shared memory holds at a time.
    taps: taps whose filters, for the channels of a step, are copied together.
    filter_stages: such copies that shared memory holds at a time.
    groups: warpgroups that compute a patch together, each some of the channels.
    turns: so many times as many take patches in turn: while one writes its outputs, the next one multiplies.
    cluster: thread blocks that share something.
    shared: "windows", of a patch that blocks compute neighbouring channels of, or "filters", of channels that they compute neighbouring
        patches of: each copies a part for all; or "sums" of the same outputs, each of which takes its part of the steps.
    boxes: what a step's boxes bring: "patches", pixels of which all taps read some, or "taps", what one tap reads of them, one pixel for
        every output, so that no column of a product lies between outputs.
    """

    LATER: ClassVar[tuple[str, ...]] = ("shared", "boxes")

    cluster: int = 1
    images: int = 1
    taps: int = 1
    filter_stages: int = 2
    turns: int = 1
    shared: str = "windows"
    boxes: str = "patches"

    def field(self, conv: Conv2d) -> StagedHaloTile:
        """The input under a patch."""
        return StagedHaloTile(of_a_tap(conv) if self.boxes == "taps" else flat(conv), self)

    def steps(self, conv: Conv2d) -> int:
        """Steps of a patch: of channels, and of taps where each has boxes of its own."""
        return self.pack(conv).steps(conv) * (math.prod(conv.kernel) if self.boxes == "taps" else 1)

    @property
    def window_blocks(self) -> int:
        """Blocks that copy windows for each other."""
        return self.cluster if self.shared == "windows" else 1

    @property
    def filter_blocks(self) -> int:
        """Blocks that copy filters for each other."""
        return self.cluster if self.shared == "filters" else 1

    @property
    def sum_blocks(self) -> int:
        """Blocks that compute the same outputs."""
        return self.cluster if self.shared == "sums" else 1

    @property
    def multipliers(self) -> int:
        """Threads that multiply; those behind them copy."""
        return LANES * self.groups * self.turns

    @property
    def exchanges(self) -> bool:
        """Whether those that copy are a warpgroup, and give registers to the others: where these are so many that they lack some."""
        return self.multipliers > LANES

    @property
    def threads(self) -> int:
        """Threads of a block: two warps copy, one filters, one windows."""
        return self.multipliers + (LANES if self.exchanges else 2 * WARP)

    @property
    def block_n(self) -> int:
        """Outputs of a patch."""
        return self.warp_n

    @property
    def warp_m(self) -> int:
        """Channels of a warpgroup."""
        return self.block_m // self.groups

    @property
    def warp_n(self) -> int:
        """Outputs of a patch."""
        return self.images * self.rows * self.cols

    @property
    def accumulators(self) -> int:
        """Accumulators of a thread, those between patch rows not counted."""
        return -(-self.warp_m * self.warp_n // LANES)

    @property
    def deduplication_key(self) -> tuple[Any, ...]:
        """Tiles with equal keys are so alike that the tuner begins with one of them."""
        return self.block_m, self.groups, self.turns, -(-self.warp_n // 64), self.filter_blocks > 1, self.sum_blocks, self.boxes

    def features(self) -> dict[str, float]:
        """Numbers that tell tiles of this family apart, for the tuner's cost model."""
        more = {"images": self.images, "turns": self.turns, "taps": self.taps, "filter_stages": self.filter_stages}
        return super().features() | more | {"cluster": self.cluster, "filter_blocks": self.filter_blocks}


def flat(conv: Conv2d) -> Conv2d:
    """The problem whose patches are copied: where windows are pixels, all images are one row of them."""
    if conv.kernel == (1, 1) and conv.stride == (1, 1) and not any(conv.padding):
        return conv.with_(batch=1, height=1, width=conv.batch * conv.height * conv.width)
    return conv


def of_a_tap(conv: Conv2d) -> Conv2d:
    """The problem whose patches are what one tap reads: a pixel for every output, as far apart as windows are."""
    height, width = ((size - 1) * s + 1 for size, s in zip(conv.output_size, conv.stride, strict=True))
    return conv.with_(height=height, width=width, kernel=1, padding=0, dilation=1)


@dataclass(frozen=True)
class StagedHaloTile(HaloTile):
    """The input under a patch, in shared memory: see `HaloTile`. The problem is that of `WarpSpecializedTile.field`.

    Where a patch has whole rows, the zeros on the right of one row are those on the left of the next; where it has whole images, the
    zeros below one are those above the next. Behind the last there are zeros that no box brings.
    """

    tile: WarpSpecializedTile

    @property
    def _halo(self) -> tuple[int, int]:
        """Patch rows and pixels of a row of a plane beyond the first tap's."""
        down, across = ((k - 1) * d // s for k, d, s in zip(self.conv.kernel, self.conv.dilation, self.conv.stride, strict=True))
        return down, across

    def _shared_zeros(self, axis: int) -> int:
        """Zeros along an axis that a row, or image, has in common with the next: no more than lie between their outputs."""
        whole = (self.tile.rows, self.tile.cols)[axis] == self.conv.output_size[axis] and self.conv.stride == (1, 1)
        return min(self.conv.padding[axis], self.conv.padding[axis + 2], self._halo[axis]) if whole else 0

    @functools.cached_property
    def lines(self) -> int:
        """Patch rows of an image in a plane."""
        return self.tile.rows + self._halo[0] - self._shared_zeros(0)

    @functools.cached_property
    def pitch(self) -> int:
        """Pixels of a patch row."""
        return self.tile.cols + self._halo[1] - self._shared_zeros(1)

    @property
    def images(self) -> int:  # type: ignore[override]
        """Of the output."""
        return self.tile.images

    @property
    def sharing(self) -> int:  # type: ignore[override]
        """Blocks of a cluster that copy parts of it for each other."""
        return self.tile.window_blocks

    @property
    def single_taps(self) -> bool:  # type: ignore[override]
        """Whether a step brings what one tap reads only."""
        return self.tile.boxes == "taps"

    @property
    def part(self) -> tuple[int, int, int]:
        """(images, rows, pixels of a row) of a plane that one block of a cluster copies; of a halo tile that a cluster can share."""
        part = self.shared_part
        assert part is not None, "see `legality`"
        return part

    @property
    def shared_part(self) -> tuple[int, int, int] | None:
        """The same; None where a cluster cannot share it."""
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

    @property
    def copied(self) -> int:
        """Pixels of a plane that boxes bring."""
        return self.tile.window_blocks * math.prod(self.part)

    @property
    def reach(self) -> int:
        """Pixels of a plane that outputs' windows read, from the first to the last."""
        down, across = self._halo
        return self._outputs + down * self.pitch + across

    @property
    def plane(self) -> int:
        """Pixels of a plane, filled up to eight."""
        return -(-max(self.copied, self.reach) // ROWS_OF_BANKS) * ROWS_OF_BANKS

    @property
    def _outputs(self) -> int:
        """Columns of a product from the first output to the last."""
        tile = self.tile
        return ((tile.images - 1) * self.lines + tile.rows - 1) * self.pitch + tile.cols

    @property
    def held(self) -> int:
        """Pixels held, with those that the last columns read."""
        return math.prod(self.planes) * self.plane + self.columns - self._outputs

    @property
    def pixels(self) -> int:
        """Pixels to copy."""
        return math.prod(self.planes) * self.copied

    @property
    def columns(self) -> int:
        """Columns of a product: outputs of the patch and those between its rows and images, as many as the unit takes."""
        multiple = MULTIPLIERS[self.tile.dtype].columns
        return -(-self._outputs // multiple) * multiple

    @property
    def patches(self) -> int:
        """Patches that cover the output."""
        return -(-self.conv.batch // self.tile.images) * math.prod(self.counts)

    @property
    def ring(self) -> tuple[int, int]:
        """Shape of the windows: [steps, elements], each of whole KiB."""
        size = self.held * self.tile.units * CHUNK
        return self.tile.stages, -(-size // KIB) * KIB // self.conv.itemsize

    @property
    def filter_ring(self) -> tuple[int, int]:
        """Shape of the filters: [copies, elements]."""
        return self.tile.filter_stages, self.tile.taps * self.tile.block_m * self.tile.units * self.tile.unit

    @functools.cached_property
    def kept(self) -> list[int]:
        """Runs of eight columns, of which some are outputs."""
        return [j for j in range(self.columns // EIGHT) if any(map(self._is_output, range(j * EIGHT, (j + 1) * EIGHT)))]

    def _is_output(self, column: int) -> bool:
        (line, x), tile = divmod(column, self.pitch), self.tile
        return x < tile.cols and line % self.lines < tile.rows and line // self.lines < tile.images

    @property
    def written(self) -> list[list[int]]:
        """Of these runs, those that each block writes of the ones that share sums."""
        blocks, kept = self.tile.sum_blocks, self.kept
        return [kept[len(kept) * rank // blocks : len(kept) * (rank + 1) // blocks] for rank in range(blocks)]

    @property
    def received(self) -> tuple[int, int]:
        """Shape of the sums that a block gets of others: [blocks, elements]."""
        if self.tile.sum_blocks == 1:
            return 0, 0
        return self.tile.sum_blocks - 1, max(map(len, self.written)) * self.tile.block_m * EIGHT

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory that a block takes: rings, others' sums, what lands and is read of each, and whose turn it is."""
        tile = self.tile
        barriers = (tile.stages, tile.stages, tile.filter_stages, tile.filter_stages, tile.turns, *((1, 1) if tile.sum_blocks > 1 else ()))
        parts = ((self.ring, tile.dtype), (self.filter_ring, tile.dtype), (self.received, tile.sum_dtype))
        return sum(padded(*part) for part in parts) + sum(padded((n,), PHASES) for n in barriers)

    @property
    def sum_registers(self) -> int:
        """Registers of a thread for sums."""
        return self.tile.warp_m // M * self.columns // 2
