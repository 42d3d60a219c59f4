"""The im2win transform (thesis Alg. 2) by itself: run through TVM and compared with the formula, element by element."""

from __future__ import annotations

import pytest
from im2win_tensor import numbered, padded, transformed
from regimes import REGIMES

from im2win.spec.conv2d import Conv2d

KEYS = [
    "n2-c5x11x13-k17x3x3-p1",
    "n1-c3x10x13-k8x2x2-s3",  # stride beyond the kernel: rows are skipped
    "n1-c4x13x17-k16x3x5-p1x2",
    "n1-c4x17x13-k16x5x2-p2x1",
    "n1-c4x14x16-k8x3x3-s2x1-p1",
    "n1-c4x14x16-k8x3x3-s1x3",
    "n1-c4x9x11-k16x3x3-p0.1.2.0",
    "n1-c3x17x16-k8x3x2-s2-p1-d3x2",
    "n2-c8x9x11-k16x3x3-p1-NHWC",
]


def test_worked_example() -> None:
    """3x3 input, 2x2 filter, one channel: two rows of windows, columns one after the other: 1 4 2 5 3 6 and 4 7 5 8 6 9."""
    conv = Conv2d(1, 1, 3, 3, 1, 2)
    assert transformed(conv, numbered(conv)).tolist() == [[[[1, 4, 2, 5, 3, 6], [4, 7, 5, 8, 6, 9]]]]


@pytest.mark.parametrize("conv", [REGIMES[key] for key in KEYS], ids=str)
def test_formula(conv: Conv2d) -> None:
    """W[n, c, m, k*Hf + u] = I[n, c, m*s + u*d, k] (eq. 2-2), every index."""
    x = numbered(conv)
    field, y = padded(conv, x), transformed(conv, x)
    (rows, stride, dilation), width = (conv.kernel[0], conv.stride[0], conv.dilation[0]), field.shape[3]
    assert y.shape == (conv.batch, conv.in_channels, conv.output_size[0], width * rows)
    for m in range(conv.output_size[0]):
        for u in range(rows):
            assert (y[:, :, m, u::rows] == field[:, :, m * stride + u * dilation, :]).all(), (m, u)


@pytest.mark.parametrize("conv", [REGIMES[key] for key in KEYS if "-d" not in key], ids=str)
def test_a_window_is_one_contiguous_run(conv: Conv2d) -> None:
    """Window (m, x) is the Wf*Hf elements from x*s*Hf on, column by column: what the micro-kernel relies on."""
    x = numbered(conv)
    field, y = padded(conv, x), transformed(conv, x)
    (kernel_h, kernel_w), (stride_h, stride_w) = conv.kernel, conv.stride
    for m in range(conv.output_size[0]):
        for col in range(conv.output_size[1]):
            run = y[:, :, m, col * stride_w * kernel_h :][:, :, : kernel_h * kernel_w]
            window = field[:, :, m * stride_h : m * stride_h + kernel_h, col * stride_w : col * stride_w + kernel_w]
            assert (run == window.transpose(0, 1, 3, 2).reshape(run.shape)).all(), (m, col)
