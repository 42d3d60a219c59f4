"""The memory of the im2col matrix, which others are compared with."""

from __future__ import annotations

from im2win.common.quantities import bytes_text
from im2win.reports.summary import summary_rows
from im2win.spec.conv2d import Conv2d
from im2win.spec.suites import Layer

METHOD = "im2col/tiled"


def im2col_bytes(conv: Conv2d, target: str) -> int | None:
    """Bytes of a layer's im2col matrix on a target; None where that algorithm does not compute it."""
    if target not in ("cpu", "cuda"):
        return None
    found = summary_rows([Layer("", conv, 1)], target)[0]["algorithms"][METHOD]
    return found if isinstance(found, int) else None


def beside_im2col(conv: Conv2d, target: str) -> str:
    """"; im2col's matrix takes 1.2 MiB", or "" where im2col does not compute the layer."""
    count = im2col_bytes(conv, target)
    return "" if count is None else f"; im2col's matrix takes {bytes_text(count)}"
