"""Kernels drawn at random: what the argument about indices takes away, no order of threads on the emulator misses."""

from __future__ import annotations

import random

import numpy as np
from fusable import together

from im2win.emulator import Emulation, Launch
from im2win.reconstruct.parse.unit import Kernel, Unit
from im2win.reconstruct.rules.barriers import barrier_verdicts, weakened
from im2win.reconstruct.trace.footprints import Ledger
from im2win.reconstruct.trace.trace import Trace

THREADS, SIZE, KERNELS, SEEDS = 96, 96, 32, range(5)
T = "((int)threadIdx.x)"

# Places of a thread: its own, permuted within its warp, across warps, and with a loop's variable.
PLACES = (
    T, T, f"({T} ^ 1)", f"({T} ^ 31)", f"((({T} >> 5) * 32) + (31 - ({T} & 31)))", f"((({T} >> 5) * 32) + (({T} + i) & 31))",
    f"(({T} + 32) % {SIZE})", f"({SIZE - 1} - {T})", f"(({T} + (i * 32)) % {SIZE})",
)  # fmt: skip
BARRIER = "    __syncthreads();\n"


def drawn(draw: random.Random) -> Unit:
    """A loop of loads, stores and barriers on two shared arrays; every value that is read ends in the output."""
    lines = []
    for _ in range(draw.randint(3, 6)):
        array, place, other = draw.choice("st"), draw.choice(PLACES), draw.choice(PLACES)
        kind = draw.random()
        if kind < 0.35:
            lines.append(f"    {array}[{place}] = (x[{T}] + ((float)i));\n")
        elif kind < 0.5:
            lines.append(f"    if ({T} < {draw.choice((32, 64, 50))}) {{\n      {array}[{place}] = x[{other}];\n    }}\n")
        else:
            lines.append(f"    sum[0] = ((sum[0] * 2.0f) + {array}[{place}]);\n")
        if draw.random() < 0.7:
            lines.append(BARRIER)
    body = (
        f"  __shared__ alignas(64) float s[{SIZE}];\n  __shared__ alignas(64) float t[{SIZE}];\n"
        "  alignas(64) float sum[1];\n  sum[0] = 0.0f;\n"
        f"  s[{T}] = x[{T}];\n  t[{T}] = x[({SIZE - 1} - {T})];\n  __syncthreads();\n"
        f"  for (int i = 0; i < 3; ++i) {{\n{''.join(lines)}{BARRIER}  }}\n  y[{T}] = sum[0];\n"
    )
    parameters = "float* __restrict__ x, float* __restrict__ y"
    source = f'#include <cuda.h>\nextern "C" __global__ void __launch_bounds__({THREADS}) k({parameters}) {{\n{body}}}\n'
    return Unit(source, (Launch("k", ("x", "y"), (1, 1, 1), (THREADS, 1, 1)),))


def racy(kernel: Kernel) -> bool:
    """Whether threads meet already with all barriers in place."""
    ledger = Ledger(Trace(kernel, {"s", "t"}), THREADS)
    return any(touched.conflicts(1).any() for epoch in ledger.epochs for touched in epoch.touched.values())


def test_what_goes_is_missed_by_no_order() -> None:
    draw, units = random.Random(0), list[Unit]()
    while len(units) < KERNELS:
        unit = drawn(draw)
        if not racy(unit.kernel("k")):
            units.append(unit)
    outcomes = [verdict.outcome for unit in units for verdict in barrier_verdicts(unit.kernel("k"))]
    counts = {outcome: outcomes.count(outcome) for outcome in ("needed", "warp", "none")}
    assert sum(counts.values()) == len(outcomes) and min(counts.values()) > 6, counts
    whole = together([*units, *(weakened(unit)[0] for unit in units)])
    emulation = Emulation(whole.source, whole.launches)
    x = np.random.default_rng(0).integers(-99, 100, THREADS).astype(np.float32)
    for seed in SEEDS:
        outputs = {f"y_{i}": np.full(THREADS, np.nan, np.float32) for i in range(2 * KERNELS)}
        emulation({**{f"x_{i}": x for i in range(2 * KERNELS)}, **outputs}, seed)
        for i, unit in enumerate(units):
            assert np.array_equal(outputs[f"y_{i}"], outputs[f"y_{i + KERNELS}"]), f"seed {seed}:\n{unit.source}"
