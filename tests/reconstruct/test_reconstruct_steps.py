"""Rules for what TVM's schedules become: one barrier a step, asynchronous copies; each is proven, and what cannot be proven is refused."""

from __future__ import annotations

import re

import pytest
from pipelined import KERNEL, changed, unit

from im2win.codegen import rewritten
from im2win.codegen.cuda import kernel_module
from im2win.device.gpu import H200
from im2win.reconstruct import ReconstructError
from im2win.reconstruct.parse.unit import Unit
from im2win.reconstruct.rules import copies, pipelines
from im2win.reconstruct.rules.races import period, race
from im2win.reconstruct.rulesets import rewrite
from im2win.reconstruct.trace.events import NotShown
from im2win.schedules.cuda.launch_overlap import CALL, waiting
from im2win.schedules.cuda.scheduled.passes import PIPELINE
from im2win.schedules.studies import cuda_ladder_schedule
from im2win.schedules.studies.cuda_ladder import ALGORITHM_9
from im2win.spec.conv2d import Conv2d
from im2win.spec.symbols import SYMBOL

SECOND = "conv2d_kernel_1"


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_pipelines_wait_once_a_step_and_copies_run_ahead(stages: int) -> None:
    """The loop's first barrier stays, its second one moves behind it; a step waits for the oldest of its groups only."""
    plain = unit(stages)
    assert race(plain, KERNEL) is None
    one = rewrite(plain, [pipelines.RULE], must=True)
    loop = pipelines.pipeline_of(one.unit.kernel(KERNEL))
    assert loop is not None and period(one.unit.kernel(KERNEL), loop) == stages
    inside = one.unit.source[slice(*loop.span)]
    assert inside.count("__syncthreads();") == 1 == one.unit.source[loop.span[1] :].count("__syncthreads();")
    both = rewrite(one.unit, [copies.RULE], must=True)
    assert f"copies asynchronously, {stages - 1} steps ahead" in both.notes[0]
    assert f"wait_copies<{stages - 2}>" in both.unit.source and race(both.unit, KERNEL) is None
    assert not re.search(r"shared_ptr\w*\[[^;]*\] = (?:data|filter)_ptr", both.unit.source) and "condval" not in both.unit.source


def through_registers() -> Unit:
    """What TVM generates for a pipeline whose copies pass through registers: Alg. 9 of the ladder."""
    conv = Conv2d.parse("n1-c8x9x9-k32x3x3")
    scheduled = cuda_ladder_schedule.schedule(conv, cuda_ladder_schedule.define(conv, ALGORITHM_9), ALGORITHM_9)
    (function,) = rewritten.functions(kernel_module({SYMBOL: scheduled.mod["main"]}), H200, PIPELINE)
    return function.unit


def test_stores_behind_the_products_need_not_wait() -> None:
    """The other buffer is stored to without a barrier; not so where stores go to the buffer that the products read."""
    plain = through_registers()
    loop = pipelines.stores_last(plain.kernel(SECOND))
    assert loop is not None and plain.source[slice(*loop.span)].count("__syncthreads();") == 2
    done = rewrite(plain, [pipelines.RULE], must=True)
    assert f"kernel {SECOND} has one barrier a step" in done.notes[1] and race(done.unit, SECOND) is None
    [only] = re.findall(r"\n  for [^\n]*\n(?:    .*\n)*?    __syncthreads\(\);\n", done.unit.source)
    late = changed(done.unit, only, only.replace("__syncthreads();", ""))
    assert (race(late, SECOND) or "").startswith("threads write and read the same bytes of")
    same = changed(plain, f"(({loop.name} + 1) & 1)", f"({loop.name} & 1)", -1)
    assert race(same, SECOND) is None, "with both barriers one buffer is enough"
    kept = rewrite(same, [pipelines.RULE])
    assert kept.unit.source == same.source and f"kernel {SECOND} keeps two barriers a step" in kept.notes[1]


def test_a_wait_for_other_kernels_orders_nothing() -> None:
    """Kernels with launch overlap are rewritten like others, and the wait is no barrier."""
    plain = unit(3)
    overlapping = Unit(waiting(plain.source), plain.launches)
    assert CALL in overlapping.kernel(KERNEL).body and race(overlapping, KERNEL) is None
    assert len(rewrite(overlapping, [pipelines.RULE, copies.RULE], must=True).matches) == len(
        rewrite(plain, [pipelines.RULE, copies.RULE], must=True).matches
    )
    instead = changed(overlapping, "__syncthreads();", f"{CALL}();", 1 << 20)
    assert (race(instead, KERNEL) or "").startswith("threads write and read the same bytes of")


def test_a_race_is_found() -> None:
    """Each change that breaks the pipeline: no barrier, a wait that is too short, no wait, a group that is committed too late."""
    good = rewrite(unit(3), [pipelines.RULE, copies.RULE], must=True).unit
    assert race(good, KERNEL) is None
    body = good.source.index("__global__")
    for before, after in (
        ("__syncthreads();", ""), ("im2win::wait_copies<1>();", "im2win::wait_copies<2>();"), ("im2win::wait_copies<1>();", ""),
        ("im2win::wait_copies<0>();", "im2win::wait_copies<1>();"),
    ):  # fmt: skip
        assert before in good.source[body:]
        broken = Unit(good.source[:body] + good.source[body:].replace(before, after, 1), good.launches, good.workspace)
        assert race(broken, KERNEL) is not None, before
    late = changed(good, "im2win::commit_copies();\n  }", "  }")
    assert race(late, KERNEL) is not None


def test_what_cannot_be_shown_stays() -> None:
    """Places that depend on the step otherwise than by a ring of buffers, or on data."""
    plain = unit(2)
    loop = pipelines.pipeline_of(plain.kernel(KERNEL))
    assert loop is not None
    odd = changed(plain, f"({loop.name} & 1)", f"(({loop.name} * {loop.name}) & 1)", 1 << 20)
    with pytest.raises(NotShown, match="beyond a ring of buffers"):
        period(odd.kernel(KERNEL), pipelines.pipeline_of(odd.kernel(KERNEL)) or loop)
    done = pipelines.rewrite(odd)
    assert not done[1] and "keeps two barriers a step: line" in done[2][0]
    with pytest.raises(ReconstructError, match="cannot copy asynchronously"):
        copies.rewrite(odd)


def test_without_a_pipeline_every_barrier_waits_for_all_copies() -> None:
    done = rewrite(unit(1), [copies.RULE], must=True)
    assert set(re.findall(r"wait_copies<(\d)>", done.unit.source[done.unit.source.index("__global__") :])) == {"0"}
    assert race(done.unit, KERNEL) is None
    assert "keeps two barriers a step: threads write and read the same bytes" in pipelines.rewrite(unit(1))[2][0]


def test_padded_operands_are_zero_filled() -> None:
    """Sums of 27 products in steps of 8: windows and vectors of filters behind the last are zeros."""
    done = rewrite(unit(2, Conv2d.parse("n2-c3x14x14-k64x3x3-p1")), [pipelines.RULE, copies.RULE], must=True)
    text = done.unit.source[done.unit.source.index("__global__") :]
    assert "make_float4" not in text and re.search(r"copy_async<16>\(filter\w+ \+ .*, filter_ptr \+ .*, .*<", text)
