"""Depthwise layers on CPUs: a sum over a kernel's taps, in vectors of channels or of windows, without a broadcast of inputs.

    parallel (channel pass, n, block of output rows)
        for channel block in pass
            pad = padded input rows                    # level-1 cache, in the order of the vectors
            for row tile, column tile in the block of output rows
                sums = 0                               # registers
                for u, v: sums += filter[u, v, :] * pad
                out = act(sums + bias)                 # or the same by way of a buffer of rows
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tvm
from tvm import te, tirx
from tvm.s_tir import SBlock, SBlockRealize, Schedule
from tvm.s_tir.schedule import LoopRV, SBlockRV

from im2win.compute import depthwise, nest
from im2win.schedules.cpu.transpose import transpose_intrin
from im2win.schedules.cpu_depthwise.tile import DepthwiseTile
from im2win.schedules.cpu_winograd.transpose import into_intrin
from im2win.spec.conv2d import Conv2d

MOST_TAPS = 12  # columns of a kernel that are unrolled


def define(conv: Conv2d, tile: DepthwiseTile) -> list[te.Tensor]:
    """The definition that a tile schedules."""
    if tile.stage == "none":
        return depthwise.unstaged(conv, tile.pack)
    if tile.axis == "windows":
        return depthwise.windows(conv, tile.pack, tile.row_block, tile.lanes)
    return depthwise.channels(conv, tile.pack, tile.row_block)


def holds_back(conv: Conv2d, tile: DepthwiseTile) -> bool:
    """Whether output rows are buffered: where vectors of the product are not vectors of the output."""
    if tile.axis == "windows":
        return conv.output_size[1] % tile.lanes > 0
    return conv.layout == "NCHW" or conv.out_channels % tile.block > 0


def schedule(conv: Conv2d, tile: DepthwiseTile) -> Schedule:
    """Schedules a definition of `compute.depthwise` with a legal tile."""
    sch = Schedule(te.create_prim_func(define(conv, tile)), enable_check=False)
    block, channel, windows = _output_loops(sch, conv, tile)
    if tile.stage == "none":
        _unstaged(sch, conv, tile, block, channel, windows)
        return sch
    held = holds_back(conv, tile)
    if conv.residual and not _turns_back(conv, tile):
        sch.compute_inline(sch.get_sblock(nest.TRANSPOSED))
    elif conv.residual:
        sch.compute_at(sch.get_sblock(nest.TRANSPOSED), channel[0], preserve_unit_loops=True)
    if held:
        sch.compute_at(sch.get_sblock(nest.ROWS), block, preserve_unit_loops=True)
    else:
        sch.compute_inline(sch.get_sblock(nest.ROWS))
    sch.compute_at(sch.get_sblock(nest.CONV), block, preserve_unit_loops=True)
    _stage(sch, conv, tile, block)
    if held:
        row, col, ji = sch.get_loops(sch.get_sblock(nest.ROWS))[-3:]
        _register_tile(sch, conv, tile, row, col, ji)
        _write_back(sch, conv, tile, channel, windows)
    else:
        _register_tile(sch, conv, tile, *windows, *channel)
    return sch


def _unstaged(sch: Schedule, conv: Conv2d, tile: DepthwiseTile, block: LoopRV, channel: list[LoopRV], windows: list[LoopRV]) -> None:
    """Register tiles in the order of the input in memory: all channel blocks of a tile's columns before the next columns."""
    if conv.residual:
        sch.compute_inline(sch.get_sblock(nest.TRANSPOSED))
    sch.compute_inline(sch.get_sblock(nest.ROWS))
    row, col = windows
    row_tile, row = sch.split(row, [None, tile.rows])
    col_tile, col = sch.split(col, [None, tile.cols])
    sch.reorder(row_tile, col_tile, block, row, col, *channel)
    _unroll(sch, row, col, channel[0])
    sch.vectorize(channel[1])
    product = sch.get_sblock(nest.CONV)
    sch.compute_at(product, block, preserve_unit_loops=True)
    sch.set_scope(product, 0, "local")
    _sum(sch, product, conv, tile)


def _turns_back(conv: Conv2d, tile: DepthwiseTile) -> bool:
    """Whether shuffles transpose buffered rows of [window][channel] to the output."""
    return tile.axis == "channels" and conv.layout == "NCHW" and conv.out_channels % tile.block == 0


def _output_loops(sch: Schedule, conv: Conv2d, tile: DepthwiseTile) -> tuple[LoopRV, list[LoopRV], list[LoopRV]]:
    """Splits the output into parallel steps; returns (channel block of the pass, channel loops inside it, [row, column])."""
    loops = sch.get_loops(sch.get_sblock(nest.OUT))
    n, j, m, x = loops if conv.layout == "NCHW" else (loops[0], loops[3], loops[1], loops[2])
    inside = [tile.vectors, tile.lanes] if tile.axis == "channels" else [1]
    passes, block, *channel = sch.split(j, [None, tile.pass_blocks, *inside])
    row_blocks, row = sch.split(m, [None, tile.row_block])
    order = [*channel, row, x] if conv.layout == "NCHW" else [row, x, *channel]
    sch.reorder(passes, n, row_blocks, block, *order)
    sch.parallel(sch.fuse(passes, n, row_blocks))
    return block, channel, [row, x]


def staged(conv: Conv2d, tile: DepthwiseTile) -> bool:
    """Whether a parallel step copies the input that it reads."""
    whole = conv.out_channels % tile.block == 0 and conv.out_channels == conv.groups and conv.output_size[0] % tile.row_block == 0
    return tile.axis == "windows" or conv.layout == "NCHW" or any(conv.padding) or not whole


def _stage(sch: Schedule, conv: Conv2d, tile: DepthwiseTile, block: LoopRV) -> None:
    """Copies the padded input rows of a channel block into the order of the vectors."""
    pad = sch.get_sblock(depthwise.PAD)
    if not staged(conv, tile):
        sch.compute_inline(pad)
        return
    sch.compute_at(pad, block, preserve_unit_loops=True)
    if tile.axis == "windows":
        return
    plain = conv.out_channels == conv.groups and conv.out_channels % tile.block == 0
    row, _, channel = sch.get_loops(pad)[-3:]
    if plain or conv.layout == "NCHW":
        vector, lane = sch.split(channel, [None, tile.lanes])
        sch.unroll(vector)
        sch.vectorize(lane)
    if conv.layout == "NCHW":
        turned = sch.get_sblock(depthwise.TURNED)
        sch.compute_at(turned, row, preserve_unit_loops=True)
        if plain and conv.width > 1:
            col, channel = sch.get_loops(turned)[-2:]
            if tile.vectors > 1:
                vector, lane = sch.split(channel, [None, tile.lanes])
                sch.reorder(vector, col, lane)
            sch.tensorize(col, into_intrin(conv.width, tile.lanes))


def _register_tile(sch: Schedule, conv: Conv2d, tile: DepthwiseTile, row: LoopRV, col: LoopRV, *channel: LoopRV) -> None:
    """Tiles the loops that consume the sums, over a buffer or over the output, and computes the sums of each register tile."""
    row_tile, row = sch.split(row, [None, tile.rows])
    if tile.axis == "channels":
        vector, lane = channel if len(channel) == 2 else sch.split(channel[0], [None, tile.lanes])
        col_tile, col = sch.split(col, [None, tile.cols])
        sch.reorder(row_tile, col_tile, row, col, vector, lane)
        _unroll(sch, row, col, vector)
    else:
        col_tile, vector, lane = sch.split(col, [None, tile.vectors, tile.lanes])
        sch.reorder(row_tile, col_tile, row, *channel, vector, lane)
        _unroll(sch, row, *channel, vector)
    sch.vectorize(lane)
    product = sch.get_sblock(nest.CONV)
    sch.compute_at(product, col_tile, preserve_unit_loops=True)
    sch.set_scope(product, 0, "local")
    _sum(sch, product, conv, tile)


def _sum(sch: Schedule, product: SBlockRV, conv: Conv2d, tile: DepthwiseTile) -> None:
    """The sums of a register tile, unrolled but for one loop over taps.

    Inside, neighbouring windows share inputs, which LLVM loads once: columns of a row with axis "channels", rows with axis "windows",
    where a vector at another column is another load.
    """
    row, col, channel, u, v = sch.get_loops(product)[-5:]
    if tile.axis == "channels":
        vector, lane = sch.split(channel, [None, tile.lanes])
        taps, held = [u, v], [row, col, vector, lane]
    else:
        vector, lane = sch.split(col, [None, tile.lanes])
        taps, held = [v, u], [row, channel, vector, lane]
    sch.reorder(*taps, *held)
    if int(sch.get(taps[1]).extent) <= MOST_TAPS:
        sch.unroll(taps[1])
    _unroll(sch, *held[:3])
    sch.vectorize(lane)
    *zeros, lane = sch.get_loops(sch.decompose_reduction(product, taps[0]))[-4:]
    _unroll(sch, *zeros)
    sch.vectorize(lane)


def _write_back(sch: Schedule, conv: Conv2d, tile: DepthwiseTile, channel: list[LoopRV], windows: list[LoopRV]) -> None:
    """Writes buffered rows to the output: transposed by shuffles, or as rows that LLVM vectorizes, with masks where they end."""
    if not _turns_back(conv, tile):
        return
    rows, line = sch.get_sblock(nest.ROWS), conv.output_size[1]
    sch.transform_layout(rows, ("write", 0), lambda n, jo, m, x, ji: (n, jo, m * line + x, ji))
    intrin = transpose_intrin(tile.row_block, line, tile.lanes)
    if not conv.residual:
        sch.tensorize(channel[1], intrin)
        return
    sch.tensorize(sch.get_loops(sch.get_sblock(nest.TRANSPOSED))[-3], intrin)
    _, lane = sch.split(sch.fuse(*windows), [None, tile.lanes])
    sch.vectorize(lane)


def _unroll(sch: Schedule, *loops: Any) -> None:
    for loop in loops:
        sch.unroll(loop)


def mark(conv: Conv2d, stmt: Any, outer: tuple[Any, ...] = ()) -> tuple[Any, Any]:
    """Prepares conditions for the loops that they are cut out of.

    A condition that does not depend on the parallel step is marked as likely: LoopPartition cuts the loops inside a step where it holds.
    These are the ends of a row: the last register tile, and the zeros beside the input. A parallel loop is never cut, since its parts would
    run one after the other. Of the product's conditions, those on input rows move out of all loops that do not change the row.

    outer: variables that depend on the parallel step.

    Returns:
        (the statement, a condition under which it runs, for the innermost loop around it that the condition depends on; None for no such).
    """
    if isinstance(stmt, SBlockRealize):
        return _marked_block(conv, stmt, outer)
    if isinstance(stmt, tirx.For):
        inner = (*outer, stmt.loop_var) if stmt.kind == tirx.ForKind.PARALLEL else outer
        body, condition = mark(conv, stmt.body, inner)
        if condition is not None and _uses(condition, [stmt.loop_var]):
            body, condition = tirx.IfThenElse(condition, body, None), None
        return tirx.For(stmt.loop_var, stmt.min, stmt.extent, stmt.kind, body, stmt.thread_binding, stmt.annotations), condition
    if isinstance(stmt, tirx.SeqStmt):
        return tirx.SeqStmt([_closed(mark(conv, child, outer)) for child in stmt.seq]), None
    if isinstance(stmt, tirx.BufferStore):
        return tirx.BufferStore(stmt.buffer, _marked_value(stmt.value, lambda condition: _likely(condition, outer)), stmt.indices), None
    return stmt, None


def _closed(marked: tuple[Any, Any]) -> Any:
    stmt, condition = marked
    return stmt if condition is None else tirx.IfThenElse(condition, stmt, None)


def _marked_block(conv: Conv2d, stmt: Any, outer: tuple[Any, ...]) -> tuple[Any, Any]:
    old = stmt.block
    bound = [iterator.var for iterator, value in zip(old.iter_vars, stmt.iter_values, strict=True) if _uses(value, outer)]
    inside, condition = (old.init, old.alloc_buffers, old.match_buffers, old.annotations), None
    if old.name_hint == f"{nest.CONV}_update":
        rows = [old.iter_vars[2].var, old.iter_vars[5].var]
        row = stmt.iter_values[2] * conv.stride[0] + stmt.iter_values[5] * conv.dilation[0] - conv.padding[0]
        body = tirx.BufferStore(
            old.body.buffer, _marked_value(old.body.value, lambda asked: _likely(_without(asked, rows), ())), old.body.indices
        )
        if any(conv.padding[::2]):
            condition = tirx.And(row >= 0, row < conv.height)
    else:
        body = _closed(mark(conv, old.body, (*outer, *bound)))
    block = SBlock(old.iter_vars, old.reads, old.writes, old.name_hint, body, *inside)
    return SBlockRealize(stmt.iter_values, _likely(stmt.predicate, outer), block), condition


def _marked_value(value: Any, change: Callable[[Any], Any]) -> Any:
    """An expression with the conditions of its `if_then_else` changed, which stand alone or are a factor of a summand."""
    if isinstance(value, (tirx.Add, tirx.Mul)):
        return type(value)(_marked_value(value.a, change), _marked_value(value.b, change))
    if isinstance(value, tvm.ir.Call) and value.op.name == "tirx.if_then_else":
        condition, then, other = value.args
        changed = change(condition)
        return then if isinstance(changed, tirx.IntImm) and changed.value else tirx.if_then_else(changed, then, other)
    return value


def _without(condition: Any, variables: Sequence[Any]) -> Any:
    """A condition without its parts that use any of the variables."""
    if isinstance(condition, tirx.And):
        left, right = _without(condition.a, variables), _without(condition.b, variables)
        return right if isinstance(left, tirx.IntImm) else left if isinstance(right, tirx.IntImm) else tirx.And(left, right)
    return tirx.const(True, "bool") if _uses(condition, variables) else condition


def _likely(condition: Any, outer: Sequence[Any]) -> Any:
    if isinstance(condition, tirx.And):
        return tirx.And(_likely(condition.a, outer), _likely(condition.b, outer))
    return condition if isinstance(condition, tirx.IntImm) or _uses(condition, outer) else tirx.likely(condition)


def _uses(expression: Any, variables: Sequence[Any]) -> bool:
    return any(used.same_as(variable) for used in tirx.analysis.undefined_vars(expression) for variable in variables)


def module(conv: Conv2d, tile: DepthwiseTile, name: str) -> tvm.IRModule:
    """A module to compile, with one function `name`, whose loops end without conditions inside."""
    function = schedule(conv, tile).mod["main"].with_attr("global_symbol", name)
    return tvm.IRModule({name: function.with_body(_closed(mark(conv, function.body)))})
