"""Problems chosen by regime, each with the reason it is here: the tests run every algorithm on all of them.

They are small, so that one is built and run in a fraction of a second; sizes are mostly primes, so that no tile divides them by chance.
"""

from __future__ import annotations

from im2win.spec.conv2d import Conv2d

_TABLE: tuple[tuple[str, str], ...] = (
    # --- windows
    ("n2-c8x12x14-k16x3x3-p1", "the everyday layer: everything divides"),
    ("n2-c5x11x13-k17x3x3-p1", "primes: nothing divides, in channels, rows or columns"),
    ("n1-c7x29x31-k19x3x3", "primes without padding, rows longer than any register tile"),
    ("n2-c16x7x7-k32x1x1", "1x1: a plain product, no window at all"),
    ("n1-c6x9x11-k12x1x1-s2", "1x1 with stride 2: input rows and columns that no output sees"),
    ("n1-c3x10x13-k8x2x2-s3", "stride beyond the kernel: gaps between windows, im2win is smaller than the input"),
    ("n1-c4x15x17-k20x3x3-s2-p1", "stride 2: strided reads and a last column that is never read"),
    ("n1-c4x14x16-k8x3x3-s2x1-p1", "stride 2 down, 1 across"),
    ("n1-c4x14x16-k8x3x3-s1x3", "stride 1 down, 3 across"),
    ("n1-c3x23x27-k16x7x7-s4-p3", "a first layer: few channels, large kernel and stride"),
    ("n1-c4x13x17-k16x3x5-p1x2", "non-square kernel, wide: im2win's window index must use the kernel's height"),
    ("n1-c4x17x13-k16x5x2-p2x1", "non-square kernel, tall, one side even"),
    ("n1-c6x9x19-k16x1x7-p0x3", "a row kernel: kernel height 1"),
    ("n1-c6x19x9-k16x7x1-p3x0", "a column kernel: kernel width 1"),
    ("n1-c4x6x40-k16x1x11", "kernel row longer than a loop that is unrolled by itself"),
    # --- padding
    ("n1-c4x9x11-k16x3x3-p0.1.2.0", "four sides, all different"),
    ("n1-c4x9x11-k16x4x4-s2-p1.0.2.3", "four sides with an even kernel and stride 2"),
    ("n1-c3x5x6-k16x3x3-p4", "padding beyond the kernel's reach: windows that see zeros only"),
    ("n1-c3x5x6-k16x1x1-p2", "1x1 with padding: looks like a product and is none"),
    ("n1-c2x3x3-k8x5x5-p2", "kernel larger than the input: it fits only with the padding"),
    ("n1-c3x8x9-k8x3x3-s3-p5", "padding wider than a stride: whole rows of windows outside"),
    # --- dilation
    ("n1-c4x15x17-k16x3x3-p2-d2", "dilation 2: im2win's windows are no contiguous run any more"),
    ("n1-c3x17x16-k8x3x2-s2-p1-d3x2", "dilation with stride, both unequal down and across"),
    # --- channels
    ("n1-c3x13x11-k16x3x3-p1", "three input channels"),
    ("n1-c1x13x11-k16x3x3-p1", "one input channel"),
    ("n1-c5x9x11-k1x3x3-p1", "one output channel: a vector of padding"),
    ("n1-c5x9x11-k3x3x3-p1", "three output channels"),
    ("n2-c5x9x11-k10x3x3", "ten output channels: more than one narrow vector"),
    ("n1-c4x7x9-k100x3x3", "a hundred output channels: several blocks, the last one padded"),
    ("n1-c1x1x1-k1x1x1", "one of everything: one product"),
    # --- output shapes
    ("n1-c8x5x5-k24x5x5", "1x1 output"),
    ("n3-c8x3x21-k16x3x3", "a single row of outputs"),
    ("n3-c8x21x3-k16x3x3", "a single column of outputs"),
    ("n5-c3x6x7-k8x3x3", "odd batch: parallel steps that threads share unevenly"),
    # --- groups
    ("n2-c12x9x10-k32x3x3-p1-g2", "groups whose channels fill a vector"),
    ("n1-c6x9x11-k15x3x3-p1-g3", "groups of five filters, which no vector divides"),
    ("n1-c4x7x9-k14x1x1-g2", "1x1 groups"),
    ("n1-c16x9x11-k16x3x3-p1-g16", "depthwise"),
    ("n1-c7x9x11-k7x3x3-s2-p1-g7", "depthwise, prime, stride 2"),
    ("n1-c5x9x11-k15x3x3-p1-g5", "depthwise with channel multiplier 3"),
    ("n1-c6x10x11-k6x3x3-p2-d2-g6", "depthwise, dilated"),
    # --- epilogues (silu is no exact function: tests with random numbers have it)
    ("n2-c4x9x11-k32x3x3-p1-bias", "bias"),
    ("n2-c4x9x11-k32x3x3-p1-add", "residual, channels fill the block: added to transposed rows"),
    ("n2-c4x9x11-k17x3x3-p1-add", "residual, channels padded"),
    ("n2-c4x9x11-k32x3x3-p1-relu", "relu"),
    ("n1-c4x9x11-k17x3x3-p1-bias-relu6", "bias and relu6, channels padded"),
    ("n1-c4x9x11-k48x3x3-p1-bias-add-relu", "everything at once"),
    ("n1-c6x9x11-k12x3x3-p1-g2-bias-add-relu6", "everything at once, in groups"),
    # --- NHWC
    ("n2-c8x9x11-k16x3x3-p1-NHWC", "channels last"),
    ("n2-c5x11x13-k17x3x3-s2-p1-NHWC", "channels last, primes"),
    ("n1-c6x9x11-k6x3x3-p1-g6-NHWC", "channels last, depthwise"),
    ("n1-c37x9x11-k37x3x3-s2-p1-g37-NHWC-bias-add-relu", "channels last, depthwise, a last vector of few channels"),
    ("n1-c4x9x11-k8x5x5-p2-g4-NHWC", "channels last, depthwise with channel multiplier 2"),
    ("n1-c3x7x9-k10x1x1-NHWC", "channels last, 1x1"),
    ("n1-c4x9x11-k32x3x3-p1-NHWC-bias-add-relu", "channels last, everything at once"),
    ("n1-c4x9x11-k17x3x3-p0.1.2.0-NHWC-bias-add-relu6", "channels last, everything at once, channels and sides uneven"),
)  # fmt: skip

REGIMES: dict[str, Conv2d] = {key: Conv2d.parse(key) for key, _ in _TABLE}
REASONS: dict[str, str] = dict(_TABLE)
