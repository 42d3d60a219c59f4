"""The rule of wide accesses: what indices show, what is refused, and that rewritten kernels stay exact and free of races."""

from __future__ import annotations

import random
import re

import numpy as np
import pytest
from emulated import Emulated, differences, expected, typed
from oracle import exact_tensors

from im2win.codegen import rewritten
from im2win.codegen.cuda import kernel_module
from im2win.device.gpu import H200
from im2win.reconstruct import ReconstructError
from im2win.reconstruct.parse.expressions import parse
from im2win.reconstruct.parse.unit import Unit, read
from im2win.reconstruct.rules import copies, pipelines, wide
from im2win.reconstruct.rules.races import race
from im2win.reconstruct.rulesets import rewrite
from im2win.reconstruct.trace.neighbours import Neighbours, Run
from im2win.reconstruct.trace.values import evaluate
from im2win.registry.schedules import schedule_of
from im2win.schedules.cuda.arithmetic import NATIVE
from im2win.schedules.cuda.scheduled.passes import PIPELINE, WARP_PIPELINE
from im2win.schedules.cuda.tiles.scheduled import ScheduledTile
from im2win.schedules.cuda.tiles.scheduled_mma import ScheduledMmaTile
from im2win.spec.conv2d import Conv2d
from im2win.spec.symbols import SYMBOL

pytestmark = pytest.mark.usefixtures("unrestored")

KERNEL = "conv2d_kernel"


# --- indices

VARIABLES = {"i": Run(4, 1, True), "t": Run(1, 0, True), "s": Run(1, 0, False)}


@pytest.mark.parametrize(
    ("expression", "multiple", "step"),
    [
        ("i", 4, 1), ("(t * 8) + i", 4, 1), ("t + i", 1, 1), ("(i * 3) + 8", 4, 3), ("i / 8", 1, 0), ("i >> 2", 1, 0),
        ("(i % 12) + 4", 4, 1), ("((t * 96) + i) / 784", 1, 0), ("((t * 96) + i) % 784", 16, 1),
        ("(i & 7) + 1", 1, 1), ("(t * 16) % 16", 0, 0),
        ("(t * 2) * (t * 6)", 12, 0), ("s * 4", 4, 0), ("i - (t * 4)", 4, 1), ("(s * 12) / 4", 3, 0), ("((int)i) + ((int64_t)4)", 4, 1),
    ],
)  # fmt: skip
def test_runs(expression: str, multiple: int, step: int) -> None:
    run = Neighbours(4, VARIABLES).run(parse(expression))
    assert run is not None and (run.multiple == multiple or run.multiple == 4) and run.step == step


@pytest.mark.parametrize(
    "expression",
    [
        "i / 6", "i % 6", "(i + 1) / 8", "(t + i) / 8", "(i - 8) / 4", "((s * 4) + i) / 4", "i * i", "i * t", "(i * 2) / 4", "i / t",
        "i & 5", "i ^ 1", "data[i]", "(i * 4) >> 2", "min(i, t)", "i ? 1 : 2",
    ],
)  # fmt: skip
def test_what_is_no_run(expression: str) -> None:
    assert Neighbours(4, VARIABLES).run(parse(expression)) is None


@pytest.mark.parametrize(
    ("condition", "same"),
    [
        ("i < 12", True), ("i < 10", False), ("4 <= i", True), ("5 <= i", False), ("i <= 11", True), ("i <= 12", False),
        ("3 < i", True), ("i > 4", False), ("i >= 8", True), ("(i + 3) < 12", False), ("t < 5", True), ("i == 4", False),
        ("(t < 5) && (i < 8)", True), ("(t < 5) || (i < 7)", False), ("!(i < 8)", True), ("i < t", False),
        ("(i / 8) < t", True), ("data[t] < 4", False), ("12 > i", True),
    ],
)  # fmt: skip
def test_conditions(condition: str, same: bool) -> None:
    assert Neighbours(4, VARIABLES).same(parse(condition)) is same


def test_runs_and_conditions_hold_for_all_values() -> None:
    """Random expressions of what TVM writes: whatever is shown is so for every value of their variables."""
    draw, shown = random.Random(7), 0

    def expression(depth: int) -> str:
        if depth == 0:
            return draw.choice(("i", "i", "t", "u", str(draw.choice((1, 3, 4, 8, 28)))))
        operator = draw.choice(("+", "+", "-", "*", "/", "%", ">>", "&"))
        other = {"/": (2, 4, 6, 8, 12, 28), "%": (4, 6, 8, 28), ">>": (1, 2, 3), "&": (3, 7, 15), "*": (1, 2, 4, 12)}.get(operator)
        return f"({expression(depth - 1)} {operator} {draw.choice(other) if other else expression(depth - 1)})"

    known = {"i": Run(4, 1, True), "t": Run(1, 0, True), "u": Run(8, 0, True)}
    groups, lanes = np.arange(0, 96, 4)[:, None, None, None], np.arange(4)
    scope = {"i": groups + lanes, "t": np.arange(7)[:, None], "u": np.arange(0, 40, 8)[:, None, None]}
    for _ in range(4000):
        text = expression(draw.randrange(1, 5))
        values = evaluate(parse(text), scope)
        assert values is not None
        values = np.broadcast_to(values, (24, 5, 7, 4))
        if (run := Neighbours(4, known).run(parse(text))) is not None:
            shown += 1
            first = values[..., :1]
            assert np.all(values == first + run.step * lanes), text
            assert np.all(first % run.multiple == 0) if run.multiple else not first.any(), text
            assert not run.nonnegative or np.all(values >= 0), text
        condition = f"({text} {draw.choice(('<', '<=', '>', '>='))} {draw.randrange(30)})"
        if Neighbours(4, known).same(parse(condition)):
            holds = np.broadcast_to(np.asarray(evaluate(parse(condition), scope)), values.shape)
            assert np.all(holds == holds[..., :1]), condition
    assert shown > 500


# --- stores


def narrow(dtype: str, block_m: int, block_n: int) -> Unit:
    """What TVM generates of a layer whose windows are copied element by element, through registers."""
    conv = Conv2d.parse(f"n2-c32x8x8-k64x3x3-p1-{dtype}")
    tile = ScheduledMmaTile(NATIVE[dtype].kind, block_m, block_n, NATIVE[dtype].slab, 16, 32, "uvc", 2, "")
    made = schedule_of("direct/scheduled").on_gpu.kernels(conv, tile, H200)
    (function,) = rewritten.functions(kernel_module({SYMBOL: made[SYMBOL]}), H200, WARP_PIPELINE)
    return function.unit


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int8"])
@pytest.mark.parametrize(
    ("block_m", "block_n"), [(16, 32), (32, 64), (64, 64), (16, 128)], ids=["1 warp", "4", "8", "4, more windows"]
)
def test_stores_of_a_thread_are_put_together(block_m: int, block_n: int, dtype: str) -> None:
    """Threads of as many windows, of some of the terms of a window each, and of several windows each."""
    done = rewrite(narrow(dtype, block_m, block_n), [pipelines.RULE, copies.RULE, wide.RULE], must=True)
    assert [match.why for match in done.matches].count(wide.WHY_STORES) == 2 and race(done.unit, KERNEL) is None
    body = done.unit.source[done.unit.source.index("__global__") :]
    assert body.count("*(uint4*)(((") == 2 and not re.search(r"buf_dyn_shmem_ptr\)\[[^;]*\] = condval", body)
    assert rewrite(done.unit, [wide.RULE]).unit == done.unit


STORES = """// launch: stores(x, y) grid 4 1 1 block 32 1 1 dynamic 0
extern "C" __global__ void __launch_bounds__(32) stores(half* __restrict__ x, half* __restrict__ y) {
  __shared__ alignas(16) half ring[1024];
  int later = (((int)threadIdx.x) * 4);
  for (int i = 0; i < 16; ++i) {
    half value;
    if (((int)threadIdx.x) < i) {
      value = x[((((int)threadIdx.x) * 16) + i)];
    } else {
      value = __float2half_rn(0.0f);
    }
    ring[((((int)threadIdx.x) * 16) + i)] = value;
  }
  __syncthreads();
  y[((int)threadIdx.x)] = ring[(((int)threadIdx.x) * 2)];
}
"""


@pytest.mark.parametrize(
    ("before", "after", "word"),
    [
        ("", "", "uint4"),
        ("(((int)threadIdx.x) * 16) + i)] = value", "(((int)threadIdx.x) * 20) + i)] = value", "uint2"),  # multiples of 8 bytes
        ("(((int)threadIdx.x) * 16) + i)] = value", "(((int)threadIdx.x) * 18) + i)] = value", "uint"),
        ("i < 16", "i < 12", "uint2"),
    ],
)
def test_the_width_is_what_indices_show(before: str, after: str, word: str) -> None:
    done = rewrite(read(STORES.replace(before, after)), [wide.RULE], must=True)
    assert f"*({word}*)(ring + (" in done.unit.source and len(done.matches) == 1


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("* 16) + i)] = value", "* 17) + i)] = value"),  # begins at odd places
        ("+ i)] = value", "+ (i * 2))] = value"),  # not neighbours
        ("i < 16", "i < 15"), ("i = 0", "i = 1"),
        ("alignas(16) half ring", "alignas(2) half ring"), ("alignas(16) half ring", "half ring"),
        ("value = x[", "value = ring["),  # reads what it stores
        ("+ i)] = value", "+ later)] = value"),  # a variable of the thread's own
        ("* 16) + i)] = value", "* 16) + ((int)x[i]))] = value"),
        ("] = value;\n  }", "] = value;\n    y[i] = value;\n  }"),  # a store that is not the last statement
        ("    half value;\n    if (((int)threadIdx.x) < i) {\n      value = x[((((int)threadIdx.x) * 16) + i)];\n    } else {\n      "
         "value = __float2half_rn(0.0f);\n    }\n", "    half value = x[i];\n"),  # the compiler joins these
    ],
)  # fmt: skip
def test_stores_that_stay(before: str, after: str) -> None:
    assert before in STORES
    plain = read(STORES.replace(before, after))
    done = rewrite(plain, [wide.RULE])
    assert done.unit == plain and not done.matches and "has no neighbouring narrow accesses" in done.notes[0]


# --- copies


def pointwise(size: int = 8) -> Unit:
    """What `pipelines` and `copies` make of a 1x1 layer of which a thread copies single elements."""
    conv = Conv2d.parse(f"n2-c32x{size}x{size}-k64x1x1")
    tile = ScheduledTile("fma", 64, 32, 8, 8, 4, "uvc", 2, 0, 4, "")
    made = schedule_of("direct/scheduled").on_gpu.kernels(conv, tile, H200)
    (function,) = rewritten.functions(kernel_module({SYMBOL: made[SYMBOL]}), H200, PIPELINE)
    return rewrite(function.unit, [pipelines.RULE, copies.RULE], must=True).unit


def test_copies_of_neighbouring_threads_are_put_together() -> None:
    plain = pointwise()
    done = rewrite(plain, [wide.RULE], must=True)
    assert [match.why for match in done.matches] == [wide.WHY_COPIES] * 2 and race(done.unit, KERNEL) is None
    body = done.unit.source[done.unit.source.index("__global__") :]
    assert "copy_async<4>" not in body and "copy_async<16>(data_reindex_shared_ptr" in body
    assert rewrite(done.unit, [wide.RULE]).unit == done.unit


def test_copies_that_stay() -> None:
    """Maps of 49 elements, of which vectors begin anywhere; an array that is not aligned; a condition that splits a vector."""
    odd = pointwise(7)
    assert rewrite(odd, [wide.RULE]).unit == odd
    plain = pointwise()
    loose = Unit(plain.source.replace("__shared__ alignas(64) float data", "__shared__ alignas(4) float data"), plain.launches)
    assert loose != plain and rewrite(loose, [wide.RULE]).unit == loose
    call = re.compile(r"(copy_async<4>\(data\w+ \+ .*, data_ptr \+ .*)\);")
    for bound, joined in (
        ("((int)threadIdx.x) < 4", True), ("((int)threadIdx.x) < 3", False), ("((int)threadIdx.y) < 3", True), ("later < 4", False),
    ):  # fmt: skip
        guarded = Unit(call.sub(rf"\1, {bound});", plain.source), plain.launches)
        assert guarded != plain and bool(rewrite(guarded, [wide.RULE]).matches) == joined


def test_a_race_refuses() -> None:
    """The proof looks at the changed kernel: with a barrier too few it is refused."""
    plain = pointwise()
    broken = Unit(plain.source.replace("__syncthreads();\n", "\n", 1), plain.launches)
    with pytest.raises(ReconstructError, match="wide: kernel conv2d_kernel cannot access shared memory in wide words: "):
        wide.rewrite(broken)


# --- kernels

LAYERS = {
    "n1-c32x8x9-k32x3x3-p1-bias-relu-float16": "halves, padding",
    "n1-c32x15x14-k64x3x3-s2-p1-bias-bfloat16": "stride",
    "n2-c32x6x6-k32x3x3-p1-int8": "bytes",
    "n1-c8x12x11-k64x3x3-p1-bias": "float32",
    "n2-c16x8x8-k32x1x1-bias-relu": "1x1",
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", ["direct/scheduled", "im2win/scheduled", "im2col/scheduled"])
@pytest.mark.parametrize("key", LAYERS, ids=LAYERS.values())
def test_kernels_stay_exact(key: str, name: str) -> None:
    conv = Conv2d.parse(key)
    schedule, kernels = schedule_of(name).on_gpu, list[tuple[str, object]]()
    for rules, stages in (("pipelines+copies+wide", 2), ("copies+wide+bounds", 1), ("pipelines+copies+wide+bounds+unroll", 3)):
        if conv.dtype == "float32":
            kernels.append((name, ScheduledTile("fma", 32, 64, 8, 4, 8, "uvc", stages, 0, 4, rules)))
        else:
            row = NATIVE[conv.dtype]
            kernels.append((name, ScheduledMmaTile(row.kind, 32, 64, row.slab, 16, 32, "uvc", stages, rules)))
    kernels = [pair for pair in kernels if not schedule.violations(conv, pair[1], H200)]
    assert kernels
    tensors = typed(conv, exact_tensors(conv))
    wrong = differences(conv, kernels, Emulated(conv, kernels)(tensors), expected(conv, tensors))
    assert not wrong, "\n".join(wrong)
