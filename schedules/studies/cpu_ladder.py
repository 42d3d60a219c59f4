"""The CPU ladder of the im2win thesis (Lu 2023, section 3.2; arXiv 2306.14320): one im2win convolution, one more scheduling step a rung.

Every rung schedules the definition in compute/im2win.py with the im2win tensor stored, so that rungs differ in nothing but these steps:

    plain                   Alg. 4: seven loops as they are written, scalar, one thread
    reordered               Alg. 5: output channels outermost; the accumulators of a row stay in cache while input channels pass
    unrolled                Alg. 5: the innermost loop is unrolled
    vectorized              Alg. 5: a vector takes `lanes` neighbours of a window's contiguous run
    register_blocked        Alg. 6: tiles of neighbouring windows, which share the filter's vectors
    cache_blocked           Alg. 6: blocks of output channels, which share the windows' vectors
    blocked                 Alg. 6: output-channel blocks in parallel threads
    production              schedules/cpu/kernel.py with the tile of an untuned layer

A dot product over a window ends with a horizontal sum of a vector for every output. The production schedule has none: its vectors hold
outputs, not terms of one output.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tvm import te
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import LoopRV, SBlockRV

from im2win.compute import nest
from im2win.compute.im2win import IM2WIN
from im2win.device.cpu import Machine
from im2win.packing.cpu_blocked import FilterPack
from im2win.spec.conv2d import Conv2d


@dataclass(frozen=True)
class Rung:
    """The scheduling steps that are on. Each can be switched by itself, but register and cache blocks need `reorder`.

    reorder, unroll, vector, parallel: see the functions below.
    windows: output columns of a register tile, W_ob of Alg. 6.
    channels: most output channels of a cache block, C_ob of Alg. 6.
    production: schedules/cpu/kernel.py instead of all these steps.
    """

    title: str
    source: str
    reorder: bool = False
    unroll: bool = False
    vector: bool = False
    windows: int = 1
    channels: int = 1
    parallel: bool = False
    production: bool = False

    def __post_init__(self) -> None:
        for name in ("windows", "channels"):
            size = getattr(self, name)
            if size < 1:
                raise ValueError(f"`{name}` (={size}) must be at least 1.")
            if size > 1 and not self.reorder:
                raise ValueError(f"`{name}` (={size}) above 1 needs `reorder`: tiles lie inside the loop over input channels.")


WINDOWS, CHANNELS = 4, 8

RUNGS: dict[str, Rung] = {
    "plain": Rung("seven loops", "thesis Alg. 4"),
    "reordered": Rung("loops reordered", "thesis Alg. 5", reorder=True),
    "unrolled": Rung("innermost loop unrolled", "thesis Alg. 5", reorder=True, unroll=True),
    "vectorized": Rung("windows in vectors", "thesis Alg. 5", reorder=True, unroll=True, vector=True),
    "register_blocked": Rung("register tile", "thesis Alg. 6", reorder=True, unroll=True, vector=True, windows=WINDOWS),
    "cache_blocked": Rung("channel block", "thesis Alg. 6", reorder=True, unroll=True, vector=True, windows=WINDOWS, channels=CHANNELS),
    "blocked": Rung(
        "parallel", "thesis Alg. 6", reorder=True, unroll=True, vector=True, windows=WINDOWS, channels=CHANNELS, parallel=True
    ),
    "production": Rung("outputs in vectors", "schedules/cpu/kernel.py", parallel=True, production=True),
}


def pack(conv: Conv2d, rung: Rung, machine: Machine) -> FilterPack:
    """The packing of filters for a rung of the thesis: output channels one by one, each in the order of the rung's loops."""
    return FilterPack(1, "cvu" if rung.reorder or rung.vector else "cuv")


def lanes(conv: Conv2d, machine: Machine) -> int:
    """Lanes of a vector along a window: the machine's, or fewer (a power of two) where the window's run is shorter; 1 for a 1x1 filter."""
    return min(machine.lanes, 1 << (math.prod(conv.kernel).bit_length() - 1))


def schedule(conv: Conv2d, arguments: Sequence[te.Tensor], rung: Rung, machine: Machine) -> Schedule:
    """Schedules the definition of compute/im2win.py, made with `pack(conv, rung, machine)`, by a rung of the thesis, for any problem.

    Raises:
        ValueError: the rung is `production`, which schedules/cpu/kernel.py implements.
    """
    if rung.production:
        raise ValueError(f"the rung {rung.title!r} is scheduled by schedules/cpu/kernel.py.")
    sch = Schedule(te.create_prim_func(list(arguments)))
    sch.compute_inline(sch.get_sblock(nest.ROWS))
    if conv.residual:
        sch.compute_inline(sch.get_sblock(nest.TRANSPOSED))
    width = lanes(conv, machine) if rung.vector else 1
    loops = _vectorize(sch, width) if width > 1 else _plain(sch)
    if rung.reorder:
        _reorder(loops)
    if rung.channels > 1:
        _cache_block(sch, loops, conv, rung.channels)
    if rung.windows > 1:
        _register_tile(sch, loops, conv, rung.windows, machine)
    if rung.unroll:
        _unroll(sch, loops)
    sch.reorder(*(loops.of[name] for name in loops.outer + loops.inner))
    _way_out(sch, loops)
    if rung.parallel:
        _parallel(sch, loops)
    zero = sch.decompose_reduction(loops.sums, loops.of[loops.inner[0]])
    if "lane" in loops.of:
        sch.vectorize(sch.get_loops(zero)[-1])
    return sch


@dataclass
class Loops:
    """The product's loops by name, and the order that they will have.

    `outer` loops run over outputs; inside them the accumulators of the `inner` loops start at zero. Names are the thesis': n image, j
    output channel, m row, x column, c input channel. `step` is the innermost loop over terms.
    """

    sums: SBlockRV
    of: dict[str, LoopRV]
    outer: list[str]
    inner: list[str]


def _plain(sch: Schedule) -> Loops:
    """Alg. 4, in its own order.

    for n, j, m, x:
        for c, u, v:
            O[n, j, m, x] += W[n, c, m, (x*s + v)*Hf + u] * F[j, c, u, v]
    """
    sums = sch.get_sblock(nest.CONV)
    n, j, m, x, _, c, tap, step = sch.get_loops(sums)
    of = {"n": n, "j": j, "m": m, "x": x, "c": c, "tap": tap, "step": step}
    return Loops(sums, of, ["n", "j", "m", "x"], ["c", "tap", "step"])


def _vectorize(sch: Schedule, width: int) -> Loops:
    """DOT_PRODUCT of Alg. 5: vectors along a window's contiguous run. Each lane sums its own terms; the first lanes take the rest.

    before                                     after
        for v, u:                                  for q in ceil(Wf*Hf / L):
            O += W[x*s*Hf + v*Hf + u] * F[v, u]        for l in L vectorized:
                                                           if q*L + l < Wf*Hf: S[l] += W[x*s*Hf + q*L + l] * F[q*L + l]
                                                   for l in L: O += S[l]
    """
    v, u = sch.get_loops(sch.get_sblock(nest.CONV))[-2:]
    _, lane = sch.split(sch.fuse(v, u), [None, width])
    sums = sch.rfactor(lane, factor_axis=5)
    n, j, m, x, _, c, step, lane = sch.get_loops(sums)
    sch.vectorize(lane)
    of = {"n": n, "j": j, "m": m, "x": x, "c": c, "step": step, "lane": lane}
    return Loops(sums, of, ["n", "j", "m", "x"], ["c", "step", "lane"])


def _reorder(loops: Loops) -> None:
    """Reorders loops: output channels outermost, input channels outside the output columns.

    The accumulators of an output row stay in cache while lines of the im2win tensor stream through, each read from one end to the other.

    before (Alg. 4)                after (Alg. 5)
        for n, j, m, x:                for j, n, m:
            for c, u, v:                   for c, x, v, u:
                O[x] += W * F                  O[x] += W * F
    """
    loops.outer = ["j", "n", "m"]
    loops.inner = ["c", "x", *loops.inner[1:]]


def _cache_block(sch: Schedule, loops: Loops, conv: Conv2d, most: int) -> None:
    """Cache block: C_ob output channels use a window while it is in cache. C_ob is the largest divisor of a group's channels up to `most`.

    before                         after (Alg. 6)
        for j, n, m:                   for jj in Co / C_ob, n, m:
            for c, x, v, u:                for c, x, v:
                O[x] += W * F[j]               for j' in C_ob, u: O[j', x] += W * F[j']
    """
    share = conv.out_channels // conv.groups
    block = max(size for size in range(1, most + 1) if share % size == 0)
    loops.of["j"], loops.of["channel"] = sch.split(loops.of["j"], [None, block])
    loops.inner.insert(loops.inner.index("step"), "channel")


def _register_tile(sch: Schedule, loops: Loops, conv: Conv2d, most: int, machine: Machine) -> None:
    """Register tile: W_ob neighbouring windows use a filter's vector that is loaded once.

    The W_fb steps of these windows that one pass over channels multiplies stay in registers: in at most half of the registers (eq. 3-2).

    before                         after (Alg. 6)
        for c, x:                      for c, xx in Wo / W_ob, vv in Q / W_fb:
            for q in Q:                    for j' in C_ob, q in W_fb:
                O[x] += W[x, q] * F[q]         for x' in W_ob unrolled: O[x'] += W[x', q] * F[q]
    """
    loops.of["x"], loops.of["window"] = sch.split(loops.of["x"], [None, min(most, conv.output_size[1])])
    sch.unroll(loops.of["window"])
    loops.inner.insert(loops.inner.index("step") + 1, "window")
    steps = max(machine.registers // 2 // most, 1)
    if int(sch.get(loops.of["step"]).extent) > steps:
        loops.of["steps"], loops.of["step"] = sch.split(loops.of["step"], [None, steps])
        loops.inner.insert(loops.inner.index("x") + 1, "steps")


def _unroll(sch: Schedule, loops: Loops) -> None:
    """Unrolls the innermost loop over terms.

    before                         after
        for u in 3:                    O += W[0] * F[0]
            O += W[u] * F[u]           O += W[1] * F[1]
                                       O += W[2] * F[2]
    """
    sch.unroll(loops.of["step"])


def _way_out(sch: Schedule, loops: Loops) -> None:
    """Computes the epilogue (bias, residual, activation) as soon as the accumulators of a row are complete, after their horizontal sum.

    before                         after
        for n, j, m, x:                for n, j, m:
            for c, u, v: O += ...          for x: for c, u, v: S[x] += ...
        for n, j, m, x:                    for x: out = act(S[x] + bias)
            out = act(O + bias)
    """
    home = loops.of[loops.outer[-1]]
    total, out = sch.get_sblock(nest.CONV), sch.get_sblock(nest.OUT)
    if "lane" in loops.of:
        sch.reverse_compute_at(total, home, preserve_unit_loops=True)
    sch.reverse_compute_at(out, home, preserve_unit_loops=True)
    if "lane" in loops.of:
        sch.compute_at(total, sch.get_loops(out)[-1], preserve_unit_loops=True)
        sch.set_scope(total, 0, "local")
        sch.unroll(sch.get_loops(total)[-6])
    if home is loops.of["x"]:
        sch.set_scope(loops.sums, 0, "local")


def _parallel(sch: Schedule, loops: Loops) -> None:
    """Runs the outermost loop, over output channels once loops are reordered, and the lines of the transform in parallel.

    before                         after
        for n, c, m:                   for n*c*m in parallel:
            W[n, c, m, :] = ...            W[n, c, m, :] = ...
        for jj in Co / C_ob: ...       for jj in Co / C_ob in parallel: ...
    """
    sch.parallel(sch.fuse(*sch.get_loops(sch.get_sblock(IM2WIN))[:-1]))
    sch.parallel(loops.of[loops.outer[0]])
