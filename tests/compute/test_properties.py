"""What a convolution must satisfy whatever its numbers, exactly, on integers; and that the oracle's comparison itself can fail."""

from __future__ import annotations

import numpy as np
import pytest
from ops import computing, default, run
from oracle import Array, assert_close, assert_equal, exact_tensors, oracle

from im2win.spec.conv2d import Conv2d

CONV = Conv2d.parse("n2-c6x9x11-k18x3x3-p1")
EVERY = computing(CONV)


def integers(shape: tuple[int, ...], seed: int) -> Array:
    return np.random.default_rng(seed).integers(-4, 5, shape).astype(np.float32)


# --- the judge itself


def test_oracle_by_hand() -> None:
    """3x3 input, 2x2 filter, worked out on paper: 1*1 + 2*2 + 4*3 + 5*4 = 37 in the corner."""
    conv = Conv2d(1, 1, 3, 3, 1, 2)
    x = np.arange(1, 10, dtype=np.float32).reshape(conv.input_shape)
    w = np.array([1, 2, 3, 4], np.float32).reshape(conv.filter_shape)
    assert oracle(conv, x, w).ravel().tolist() == [37, 47, 67, 77]
    epilogue = conv.with_(bias=True, residual=True, activation="relu6")
    y = oracle(epilogue, x, w, np.array([-40], np.float32), np.array([0, -5, -22, -50], np.float32).reshape(conv.output_shape))
    assert y.ravel().tolist() == [0, 2, 5, 0]


def test_oracle_agrees_with_torch() -> None:
    """An independent judge of the judge, on uneven strides, padding, dilation and groups, in float64."""
    torch = pytest.importorskip("torch")
    conv = Conv2d.parse("n2-c6x12x13-k9x3x2-s2x1-p2x1-d1x3-g3-bias")
    tensors = {name: value.astype(np.float64) for name, value in exact_tensors(conv).items()}
    x, w, bias = (torch.from_numpy(tensors[name]) for name in ("data", "filter", "bias"))
    y = torch.nn.functional.conv2d(x, w, bias, conv.stride, conv.padding[:2], conv.dilation, conv.groups)
    assert (oracle(conv, **tensors) == y.numpy()).all()


@pytest.mark.parametrize("wrong", [1.0, np.nan, np.inf], ids=["off by one", "NaN", "infinite"])
def test_a_wrong_answer_fails(wrong: float) -> None:
    expected = oracle(CONV, **exact_tensors(CONV))
    y = expected.astype(np.float32)
    assert_equal(CONV, y, expected)
    assert_close(CONV, y, expected, 0)
    y[1, 17, 8, 10] += np.float32(wrong)
    with pytest.raises(AssertionError, match=r"1 of 3564 outputs differ, the first at \(1, 17, 8, 10\)"):
        assert_equal(CONV, y, expected)
    with pytest.raises(AssertionError, match=r"relative error (nan|inf|0\.0)"):
        assert_close(CONV, y, expected, 1e-4)


def test_a_wrong_shape_or_type_fails() -> None:
    expected = oracle(CONV, **exact_tensors(CONV))
    with pytest.raises(AssertionError, match="float64"):
        assert_equal(CONV, expected, expected)
    with pytest.raises(AssertionError, match="not float32"):
        assert_equal(CONV, expected[:1].astype(np.float32), expected)


# --- properties of the kernels


@EVERY
def test_linear(algorithm: str) -> None:
    """conv(2a - 3b, w) = 2 conv(a, w) - 3 conv(b, w), and the same in the filters."""
    op = default(CONV, algorithm)
    a, b = integers(CONV.input_shape, 1), integers(CONV.input_shape, 2)
    v, w = integers(CONV.filter_shape, 3), integers(CONV.filter_shape, 4)
    assert (op(2 * a - 3 * b, w) == 2 * op(a, w) - 3 * op(b, w)).all()
    assert (op(a, 2 * v - 3 * w) == 2 * op(a, v) - 3 * op(a, w)).all()
    assert not op(np.zeros_like(a), w).any()


@EVERY
def test_identity_kernel(algorithm: str) -> None:
    """A filter that is 1 at its centre and its own channel copies the input."""
    conv = CONV.with_(out_channels=6)
    w = np.zeros(conv.filter_shape, np.float32)
    w[range(6), range(6), 1, 1] = 1
    x = integers(conv.input_shape, 5)
    assert (default(conv, algorithm)(x, w) == x).all()


@computing("n1-c1x9x11-k9x3x3-p1")
def test_one_tap_shifts(algorithm: str) -> None:
    """A filter that is 1 at one other tap shifts the input by that tap's place, zeros coming in: all nine taps at once."""
    conv = Conv2d.parse("n1-c1x9x11-k9x3x3-p1")
    w = np.eye(9, dtype=np.float32).reshape(conv.filter_shape)
    x = integers(conv.input_shape, 6)
    y = default(conv, algorithm)(x, w)
    padded = np.pad(x[0, 0], 1)
    for tap in range(9):
        u, v = divmod(tap, 3)
        assert (y[0, tap] == padded[u : u + 9, v : v + 11]).all(), (u, v)


@computing("n1-c4x15x17-k16x3x3-s2")
def test_shifted_input_shifts_the_output(algorithm: str) -> None:
    """Without padding: an input moved by one stride moves the outputs by one."""
    conv = Conv2d.parse("n1-c4x15x17-k16x3x3-s2")
    op = default(conv, algorithm)
    x, w = integers(conv.input_shape, 7), integers(conv.filter_shape, 8)
    moved = np.roll(x, (-2, -2), axis=(2, 3))
    assert (op(moved, w)[:, :, :-1, :-1] == op(x, w)[:, :, 1:, 1:]).all()


@pytest.mark.sampled(4)
@EVERY
def test_images_do_not_mix(algorithm: str) -> None:
    """Each image of a batch gives what it gives alone, and NaN in one leaves the others as they are."""
    x, w = integers(CONV.input_shape, 9), integers(CONV.filter_shape, 10)
    y = default(CONV, algorithm)(x, w)
    alone = default(CONV.with_(batch=1), algorithm)
    for n in range(CONV.batch):
        assert (alone(x[n : n + 1], w) == y[n : n + 1]).all()
    x[0] = np.nan
    poisoned = default(CONV, algorithm)(x, w)
    assert np.isnan(poisoned[0]).all() and (poisoned[1] == y[1]).all()


@pytest.mark.sampled(4)
@computing("n1-c12x9x11-k24x3x3-p1-g3")
def test_groups_are_concatenated_convolutions(algorithm: str) -> None:
    conv = Conv2d.parse("n1-c12x9x11-k24x3x3-p1-g3")
    x, w = integers(conv.input_shape, 11), integers(conv.filter_shape, 12)
    y = default(conv, algorithm)(x, w)
    one = default(conv.with_(groups=1, in_channels=4, out_channels=8), algorithm)
    parts = [one(np.ascontiguousarray(x[:, 4 * g : 4 * g + 4]), w[8 * g : 8 * g + 8]) for g in range(3)]
    assert (y == np.concatenate(parts, axis=1)).all()


@pytest.mark.sampled(4)
@computing("n2-c6x9x11-k18x3x3-s2-p1-bias-add-relu")
def test_nhwc_is_nchw_transposed(algorithm: str) -> None:
    conv = Conv2d.parse("n2-c6x9x11-k18x3x3-s2-p1-bias-add-relu")
    last = conv.with_(layout="NHWC")
    tensors = exact_tensors(conv)
    transposed = dict(tensors)
    for name in ("data", "residual"):
        transposed[name] = np.ascontiguousarray(tensors[name].transpose(0, 2, 3, 1))
    assert (run(default(last, algorithm), transposed) == run(default(conv, algorithm), tensors).transpose(0, 2, 3, 1)).all()


@EVERY
def test_permuted_filters_permute_channels(algorithm: str) -> None:
    """Output channels are independent, also those that share a vector with padding."""
    x, w = integers(CONV.input_shape, 13), integers(CONV.filter_shape, 14)
    order = np.random.default_rng(15).permutation(CONV.out_channels)
    op = default(CONV, algorithm)
    assert (op(x, w[order]) == op(x, w)[:, order]).all()
