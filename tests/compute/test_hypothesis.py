"""170 random valid problems, each with a random algorithm and its default tile, exactly equal to the oracle.

The order of examples is fixed, so that a run can be repeated; a failure is shrunk to the smallest problem that still fails.
"""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, given, note, settings
from ops import default, exact, run, supported
from oracle import assert_close, assert_equal, exact_tensors, oracle

import im2win
from im2win.numerics.tolerance import tolerance
from im2win.registry.schedules import schedule_of
from im2win.spec.activations import ACTIVATIONS, activation_of
from im2win.spec.conv2d import LAYOUTS, Conv2d


@st.composite
def problems(draw: st.DrawFn) -> Conv2d:
    """Valid float32 problems of at most a few thousand elements; every option of `Conv2d` varies.

    Sizes are drawn as *output* sizes, and the input is what they need, plus columns that no window reaches: so every draw is valid.
    """

    def pair(most: int, least: int = 1) -> tuple[int, int]:
        return draw(st.integers(least, most)), draw(st.integers(least, most))

    kernel, stride, dilation = pair(5), pair(3), pair(3)
    padding = draw(st.one_of(st.just((0, 0, 0, 0)), st.tuples(*[st.integers(0, 4)] * 4)))
    size = []
    for axis in (0, 1):
        window = (kernel[axis] - 1) * dilation[axis] + 1
        outputs, unread = draw(st.integers(1, 13)), draw(st.integers(0, stride[axis] - 1))
        size.append(max((outputs - 1) * stride[axis] + window + unread - padding[axis] - padding[axis + 2], 1))
    groups = draw(st.sampled_from((1, 1, 1, 2, 3, 5)))
    channels = draw(st.integers(1, 9 if groups == 1 else 2)) * groups
    filters = draw(st.integers(1, 40 if groups == 1 else 9)) * groups
    flags = {name: draw(st.booleans()) for name in ("bias", "residual")}
    epilogue: dict[str, Any] = {**flags, "activation": draw(st.sampled_from(tuple(ACTIVATIONS)))}
    layout = draw(st.sampled_from(LAYOUTS))
    return Conv2d(draw(st.integers(1, 3)), channels, *size, filters, kernel, stride, padding, dilation, groups, layout=layout, **epilogue)


def check(conv: Conv2d, data: st.DataObject) -> None:
    assert Conv2d.parse(str(conv)) == conv
    names = supported(conv)
    if not names:
        with pytest.raises(ValueError, match="no algorithm computes"):
            im2win.build(conv)
        return
    algorithm = data.draw(st.sampled_from(names), label="algorithm")
    op = default(conv, algorithm)
    note(f"tile: {op.tile}")
    tensors = exact_tensors(conv)
    expected = oracle(conv, **tensors)
    y = run(op, tensors, np.full(conv.output_shape, np.nan, np.float32))
    if activation_of(conv.activation).rounds or not exact(conv, schedule_of(algorithm).scheduler.tile(op.tile)):  # rounds even on integers
        assert_close(conv, y, expected, tolerance(conv))
    else:
        assert_equal(conv, y, expected)


@pytest.mark.timeout(1200)  # many builds
@pytest.mark.parametrize("examples", [30, pytest.param(70, marks=pytest.mark.slow), pytest.param(170, marks=pytest.mark.exhaustive)])
def test_random_problems(examples: int) -> None:
    settings(
        max_examples=examples,
        derandomize=True,
        deadline=None,  # the first build loads the compiler
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )(given(problems(), st.data())(check))()


@settings(max_examples=500, derandomize=True, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
@given(problems())
def test_keys_name_their_problem(conv: Conv2d) -> None:
    """Keys round-trip and are safe in file names; sizes agree with the oracle's."""
    key = str(conv)
    assert Conv2d.parse(key) == conv and hash(Conv2d.parse(key)) == hash(conv)
    assert set(key) <= set("abcdefghijklmnopqrstuvwxyzNCHW0123456789.-_")
    zeros = {name: np.zeros_like(value) for name, value in exact_tensors(conv).items()}
    assert oracle(conv, **zeros).shape == conv.output_shape
