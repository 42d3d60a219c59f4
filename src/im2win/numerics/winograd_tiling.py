"""A convolution as products of Winograd's transformed tiles: their number, and how many of them are in memory at a time (no compiler)."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace

from im2win.common.caching import derived
from im2win.numerics.winograd_error import HALVES, half_forms
from im2win.spec.accuracy import Accuracy, allows
from im2win.spec.activations import activation_of
from im2win.spec.conv2d import Conv2d
from im2win.spec.dtypes import ELEMENT_TYPES

FORMS = {3: (2, 4, 6), 5: (2, 4)}
"""By taps of the kernel: outputs along a side of a tile, of the forms there are kernels for."""

ROW_TAPS, ROW_FORMS = 3, (2,)
"""Taps and outputs of a tile of a row, of the forms there are kernels for."""
ALIGNMENT = 128  # bytes; alignment of M


@dataclass(frozen=True)
class Tiles:
    """The output of a convolution as tiles of `outputs` x `outputs`. A band is `rows` rows of tiles in each of `images` images.

    V is the tensor of transformed input tiles of a band, M the tensor of their products.
    """

    conv: Conv2d
    outputs: int
    images: int
    rows: int

    @property
    def size(self) -> int:
        """Inputs along a side of a tile."""
        return self.outputs + self.conv.kernel[0] - 1

    @property
    def positions(self) -> int:
        """Products of a tile, which are the elements of its transform."""
        return self.size**2

    @property
    def counts(self) -> tuple[int, int]:
        """Rows and columns of tiles that cover an image's output."""
        height, width = self.conv.output_size
        return -(-height // self.outputs), -(-width // self.outputs)

    @property
    def bands(self) -> tuple[int, int]:
        """Number of bands along images and along rows of tiles."""
        return -(-self.conv.batch // self.images), -(-self.counts[0] // self.rows)

    @property
    def count(self) -> int:
        """Tiles of a band."""
        return self.images * self.rows * self.counts[1]

    @derived
    def problem(self) -> Conv2d:
        """The products of a band as a convolution."""
        conv, many = self.conv, self.positions
        channels, filters = many * conv.in_channels, many * conv.out_channels
        return Conv2d(1, channels, 1, self.count, filters, 1, groups=many * conv.groups, layout="NHWC", dtype=conv.dtype)

    @property
    def transformed(self) -> int:
        """Elements of V."""
        return self.count * self.positions * self.conv.in_channels

    @property
    def multiplied(self) -> int:
        """Elements of M."""
        return self.count * self.positions * self.conv.out_channels

    @property
    def before_products(self) -> int:
        """Elements before M: those of V, padded to M's alignment."""
        unit = ALIGNMENT // self.conv.itemsize
        return -(-self.transformed // unit) * unit

    @property
    def made(self) -> int:
        """Elements of V with M behind it."""
        return self.before_products + self.multiplied

    @derived
    def workspace_bytes(self) -> int:
        """Bytes of V with M behind it."""
        return self.made * self.conv.itemsize


@functools.lru_cache(maxsize=1024)
def tiles_of(conv: Conv2d, outputs: int, band: int) -> Tiles:
    """The tiles of a convolution, in bands of at most `band` MiB: whole images, or else rows of tiles of one image; at least one row."""
    row = Tiles(conv, outputs, 1, 1)
    rows = max((band << 20) // row.workspace_bytes, 1)
    if rows >= row.counts[0]:
        count = math.ceil(conv.batch / min(rows // row.counts[0], conv.batch))
        return Tiles(conv, outputs, math.ceil(conv.batch / count), row.counts[0])
    count = math.ceil(row.counts[0] / rows)
    return Tiles(conv, outputs, 1, math.ceil(row.counts[0] / count))


@functools.lru_cache(maxsize=1024)
def row_problem(conv: Conv2d, outputs: int) -> Conv2d:
    """Tiles of `outputs` neighbouring outputs of a row as windows.

    They are one convolution whose kernel has a tile's width, whose stride is a tile's outputs, and whose input is padded to whole tiles.
    """
    top, left, bottom, _ = conv.padding
    width = outputs + conv.kernel[1] - 1
    right = (-(-conv.output_size[1] // outputs) - 1) * outputs + width - conv.width - left
    return replace(conv, kernel=(conv.kernel[0], width), stride=(1, outputs), padding=(top, left, bottom, right))


def spread(conv: Conv2d) -> str | None:
    """The reason why Winograd's form does not apply on any target, because windows are too far apart; None if it applies."""
    return None if conv.stride == conv.dilation == (1, 1) else "Winograd's form is for stride 1 and dilation 1"


def forms(conv: Conv2d) -> tuple[int, ...]:
    """Outputs along a tile's side of the available forms, for a problem with a square kernel."""
    return half_forms(conv) if ELEMENT_TYPES[conv.dtype].narrow else FORMS.get(conv.kernel[0], ())


def row_forms(conv: Conv2d) -> tuple[int, ...]:
    """Outputs of a tile of a row, of the available forms.

    float16 and bfloat16 represent tiles of two outputs within their tolerance: the rounding error is half of that of square tiles. An
    activation with a bound reduces the tolerance, but not the error.
    """
    bounded = ELEMENT_TYPES[conv.dtype].narrow and activation_of(conv.activation).bound is not None
    return ROW_FORMS if conv.kernel[1] == ROW_TAPS and not ELEMENT_TYPES[conv.dtype].integer and not bounded else ()


def refusal(conv: Conv2d, accuracy: Accuracy = "float32") -> str | None:
    """The reason why no CUDA kernel computes a convolution in Winograd's form with that accuracy; None if one does."""
    return None if row_forms(conv) and spread(conv) is None else square_refusal(conv, accuracy)


def square_refusal(conv: Conv2d, accuracy: Accuracy = "float32") -> str | None:
    """As `refusal`, for square tiles alone."""
    down, across = conv.kernel
    if down != across or down not in FORMS:
        return f"Winograd's form is for square kernels of {' or '.join(map(str, FORMS))} taps, not {down}x{across}"
    if (reason := spread(conv)) is not None:
        return reason
    element = ELEMENT_TYPES[conv.dtype]
    held = conv.dtype in HALVES
    if element.integer or (element.narrow and not (held and allows(accuracy, "winograd"))):
        hint = "; accuracy 'winograd' allows it" if held else ""
        return f"{conv.dtype} does not hold transformed tiles as accurately as its tolerance asks{hint}"
    if not forms(conv):
        return f"{conv.activation} cuts off outputs of such long sums, but not the errors of transformed tiles in {conv.dtype}"
    return None
