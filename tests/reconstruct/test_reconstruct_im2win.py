"""The stored im2win schedule's transform and product in one launch: what is fused, and what is refused."""

from __future__ import annotations

import re

import pytest

from im2win.codegen import rewritten
from im2win.codegen.cuda import kernel_module
from im2win.device.gpu import H200
from im2win.reconstruct.parse.unit import Unit
from im2win.reconstruct.rules import copies, pipelines
from im2win.reconstruct.rulesets import Settings, rewrite
from im2win.reconstruct.validate.validators import EmulatorValidator
from im2win.registry.schedules import schedule_of
from im2win.schedules.cuda.scheduled.passes import PIPELINE
from im2win.schedules.cuda.tiles.scheduled import ScheduledTile
from im2win.spec.conv2d import Conv2d
from im2win.spec.symbols import SYMBOL


def stored(key: str, *rules: str) -> Unit:
    """The transform and the product that TVM generates, rewritten by rules."""
    tile = ScheduledTile("fma", 32, 32, 8, 4, 4, "uvc", 2, 0, 4, "")
    made = schedule_of("im2win/scheduled").on_gpu.kernels(Conv2d.parse(key), tile, H200)
    (function,) = rewritten.functions(kernel_module({SYMBOL: made[SYMBOL]}), H200, PIPELINE)
    done = rewrite(function.unit, rules)
    assert bool(done.matches) == bool(rules) and len(done.unit.kernels) == 2
    return done.unit


@pytest.mark.parametrize(("rule", "before"), [("pkf-shmem", []), ("pkf-llc", [pipelines.RULE, copies.RULE])])
def test_one_launch_for_both(rule: str, before: list[str]) -> None:
    """27 terms in steps of 8: what is copied behind the last term is zero, and reads nothing of the tensor."""
    unit = stored("n1-c3x9x10-k32x3x3", *before)
    copied = re.search(r"copy_async<4>\(\w+ \+ .*, im2win_ptr \+ .*, \(.* < \d+\)+\);", unit.source)
    assert bool(copied) == bool(before)
    fused = rewrite(unit, [rule], Settings(shared=H200.block_shared), must=True).unit
    assert EmulatorValidator(unit, seeds=range(2)).objection(fused) is None
    assert ("im2win" in fused.workspace) == (rule == "pkf-llc")


def test_asynchronous_copies_cannot_read_shared_memory() -> None:
    unit = stored("n1-c3x9x10-k32x3x3", pipelines.RULE, copies.RULE)
    done = rewrite(unit, ["pkf-shmem"], Settings(shared=H200.block_shared))
    assert done.unit == unit and "im2win_ptr is used other than by an index" in done.notes[0]


@pytest.mark.parametrize("rule", ["pkf-shmem", "pkf-llc"])
def test_blocks_across_rows_of_windows_are_refused(rule: str) -> None:
    """A transform's block is a piece of the tensor in memory, which spans channels, not the rows that one block of the product reads."""
    unit = stored("n2-c8x18x18-k32x3x3")
    done = rewrite(unit, [rule], Settings(shared=H200.block_shared))
    assert done.unit == unit and "is no formula of its index" in done.notes[0]
