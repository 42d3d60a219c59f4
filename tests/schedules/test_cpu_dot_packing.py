"""The packing of filters in words, for dot products on CPUs."""

from __future__ import annotations

import numpy as np
import pytest
from schedules_dot import dot_tensors

from im2win.packing import codec
from im2win.packing.cpu_dot import DotPack
from im2win.spec.conv2d import Conv2d


def test_packing() -> None:
    """Words in the instruction's order, the last block overlapping, offsets behind them; a manifest keeps the packing."""
    conv = Conv2d(1, 5, 4, 4, 6, (1, 2), dtype="int8", zero_point=3)
    w = dot_tensors(conv)["filter"]
    for order in ("steps", "rows", "chunks", "lines"):  # of the last two, chunks are of two words, which no zeros follow
        pack = DotPack(4, 4, 128, order)
        assert pack.shape(conv) == (2, (4 + 1) * 4 * 4) and pack.starts(conv) == [0, 2]
        packed = pack.filter(conv, w)
        assert packed.shape == pack.shape(conv) and packed.dtype == np.int8 and codec.from_dict(codec.as_dict(pack)) == pack
        words = packed[:, : 4 * 4 * 4].reshape(2, 4, 4, 4)
        words = words.transpose(0, 2, 1, 3) if order == "steps" else words  # the 4 steps are one chunk, or two of one kernel column
        if order in ("chunks", "lines"):
            words = packed[:, : 4 * 4 * 4].reshape(2, 2, 4, 2, 4).transpose(0, 2, 1, 3, 4).reshape(2, 4, 4, 4)
        for block, first in enumerate((0, 2)):
            for channel in range(4):
                taps = w[first + channel].transpose(1, 2, 0).reshape(2, 5)  # [kernel column, input channel]
                stored = words[block, channel].reshape(2, 8)
                assert np.array_equal(stored[:, :5], taps) and not stored[:, 5:].any()
        offsets = np.ascontiguousarray(packed[:, 64:]).view(np.int32)
        assert np.array_equal(offsets[1], -131 * w[2:].astype(int).sum(axis=(1, 2, 3)))
    with pytest.raises(ValueError, match="`group` \\(=3\\)"):
        DotPack(4, 3)


@pytest.mark.parametrize("order", ["chunks", "lines"])
def test_packing_of_words_along_kernel_columns(order: str) -> None:
    """Steps are [row, channel, word of columns]; chunks divide the steps of all rows, which lie at one distance in the copy.

    In the order "lines" a channel's nine words of a chunk begin at a cache line, and zeros follow them.
    """
    conv = Conv2d(1, 3, 9, 40, 6, (3, 5), dtype="uint8", zero_point=3)
    w = dot_tensors(conv)["filter"]
    pack, pitch = DotPack(4, 4, 0, order, 0, "columns"), 16 if order == "lines" else 9
    assert (pack.pitch(conv), pack.stored(conv)) == (pitch, 2 * pitch)
    assert (pack.words(conv), pack.steps(conv), pack.run(conv), pack.chunk(conv)) == (6, 18, 18, 9)
    assert pack.run(conv.with_(dilation=(2, 1))) == 6 and codec.from_dict(codec.as_dict(pack)) == pack
    assert "along" not in codec.as_dict(DotPack(4, 4)) and codec.from_dict({"kind": "dot", "block": 4, "group": 4}).along == "channels"
    packed = pack.filter(conv, w)
    chunks = packed[:, : 2 * pitch * 4 * 4].reshape(2, 2, 4, pitch, 4)
    assert not chunks[..., 9:, :].any()
    words = chunks[..., :9, :].transpose(0, 2, 1, 3, 4).reshape(2, 4, 3, 3, 8)  # .., row, channel, column
    for block, first in enumerate((0, 2)):
        assert np.array_equal(words[block, ..., :5], w[first : first + 4].transpose(0, 2, 1, 3)) and not words[block, ..., 5:].any()
    offsets = np.ascontiguousarray(packed[:, 2 * pitch * 4 * 4 :]).view(np.int32)
    assert np.array_equal(offsets[1], -3 * w[2:].astype(int).sum(axis=(1, 2, 3)))
    with pytest.raises(ValueError, match="`along` \\(='rows'\\)"):
        DotPack(4, 4, along="rows")


def test_packing_along_taps() -> None:
    """Words of channels, whose chunks divide the steps of all taps."""
    conv = Conv2d(1, 20, 9, 9, 6, 3, dtype="uint8")
    pack, plain = DotPack(4, 4, 0, "lines", 0, "taps"), DotPack(4, 4)
    assert (pack.words(conv), pack.steps(conv), pack.run(conv), pack.chunk(conv), pack.pitch(conv)) == (5, 45, 45, 15, 16)
    w = dot_tensors(conv)["filter"]
    words = pack.filter(conv, w)[:, : 3 * 4 * 16 * 4].reshape(2, 3, 4, 16, 4)[:, :, :, :15]
    steps = plain.filter(conv, w)[:, : 45 * 4 * 4].reshape(2, 3, 15, 4, 4)
    assert np.array_equal(words.transpose(0, 1, 3, 2, 4), steps)
