"""What the tolerance allows: as much as its reasons say, so that kernels may round and no more."""

from __future__ import annotations

import math

import numpy as np
import pytest

from im2win.numerics.tolerance import TRUSTED, tolerance, trusted
from im2win.numerics.winograd_error import _QUANTISING, SPREAD, expected
from im2win.numerics.winograd_int8 import LARGEST, STEP
from im2win.spec.accuracy import Accuracy
from im2win.spec.conv2d import Conv2d

CONV = Conv2d.parse("n1-c64x16x16-k32x3x3-p1")
EPS = float(np.finfo(np.float32).eps)


@pytest.mark.parametrize(("dtype", "unit"), [("float16", 2.0**-10), ("bfloat16", 2.0**-7)])
def test_narrow_outputs_are_rounded_once(dtype: str, unit: float) -> None:
    """By half a unit of the last place, and the float32 sum before it may be off. The number of products is nothing."""
    one, many = CONV.with_(dtype=dtype), CONV.with_(dtype=dtype, in_channels=1024)
    assert tolerance(one) == tolerance(many) == 0.75 * unit
    assert tolerance(one, "winograd") >= tolerance(one)


def test_float32_sums_walk_at_random() -> None:
    few, many = (tolerance(CONV.with_(in_channels=count, padding=0)) for count in (4, 64))
    assert few == pytest.approx(EPS * (4 * math.sqrt(4 * 9) + 16)) and many == pytest.approx(EPS * (4 * math.sqrt(64 * 9) + 16))
    grouped = tolerance(CONV.with_(groups=16))
    assert grouped == pytest.approx(few), "a group's channels count"


@pytest.mark.parametrize(("accuracy", "allowed"), [("exact", EPS * 112), ("float32", EPS * 112), ("tf32", 2.0**-10)])
def test_accuracies(accuracy: Accuracy, allowed: float) -> None:
    assert tolerance(CONV, accuracy) == pytest.approx(allowed)


def test_an_activation_that_squashes_makes_errors_larger_beside_its_outputs() -> None:
    plain, root = tolerance(CONV), math.sqrt(64 * 9)
    assert tolerance(CONV.with_(activation="relu")) == plain
    assert tolerance(CONV.with_(activation="tanh")) == pytest.approx(plain * root)
    assert tolerance(CONV.with_(activation="sigmoid")) == pytest.approx(plain * root / 4)
    assert tolerance(CONV.with_(activation="tanh"), "tf32") == pytest.approx(2.0**-10 * root)
    assert tolerance(CONV.with_(in_channels=1, kernel=1, padding=0, activation="sigmoid")) == tolerance(
        CONV.with_(in_channels=1, kernel=1, padding=0)
    ), "it never makes them smaller"


def test_integers_are_exact() -> None:
    """But for an activation that rounds, and for Winograd's form."""
    sums = CONV.with_(dtype="int8")
    assert tolerance(sums) == 0.0 < tolerance(sums, "winograd")
    assert tolerance(sums.with_(out_dtype="int8")) == 0.0
    for out_dtype, unit in (("float32", EPS), ("float16", 2.0**-10)):
        rounded = sums.with_(out_dtype=out_dtype, activation="silu")
        assert tolerance(rounded) == pytest.approx(unit + 16 * EPS) and tolerance(rounded.with_(activation="relu")) == 0.0


def test_rounding_of_int8_tensors_in_winograd_s_form() -> None:
    """Of an input to the nearest multiple of STEP beside a sum of four inputs, and of a filter by the largest magnitude of its channel."""
    inputs = np.arange(STEP * 64)
    rounded = np.sqrt(np.mean((inputs - STEP * np.rint(inputs / STEP)) ** 2)) / np.sqrt(4 * SPREAD**2)
    filters = np.linspace(-0.5, 0.5, 100_001) * 4 / LARGEST  # rounding errors in units of the standard deviation
    together = float(np.hypot(rounded, np.sqrt(np.mean(filters**2))))
    assert together == pytest.approx(_QUANTISING, rel=1e-3)


def test_forms_of_winograd_are_trusted_well_within_the_tolerance() -> None:
    for conv in (CONV, CONV.with_(in_channels=512), CONV.with_(dtype="float16")):
        for outputs in (2, 4):
            assert trusted(conv, outputs) == (expected(conv, outputs) <= TRUSTED * tolerance(conv))
    assert trusted(CONV, 2) and not trusted(CONV.with_(dtype="int8"), 2) and TRUSTED == 0.8
