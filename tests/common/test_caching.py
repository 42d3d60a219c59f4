"""Values that remember what they derive: copies, pickles and equality show fields only, and hashes hold in every process."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest

from im2win.device.gpu import H200
from im2win.registry.backends import backend_for
from im2win.registry.schedules import schedule_of
from im2win.schedules.cuda.tiles.multistage import MultistageTile
from im2win.spec.conv2d import Conv2d

CONV = Conv2d(1, 64, 8, 8, 64, 3, padding=1, dtype="float16", layout="NHWC")
TILE = MultistageTile("wg_f16", 64, 128, 64, 64, 1, 3, "uvc")


def ranked() -> object:
    """A tile that a model has asked for much."""
    return backend_for(H200).ranked(CONV, schedule_of("direct/warp_specialized"))[0][1]


@pytest.mark.parametrize("make", [lambda: CONV, lambda: TILE, ranked], ids=["problem", "tile", "ranked tile"])
def test_used_values_are_as_new(make: Callable[[], object]) -> None:
    """What is derived does not show: not in `repr`, not in equality, not in copies."""
    value = make()
    new = replace(value)  # type: ignore[type-var]
    hash(value), getattr(value, "threads", None), getattr(value, "flops", None)
    assert value == new and hash(value) == hash(new) and repr(value) == repr(new)
    assert pickle.dumps(value) == pickle.dumps(new)
    assert vars(copy.copy(value)) == vars(pickle.loads(pickle.dumps(value))) == value.__getstate__()  # type: ignore[attr-defined]


def test_a_pickled_value_is_found_in_another_process() -> None:
    """Hashes of strings differ between processes: a remembered one must not travel."""
    hash(CONV), hash(TILE)
    script = (
        "import pickle, sys; from im2win.schedules.cuda.tiles.multistage import MultistageTile; from im2win.spec.conv2d import Conv2d;"
        f"conv, tile = pickle.loads({pickle.dumps((CONV, TILE))!r});"
        f"assert conv in {{Conv2d.parse({str(CONV)!r})}} and tile in {{{TILE!r}}}"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
