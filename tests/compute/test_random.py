"""Normally distributed inputs against the oracle, within what rounding explains; and the package's own reference against the oracle."""

from __future__ import annotations

import numpy as np
import pytest
from ops import default, pairs, run, supported
from oracle import assert_close, normal_tensors, oracle
from regimes import REGIMES

from im2win.numerics.reference import error, random_tensors, reference
from im2win.numerics.tolerance import tolerance
from im2win.spec.conv2d import Conv2d

# Long sums, and silu, which the exact tests leave out.
LONG = [
    Conv2d.parse(key)
    for key in (
        "n1-c256x6x7-k32x3x3-p1",  # 2304 products a sum
        "n1-c512x4x5-k20x1x1",  # 512, through the inner loop of a 1x1
        "n1-c3x27x31-k16x11x11-s4-bias-silu",
        "n2-c8x9x11-k32x3x3-p1-bias-silu",
        "n2-c8x9x11-k32x3x3-p1-add-silu",
        "n1-c8x9x11-k17x3x3-p1-bias-add-silu",
        "n1-c8x9x11-k17x3x3-p1-NHWC-bias-add-silu",
        "n1-c12x9x11-k12x3x3-p1-g12-bias-silu",
    )
]


@pytest.mark.sampled(4)
@pairs(LONG)
def test_close(conv: Conv2d, algorithm: str) -> None:
    tensors = normal_tensors(conv)
    assert_close(conv, run(default(conv, algorithm), tensors), oracle(conv, **tensors), tolerance(conv))


def test_every_activation_far_from_zero() -> None:
    """silu neither overflows nor loses its tails, at arguments of thousands."""
    conv = Conv2d.parse("n1-c1x4x40-k16x1x1-silu")
    x = np.linspace(-3000, 3000, 160, dtype=np.float32).reshape(conv.input_shape)
    w = np.ones(conv.filter_shape, np.float32)
    for algorithm in supported(conv)[:1]:
        y = default(conv, algorithm)(x, w)
        assert_close(conv, y, oracle(conv, x, w), tolerance(conv))
        assert np.isfinite(y).all()


@pytest.mark.parametrize("conv", [*REGIMES.values(), *LONG], ids=str)
def test_reference_agrees_with_the_oracle(conv: Conv2d) -> None:
    """Two float64 programs that share no line: they differ by float64 rounding only."""
    tensors = random_tensors(conv, seed=1)
    assert tuple(tensors) == conv.arguments[:-1]
    expected = oracle(conv, **tensors)
    y = reference(conv, tensors["data"], tensors["filter"], tensors.get("bias"), tensors.get("residual"))
    assert y.dtype == np.float64 and y.shape == expected.shape
    assert np.max(np.abs(y - expected)) <= 1e-11


def test_tolerance_tells_rounding_from_mistakes() -> None:
    """One product lost out of K moves an output by about 1/sqrt(K) of its size: far above the tolerance, even for the longest sums."""
    for conv in LONG:
        depth = conv.flops // (2 * int(np.prod(conv.output_shape)))
        assert 0 < tolerance(conv) < 0.05 / np.sqrt(depth)


def test_error_keeps_nan() -> None:
    y = np.ones((1, 1, 1, 3))
    assert error(y, y) == 0
    assert error(2 * y, y) == 1
    assert np.isnan(error(np.array([[[[1, np.nan, 1]]]]), y))
