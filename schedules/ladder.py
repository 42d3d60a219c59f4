"""The thesis' CPU ladder (section 3.2): the same im2win convolution, one schedule move after another.

Every rung is a schedule of the definition in compute/im2win.py with the im2win tensor stored, so that rungs differ in nothing but the moves:

    plain                   Alg. 4: seven loops as they are written, scalar, one thread
    reordered               Alg. 5: channels outermost; a row of sums stays near while input channels pass
    unrolled                Alg. 5: the innermost loop is straight code
    vectorized              Alg. 5: a vector takes `lanes` neighbours of a window's contiguous run
    register_blocked        Alg. 6: tiles of neighbouring windows, which share the filter's vectors
    cache_blocked           Alg. 6: blocks of output channels, which share the windows' vectors
    blocked                 Alg. 6: one thread a block of output channels
    production              schedules/cpu.py with the tile of an untuned layer

A dot product over a window needs the sum of a vector's lanes at its end, once an output. The production schedule has none: its vectors hold
outputs, not terms of one.
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
from im2win.machine import Machine
from im2win.packing import FilterPack
from im2win.problem import Conv2d
from im2win.ranking import default_tile
from im2win.schedules import cpu
from im2win.schedules.tile import Tile


@dataclass(frozen=True)
class Rung:
    """The moves that are on; each can be switched by itself, but tiles of windows and blocks of channels need `reorder`.

    reorder, unroll, vector, parallel: see the functions below.
    windows: output columns of a register tile, W_ob of Alg. 6.
    channels: most output channels of a cache block, C_ob of Alg. 6.
    production: schedules/cpu.py instead of all these moves.
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
            if getattr(self, name) < 1:
                raise ValueError(f"Rung: `{name}` (={getattr(self, name)}) must be at least 1.")
            if getattr(self, name) > 1 and not self.reorder:
                raise ValueError(f"Rung: `{name}` (={getattr(self, name)}) above 1 needs `reorder`: tiles lie inside the loop over input channels.")


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
    "production": Rung("outputs in vectors", "schedules/cpu.py", parallel=True, production=True),
}


def pack(conv: Conv2d, rung: Rung, machine: Machine) -> FilterPack:
    """How the rung reads filters: output channels one by one, each in the order of the rung's loops."""
    return _tile(conv, machine).pack if rung.production else FilterPack(1, "cvu" if rung.reorder or rung.vector else "cuv")


def lanes(conv: Conv2d, machine: Machine) -> int:
    """Lanes of a vector along a window: the machine's, or fewer (a power of two) where the window's run is shorter; 1 for a 1x1 filter."""
    return min(machine.lanes, 1 << (math.prod(conv.kernel).bit_length() - 1))


def schedule(conv: Conv2d, arguments: Sequence[te.Tensor], rung: Rung, machine: Machine) -> Schedule:
    """Schedules the definition of compute/im2win.py, made with `pack(conv, rung, machine)`, for any problem."""
    if rung.production:
        return cpu.schedule(conv, arguments, _tile(conv, machine), cpu.Plan(IM2WIN, "root"))
    sch = Schedule(te.create_prim_func(list(arguments)))
    sch.compute_inline(sch.get_sblock(nest.ROWS))
    if conv.residual:
        sch.compute_inline(sch.get_sblock(nest.TURNED))
    width = lanes(conv, machine) if rung.vector else 1
    sums = _vectors_of_sums(sch, width) if width > 1 else None
    step, row, column = _order(sch, conv, rung)
    if sums is None:
        sums = sch.get_sblock(nest.CONV)
    else:
        _add_lanes(sch, column)
    sch.compute_at(sums, row if rung.reorder else column, preserve_unit_loops=True)
    if rung.parallel:
        _spread(sch, step)
    _dot_product(sch, sums, conv, rung, width, machine)
    return sch


def _tile(conv: Conv2d, machine: Machine) -> Tile:
    return default_tile(conv, "im2win", machine)[1]


def _order(sch: Schedule, conv: Conv2d, rung: Rung) -> tuple[LoopRV, LoopRV, LoopRV]:
    """`reorder`, `channels`: the loops over outputs; returns the outermost, the row's and the innermost.

    The sums of a row (of every channel of the block) stay in the first cache while the input channels r pass, so that the im2win tensor is
    read line by line and a window is loaded near its neighbours. Blocks of channels read a window once for all their filters.

    before (Alg. 4)            reorder (Alg. 5)           and channels (Alg. 6)
        for i, j, m, n             for j, i, m                for jj, i, m
            for r, u, v                for r, n, v, u             for r, n
                O += W * F                 O += W * F                 for j' in C_ob: for v, u
                                                                          O += W * F
    """
    loops = sch.get_loops(sch.get_sblock(nest.OUT))
    n, j, m, x = loops if conv.layout == "NCHW" else (loops[0], loops[3], loops[1], loops[2])
    if not rung.reorder:
        sch.reorder(n, j, m, x)
        return n, m, x
    # the largest block that needs no rest and stays inside a group
    block = max(size for size in range(1, rung.channels + 1) if (conv.out_channels // conv.groups) % size == 0)
    blocks, channel = sch.split(j, [None, block])
    sch.reorder(blocks, n, m, channel, x)
    return blocks, m, x


def _vectors_of_sums(sch: Schedule, width: int) -> SBlockRV:
    """`vector`: DOT_PRODUCT of Alg. 5. The window is one run, so it is cut into vectors; each lane sums its own terms (rfactor).

    Returns the block of vector sums; the terms beyond the last whole vector go to its first lanes.

    before                                     after
        for r, v in Wf, u in Hf:                   for r, q in ceil(Wf*Hf / L):
            O += W[x*s*Hf + v*Hf + u] * F[...]         for l in L vectorized:
                                                           if q*L + l < Wf*Hf: S[l] += W[x*s*Hf + q*L + l] * F[...]
                                                   for l in L: O += S[l]
    """
    v, u = sch.get_loops(sch.get_sblock(nest.CONV))[-2:]
    _, lane = sch.split(sch.fuse(v, u), [None, width])
    return sch.rfactor(lane, 5)


def _add_lanes(sch: Schedule, column: LoopRV) -> None:
    """The sum over a vector's lanes, in a register, where the output leaves."""
    total = sch.get_sblock(nest.CONV)
    sch.compute_at(total, column, preserve_unit_loops=True)
    sch.set_scope(total, 0, "local")
    sch.unroll(sch.get_loops(total)[-6])


def _dot_product(sch: Schedule, sums: SBlockRV, conv: Conv2d, rung: Rung, width: int, machine: Machine) -> None:
    """`unroll`, `windows`: the loops over terms, W_ob windows side by side, so that a filter's vector is loaded once for all of them.

    The tile's windows stay in registers while the channels of the block pass: W_ob times the steps unrolled are at most half of them.

    before                        unroll                          and windows (Alg. 6)
        for r, n:                     for r, n:                       for r, nn, qq:
            for q in Q:                   O += W[0] * F[0]                for j': for q in Q_b unrolled: for n' in W_ob unrolled
                O += W[q] * F[q]          O += W[1] * F[1] ...                O[n'] += W[n', q] * F[q]
    """
    if width > 1:
        lane, _, channel, _, column, _, c, *taps = sch.get_loops(sums)[-8:]
    else:
        _, channel, _, column, _, c, *taps = sch.get_loops(sums)[-8:]
    taps[-1:] = _step(sch, taps[-1], rung, machine)
    tile, window = sch.split(column, [None, min(rung.windows, conv.output_size[1])])
    vector = [lane] if width > 1 else []
    sch.reorder(c, tile, *taps[:-1], channel, taps[-1], window, *vector)
    if rung.unroll:
        sch.unroll(taps[-1])
        sch.unroll(window)
    if width > 1:
        sch.vectorize(lane)
    start = sch.decompose_reduction(sums, c)
    if width > 1:
        sch.vectorize(sch.get_loops(start)[-1])
    if not rung.reorder:
        sch.set_scope(sums, 0, "local")


def _step(sch: Schedule, tap: LoopRV, rung: Rung, machine: Machine) -> list[LoopRV]:
    """The innermost loop over terms, cut where a register tile would hold too many windows."""
    most = machine.registers // 2 // rung.windows
    if rung.windows == 1 or int(sch.get(tap).extent) <= most:
        return [tap]
    return list(sch.split(tap, [None, max(most, 1)]))


def _spread(sch: Schedule, step: LoopRV) -> None:
    """`parallel`: the outermost loop, which is the channels' once `reorder` is on, and the rows of the transform, on all threads.

    before                                     after
        for n, c, m: W[n, c, m, :] = ...           for n*c*m in parallel: W[n, c, m, :] = ...
        for jj in Co / C_ob: ...                   for jj in Co / C_ob in parallel: ...
    """
    sch.parallel(sch.fuse(*sch.get_loops(sch.get_sblock(IM2WIN))[:-1]))
    sch.parallel(step)
