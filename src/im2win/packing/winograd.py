"""Winograd's filters, transformed ahead of time (numpy only, no compiler): U = G g G^T of every filter and channel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from im2win.numerics.winograd_matrices import floats, transform
from im2win.spec.conv2d import Conv2d

Array = npt.NDArray[Any]

AXES = "bkcij"


def transformed(conv: Conv2d, w: Array, outputs: int) -> Array:
    """Filters transformed for F(outputs, kernel), in float64.

    Args:
        w: filters of `conv.filter_shape`.

    Returns:
        [out_channels, in_channels / groups, t_h, t_w].
    """
    both, tiles = _of_both_axes(conv, outputs)
    form: Array = w.reshape(*w.shape[:2], -1).astype(np.float64) @ both.T
    return form.reshape(*w.shape[:2], *tiles)


def _of_both_axes(conv: Conv2d, outputs: int) -> tuple[Array, tuple[int, int]]:
    """G of rows and of columns as one matrix, their Kronecker product of [t_h * t_w, kernel's elements], and (t_h, t_w)."""
    down, across = (floats(transform(outputs, taps).g) for taps in conv.kernel)
    return np.kron(down, across), (len(down), len(across))


def transformed_rows(w: Array, outputs: int) -> Array:
    """Filters with every row transformed for F(outputs, columns), in float64.

    Returns:
        [out_channels, in_channels / groups, rows, t].
    """
    form: Array = w.astype(np.float64) @ floats(transform(outputs, w.shape[3]).g).T
    return form


@dataclass(frozen=True)
class WinogradPack:
    """Transformed filters as a tensor with the axes of `order`, innermost last, and bias as [channel blocks, block].

    Attributes:
        outputs: m of F(m x m, kernel).
        block: output channels of a block; channels that do not fill a group's last block are zero filters.
        order: a permutation of b (channel block), k (channel inside it), c (input channel of the group), i and j (row and column of the
            tile).
        channels: input channels are padded with zeros to a multiple of this.
    """

    outputs: int
    block: int
    order: str = "bijck"
    channels: int = 1

    def __post_init__(self) -> None:
        if sorted(self.order) != sorted(AXES):
            raise ValueError(f"WinogradPack: `order` (={self.order!r}) must be a permutation of {AXES}.")
        for name in ("outputs", "block", "channels"):
            if getattr(self, name) < 1:
                raise ValueError(f"WinogradPack: `{name}` (={getattr(self, name)}) must be at least 1.")

    def blocks_per_group(self, conv: Conv2d) -> int:
        """Channel blocks that hold one group's filters."""
        return -(-(conv.out_channels // conv.groups) // self.block)

    def blocks(self, conv: Conv2d) -> int:
        """Channel blocks of all groups."""
        return conv.groups * self.blocks_per_group(conv)

    def depth(self, conv: Conv2d) -> int:
        """Input channels of a group, padded."""
        return -(-(conv.in_channels // conv.groups) // self.channels) * self.channels

    def shape(self, conv: Conv2d) -> tuple[int, ...]:
        """Shape of the packed filters."""
        rows, cols = (self.outputs + taps - 1 for taps in conv.kernel)
        extents = {"b": self.blocks(conv), "k": self.block, "c": self.depth(conv), "i": rows, "j": cols}
        return tuple(extents[axis] for axis in self.order)

    def filter(self, conv: Conv2d, w: Array) -> Array:
        """Transforms and packs filters of `conv.filter_shape` into `shape(conv)`, contiguous, with their dtype.

        Raises:
            ValueError: filters of integers, which the transform would not keep.
        """
        if np.issubdtype(w.dtype, np.integer):
            raise ValueError(f"`w` has dtype {w.dtype}; Winograd's transformed filters are fractions and need a floating-point type.")
        groups, per_group = conv.groups, conv.out_channels // conv.groups
        fill = ((0, self.blocks_per_group(conv) * self.block - per_group), (0, self.depth(conv) - w.shape[1]))
        whole = np.pad(w.reshape(groups, per_group, *w.shape[1:]), ((0, 0), *fill, (0, 0), (0, 0)))
        inner = [axis for axis in self.order if axis in "kc"]
        blocked = whole.reshape(self.blocks(conv), self.block, *whole.shape[2:])
        by_element = blocked.transpose([AXES.index(axis) for axis in ("b", "i", "j", *inner)]).reshape(len(blocked), w[0, 0].size, -1)
        packed = np.empty(self.shape(conv), w.dtype)
        blocks = packed.transpose([self.order.index(axis) for axis in ("b", "i", "j", *inner)])
        both, _ = _of_both_axes(conv, self.outputs)
        for block, elements in zip(blocks, by_element, strict=True):
            block[...] = (both @ elements.astype(np.float64)).reshape(block.shape)
        return packed

    def bias(self, conv: Conv2d, bias: Array) -> Array:
        """Packs a bias of [out_channels] into [blocks, block], contiguous."""
        groups, per_group = conv.groups, conv.out_channels // conv.groups
        fill = self.blocks_per_group(conv) * self.block - per_group
        wide = np.pad(bias.reshape(groups, per_group), ((0, 0), (0, fill)))
        return np.ascontiguousarray(wide.reshape(self.blocks(conv), self.block))
