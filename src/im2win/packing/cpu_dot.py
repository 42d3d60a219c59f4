"""Filter packing of CPU kernels with dot-product instructions: words of neighbouring input channels (numpy only, no compiler)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from im2win.spec.conv2d import Conv2d

Array = npt.NDArray[Any]

WORD = 4  # bytes
ORDERS = ("steps", "rows", "chunks", "lines")
ALONG = ("channels", "columns", "taps")
MOST_CHUNK = 16  # words of a row of an AMX tile
_WIDE = {
    ("int8", 4): "int8", ("int8", 2): "int16", ("int8", 1): "int32",
    ("bfloat16", 2): "bfloat16", ("bfloat16", 1): "float32", ("float16", 1): "float32",
}  # fmt: skip


def added(shift: int, dtype: str) -> int:
    """What a kernel adds to inputs of a type: a positive `shift` to int8, for instructions of unsigned bytes, a negative one to uint8."""
    return shift if dtype == ("int8" if shift > 0 else "uint8") else 0


def chunk_of(run: int) -> int:
    """The most words that divide a run and fit a row of an AMX tile."""
    return max(words for words in range(1, MOST_CHUNK + 1) if run % words == 0)


@dataclass(frozen=True)
class DotPack:
    """Filters as blocks of words of 32 bits, each with `group` neighbouring input channels of one tap and output channel.

    A step of the sum is a kernel row, a kernel column and a word of channels, the last one innermost. Channels that do not fill a group's
    last word are zeros. Words may be those of neighbouring kernel columns instead (`along`), for layers of few channels: a step is a kernel
    row, a channel and a word of columns, and columns that do not fill a row's last word are zeros. Elements have 32 / `group` bits: filters
    are converted to int16 or float32, say, where an instruction multiplies those. A block holds the words of `block` output channels; where
    blocks do not divide a group's channels, its last block is the last channels, some of which the block before has as well.

    Behind the words of an integer block are `block` int32, the offsets that sums begin with: minus (`shift` + zero point) times the sum of
    a channel's filters. A kernel adds `shift` to inputs whose sign its instruction does not take (see `added`).

    Words and offsets are stored as elements of the filters' type, in the machine's byte order.

    Attributes:
        block: output channels of a block.
        group: elements of a word.
        shift: what a kernel adds to elements, as for `added`.
        order: "steps": [steps, block]; or "lines": [chunks, block, steps of a chunk], whose channels are the rows of AMX tiles (`chunk`).
            A row begins where none crosses the end of a cache line, behind zeros (`pitch`). Older libraries also have "chunks", without
            these zeros, and "rows": [block, steps].
        across: 1 if blocks run over the channels of all groups, for depthwise layers; else 0.
        along: what a word has neighbouring elements of: "channels" or kernel "columns"; or "taps": of channels, and all steps of the sum
            are at one distance in the copy, which holds the inputs of each tap.
    """

    block: int
    group: int
    shift: int = 0
    order: str = "steps"
    across: int = 0
    along: str = "channels"

    LATER: ClassVar[tuple[str, ...]] = ("along",)
    """Fields that are younger than some manifests: at their default they are left out there."""

    def __post_init__(self) -> None:
        if self.block < 1 or self.group not in (1, 2, 4):
            raise ValueError(f"DotPack: `block` (={self.block}) must be at least 1, and `group` (={self.group}) 1, 2 or 4.")
        if self.order not in ORDERS or self.across not in (0, 1):
            raise ValueError(f"DotPack: `order` (={self.order!r}) must be one of {', '.join(ORDERS)}, `across` (={self.across}) 0 or 1.")
        if self.along not in ALONG:
            raise ValueError(f"DotPack: `along` (={self.along!r}) must be one of {', '.join(ALONG)}.")

    def single_group(self, conv: Conv2d) -> Conv2d:
        """The layer whose groups the blocks run over: with `across` that of one input channel, which has the same filters in memory."""
        return conv.with_(in_channels=1, groups=1) if self.across else conv

    def words(self, conv: Conv2d) -> int:
        """Words of a group's channels, for a tap; along columns, words of a kernel row."""
        channels, _, columns = self.single_group(conv).filter_shape[1:]
        return channels * -(-columns // self.group) if self.along == "columns" else -(-channels // self.group)

    def steps(self, conv: Conv2d) -> int:
        """Steps of the sum."""
        return (conv.kernel[0] if self.along == "columns" else math.prod(conv.kernel)) * self.words(conv)

    def run(self, conv: Conv2d) -> int:
        """Steps whose inputs are at one distance from the next, in a copy of [word][row][column], or along columns of [row][word][column].

        Columns of a stride are parted there by their phase. Of [tap][word][window] it is all steps.
        """
        words = self.words(conv)
        if self.along == "taps":
            return self.steps(conv)
        if self.along == "columns":
            return words * (conv.kernel[0] if conv.dilation[0] == 1 else 1)
        stride = conv.stride[1] if conv.kernel[1] > 1 else 1
        return conv.kernel[1] if words == 1 and conv.dilation[1] % stride == 0 else words

    def chunk(self, conv: Conv2d) -> int:
        """Steps of a chunk: the most that divide a `run` and fit a row of an AMX tile; one or all steps in the other orders."""
        return {"steps": 1, "rows": self.steps(conv)}.get(self.order) or chunk_of(self.run(conv))

    def pitch(self, conv: Conv2d) -> int:
        """Words from a channel's steps of a chunk to those of the next channel: a power of two in the order "lines"."""
        chunk = self.chunk(conv)
        return 1 << (chunk - 1).bit_length() if self.order == "lines" else chunk

    def stored(self, conv: Conv2d) -> int:
        """Words of a channel in the packed filters."""
        return self.steps(conv) // self.chunk(conv) * self.pitch(conv)

    def blocks_per_group(self, conv: Conv2d) -> int:
        """Channel blocks of a group."""
        conv = self.single_group(conv)
        return -(-(conv.out_channels // conv.groups) // self.block)

    def blocks(self, conv: Conv2d) -> int:
        """Channel blocks of all groups."""
        return self.single_group(conv).groups * self.blocks_per_group(conv)

    def starts(self, conv: Conv2d) -> list[int]:
        """The first output channel of every block."""
        per_group = self.single_group(conv).out_channels // self.single_group(conv).groups
        inside = [min(index * self.block, per_group - self.block) for index in range(self.blocks_per_group(conv))]
        return [group * per_group + start for group in range(self.single_group(conv).groups) for start in inside]

    def shape(self, conv: Conv2d) -> tuple[int, int]:
        """Shape of the packed filters: (blocks, elements of the filters' type)."""
        return self.blocks(conv), (self.stored(conv) + self._has_offsets(conv)) * self.block * WORD // conv.itemsize

    @staticmethod
    def _has_offsets(conv: Conv2d) -> bool:
        return conv.dtypes["filter"] == "int8"

    def filter(self, conv: Conv2d, w: Array) -> Array:
        """Packs filters of `conv.filter_shape` into `shape(conv)`, contiguous."""
        dtype = conv.dtypes["filter"]
        axes = (0, 2, 1, 3) if self.along == "columns" else (0, 2, 3, 1)
        taps = w.reshape(self.single_group(conv).filter_shape).transpose(axes).astype(_WIDE[dtype, self.group])
        fill = -taps.shape[3] % self.group
        steps = np.pad(taps, ((0, 0), (0, 0), (0, 0), (0, fill))).reshape(conv.out_channels, -1, self.group)
        of_blocks = np.array(self.starts(conv))[:, None] + np.arange(self.block)
        words = steps[of_blocks]  # [blocks, block, steps, group]
        chunk = self.chunk(conv)
        words = words.reshape(len(of_blocks), self.block, -1, chunk, self.group).transpose(0, 2, 1, 3, 4)
        words = np.pad(words, ((0, 0), (0, 0), (0, 0), (0, self.pitch(conv) - chunk), (0, 0)))
        parts = [np.ascontiguousarray(words).reshape(len(of_blocks), -1).view(w.dtype)]
        if self._has_offsets(conv):
            shifted = conv.zero_point + added(self.shift, conv.dtype)
            offsets = -shifted * w.reshape(conv.out_channels, -1).astype(np.int64).sum(axis=1)
            parts.append(np.ascontiguousarray(offsets.astype(np.int32)[of_blocks]).view(w.dtype))
        return np.ascontiguousarray(np.concatenate(parts, axis=1))

    def bias(self, conv: Conv2d, bias: Array) -> Array:
        """The bias of [out_channels] as it is, contiguous."""
        return np.ascontiguousarray(bias)
