"""Rules that change what a compiler makes of a kernel, not what the kernel does: bounds of launches, and unrolled pipelines."""

from __future__ import annotations

from dataclasses import replace

import pytest
from emulated import Emulated, differences, expected, typed
from oracle import exact_tensors
from pipelined import KERNEL, changed, unit

from im2win.codegen.cuda import generate_source
from im2win.device.gpu import H200
from im2win.reconstruct import ReconstructError
from im2win.reconstruct.parse.unit import Unit, read
from im2win.reconstruct.rules import bounds, copies, pipelines, unroll
from im2win.reconstruct.rules.bounds import Multiprocessor
from im2win.reconstruct.rulesets import Settings, rewrite
from im2win.registry.cuda_lowering import lower
from im2win.registry.schedules import schedule_of
from im2win.schedules.cuda.tiles.scheduled import ScheduledTile
from im2win.spec.conv2d import Conv2d

pytestmark = pytest.mark.usefixtures("unrestored")

SMALL = """// launch: sums(x) grid 4 1 1 block 128 1 1 dynamic {dynamic}
extern "C" __global__ void __launch_bounds__({bounds}) sums(float* __restrict__ x) {{
  float sums[{count}];
  float operands[8];
  __shared__ alignas(16) float ring[{ring}];
  ring[((int)threadIdx.x)] = x[((int)threadIdx.x)];
}}
"""


def small(bounds: str = "128", count: int = 96, ring: int = 128, dynamic: int = 0) -> Unit:
    return read(SMALL.format(bounds=bounds, count=count, ring=ring, dynamic=dynamic))


@pytest.mark.parametrize(
    ("changes", "blocks"),
    [
        ({"count": 32}, 5), ({"count": 64}, 4), ({}, 3), ({"count": 120}, 2), ({"count": 32, "ring": 12000}, 4), ({"dynamic": 100_000}, 2),
    ],
)  # fmt: skip
def test_bounds_state_what_fits_a_multiprocessor(changes: dict[str, int], blocks: int) -> None:
    """96 sums and 64 others are 160 registers: 3 blocks of 128 threads of 65536. A block takes 1 KiB more than its shared memory."""
    done = rewrite(small(**changes), [bounds.RULE], must=True)  # type: ignore[arg-type]
    [match] = done.matches
    assert (match.before, match.after) == ("128", f"128, {blocks}")
    kernel = done.unit.kernel("sums")
    assert (kernel.bounds, kernel.resident) == (128, blocks)
    assert rewrite(done.unit, [bounds.RULE]).unit == done.unit


def test_bounds_that_say_nothing_stay() -> None:
    """One block at a time, bounds that are stated, bounds of other threads than are launched, and kernels without shared memory."""
    assert bounds.registers(small(count=96).kernel("sums")) == 160 and bounds.registers(small(count=1000).kernel("sums")) == bounds.MOST
    few = Settings(sizes=Multiprocessor(threads=128))
    for plain, settings in ((small(), few), (small("128, 1"), None), (small("256"), None)):
        assert rewrite(plain, [bounds.RULE], settings).unit == plain
    without = changed(small(), "  __shared__ alignas(16) float ring[128];\n", "  float ring[128];\n")
    assert rewrite(without, [bounds.RULE]).notes == ["bounds: kernel sums keeps its bounds"]
    with pytest.raises(ReconstructError, match="bounds changes nothing: bounds: kernel sums keeps its bounds"):
        rewrite(without, [bounds.RULE], must=True)


@pytest.mark.parametrize("first", [[], [pipelines.RULE], [pipelines.RULE, copies.RULE]], ids="+".join)
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_pipelines_are_unrolled_by_their_rings(stages: int, first: list[str]) -> None:
    plain = rewrite(unit(stages), first).unit
    done = rewrite(plain, [unroll.RULE], must=True)
    assert [match.after.strip() for match in done.matches] == [f"#pragma unroll {stages}"]
    assert done.unit.source.replace(done.matches[0].after, "") == plain.source
    loop = pipelines.pipeline_of(done.unit.kernel(KERNEL))
    assert loop is not None and done.unit.source[: loop.span[0]].rstrip().endswith(f"#pragma unroll {stages}")
    assert rewrite(done.unit, [unroll.RULE]).unit == done.unit


def test_what_is_no_ring_is_not_unrolled() -> None:
    plain = unit(2)
    loop = pipelines.pipeline_of(plain.kernel(KERNEL))
    assert loop is not None
    odd = changed(plain, f"({loop.name} & 1)", f"(({loop.name} * {loop.name}) & 1)", 1 << 20)
    done = rewrite(odd, [unroll.RULE])
    assert done.unit == odd and "stays as it is: line" in done.notes[0] and "beyond a ring of buffers" in done.notes[0]
    assert "has no pipeline" in rewrite(unit(1), [unroll.RULE]).notes[0] and "has no pipeline" in rewrite(small(), [unroll.RULE]).notes[0]
    long = changed(plain, f"({loop.name} & 1)", f"({loop.name} & 7)", 1 << 20)
    assert rewrite(long, [unroll.RULE]).unit == long


@pytest.mark.sampled(1)
@pytest.mark.parametrize("rules", ["bounds", "pipelines+copies+bounds+unroll"])
def test_kernels_stay_exact(rules: str) -> None:
    """The numbers reach the source that is compiled, and the emulated kernel is exact."""
    conv, name = Conv2d.parse("n2-c8x9x11-k32x3x3-p1-bias-relu"), "im2win/scheduled"
    tile = ScheduledTile("fma", 32, 32, 8, 4, 4, "uvc", 3, 0, 4, rules)
    source = generate_source(lower(conv, schedule_of(name), tile, H200), H200).source
    assert "__launch_bounds__(64, 12) conv2d_kernel_1(" in source and source.count("#pragma unroll 3") == rules.count("unroll")
    assert "__launch_bounds__(64, 12)" not in generate_source(lower(conv, schedule_of(name), replace(tile, rules=""), H200), H200).source
    tensors = typed(conv, exact_tensors(conv))
    wrong = differences(conv, [(name, tile)], Emulated(conv, [(name, tile)])(tensors), expected(conv, tensors))
    assert not wrong, "\n".join(wrong)
