"""Every algorithm on every regime, exactly: with small integers every order of summation gives the same float32 numbers.

Winograd's forms with divisions that are not by powers of two round, and have to keep the tolerance instead.

Outputs start as NaN between guard zones, so an output that is never written and a write outside are failures too. Inputs lie between NaN,
so that a read outside that reaches a sum shows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from ops import exact, pairs, run, sampled_tiles, tiled
from oracle import Array, assert_close, assert_equal, exact_tensors, oracle
from regimes import REGIMES

from im2win.numerics.tolerance import tolerance
from im2win.registry.cpu_schedules import CudaOnly
from im2win.registry.schedules import SCHEDULES, schedule_of
from im2win.runtime.op import Op
from im2win.spec.conv2d import Conv2d

ON_CPUS = [name for name, row in SCHEDULES.items() if not isinstance(row.scheduler, CudaOnly)]
GUARD = 61  # elements on each side; odd, so that what lies between is not aligned to a vector


def between_guards(array: Array) -> tuple[Array, Array]:
    """A copy that lies inside a larger buffer of NaN: (the copy, the buffer)."""
    buffer = np.full(array.size + 2 * GUARD, np.nan, np.float32)
    inside = buffer[GUARD:-GUARD].reshape(array.shape)
    inside[...] = array
    return inside, buffer


def check(op: Op) -> None:
    """Runs an operator on integers between guards and compares with the oracle."""
    conv = op.conv
    tensors = exact_tensors(conv)
    expected = oracle(conv, **tensors)
    out, buffer = between_guards(np.full(conv.output_shape, np.nan, np.float32))
    guarded = {name: between_guards(array)[0] for name, array in tensors.items()}
    run(op, guarded, out)
    if exact(conv, schedule_of(f"{op.algorithm}/{op.schedule}").scheduler.tile(op.tile)):
        assert_equal(conv, out, expected)
    else:
        assert_close(conv, out, expected, tolerance(conv))
    assert np.isnan(buffer[:GUARD]).all() and np.isnan(buffer[-GUARD:]).all(), f"{conv}: written outside the output"


def tile_of(conv: Conv2d, algorithm: str, which: str) -> Any:
    """The default tile, or one drawn from the space, of both axes in turn: every regime and every algorithm has tiles of both."""
    default, *others = sampled_tiles(conv, algorithm, 1)
    if which == "default" or not others:
        return default
    turn = list(REGIMES).index(str(conv)) + ON_CPUS.index(algorithm)
    return others[turn % len(others)]


@pytest.mark.sampled(20)
@pytest.mark.pairwise
@pytest.mark.parametrize("which", ["default", "drawn"])
@pairs(REGIMES.values())
def test_equal(conv: Conv2d, algorithm: str, which: str) -> None:
    tile = tile_of(conv, algorithm, which)
    try:
        check(tiled(conv, algorithm, tile))
    except Exception as error:
        error.args = (f"{algorithm} with {tile.as_dict()}: {error}",)
        raise


def test_regimes_are_what_they_say() -> None:
    """Keys are canonical, problems small and distinct."""
    assert all(str(conv) == key for key, conv in REGIMES.items())
    assert all(conv.bytes_moved < 1 << 18 for conv in REGIMES.values())


def test_tiles_of_both_axes_are_among_the_samples() -> None:
    """Beside the default ones: over the algorithms of a regime, and over the regimes of an algorithm."""
    one, other, *_ = ON_CPUS
    first, second, *_ = REGIMES.values()
    for cases in ([(first, one), (first, other)], [(first, one), (second, one)]):
        assert {tile_of(*case, "drawn").axis for case in cases} == {"channels", "windows"}
