"""Moves that the CPU schedules share."""

from __future__ import annotations

from collections.abc import Sequence

from tvm.s_tir import Schedule
from tvm.s_tir.schedule import LoopRV

from im2win.compute import nest
from im2win.schedules.cpu.transpose import transpose_intrin
from im2win.spec.conv2d import Conv2d


def unroll(sch: Schedule, *loops: LoopRV) -> None:
    """Unrolls each loop."""
    for loop in loops:
        sch.unroll(loop)


def write_transposed(sch: Schedule, conv: Conv2d, shape: tuple[int, int], channel: LoopRV, windows: Sequence[LoopRV]) -> None:
    """Writes rows of [window][channel] back as NCHW, transposed by shuffles. A residual is added to the transposed rows.

    shape: (output rows, lanes) of a transpose; its windows are whole output rows.
    channel: loop over the output's channels in a vector; windows: its loops over rows and columns inside.
    """
    rows, lanes = shape
    intrin = transpose_intrin(rows, conv.output_size[1], lanes)
    if not conv.residual:
        sch.tensorize(channel, intrin)
        return
    sch.tensorize(sch.get_loops(sch.get_sblock(nest.TRANSPOSED))[-3], intrin)
    _, lane = sch.split(sch.fuse(*windows), [None, lanes])
    sch.vectorize(lane)
