"""A convolution as one kernel whose blocks stay, and to which both filters and windows come in steps.

Two warps of a block do nothing but begin copies, one of filters, one of windows, as far ahead as there are slots that nobody reads any
more: also beyond the end of a patch. Warpgroups multiply what has landed, give slots back, and write their outputs meanwhile.
"""

from __future__ import annotations

import itertools
import math
from typing import Any, cast

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from im2win.device.gpu import Gpu
from im2win.schedules.cuda.epilogue.cluster_reduce import SharedSums
from im2win.schedules.cuda.epilogue.lane_exchange import patch_epilogue
from im2win.schedules.cuda.epilogue.output_columns import StreamedOutputs
from im2win.schedules.cuda.kernels.multistage import arguments
from im2win.schedules.cuda.kernels.persistent import MAP, ORDERS, PROMOTED
from im2win.schedules.cuda.mma.wgmma_shared_rows import StreamedProduct
from im2win.schedules.cuda.primitives import Arena, Expr, barrier, call, pointer
from im2win.schedules.cuda.tiles.persistent import KIB, LANES, PHASES
from im2win.schedules.cuda.tiles.warp_specialized import WARP, StreamedField, StreamedTile, flat
from im2win.spec.conv2d import Conv2d

OPERANDS = 48  # registers of a thread for addresses and outputs on their way
BESIDE = 26  # more registers than a product has sums must a thread begin with: else the assembler refuses it, whatever is exchanged later
LEFT = 24  # registers of those that copy
MOST = 240  # registers of those that multiply
PROCESSORS = 16  # multiprocessors that are neighbours at least: larger clusters than pairs leave some of those beyond them idle


def begins_with(tile: StreamedTile, gpu: Gpu, blocks: int) -> int:
    """Registers of any thread when its block begins, where so many share a multiprocessor: each of its four parts has as many warps."""
    return min(gpu.registers // (-(-blocks * tile.threads // LANES) * LANES) // 8 * 8, MOST)


def registers(tile: StreamedTile, gpu: Gpu, blocks: int) -> int:
    """Registers of a thread that multiplies. A block has no more to exchange than it begins with: whoever asks for more waits for ever."""
    first = begins_with(tile, gpu, blocks)
    if not tile.exchanges:
        return first
    return min((first * tile.threads - LEFT * LANES) // tile.multipliers // 8 * 8, MOST)


def needed(field: StreamedField) -> tuple[int, int]:
    """Registers of a thread that multiplies: for all its sums, and, when its block begins, for one product."""
    return field.sum_registers + OPERANDS, field.columns // 2 + BESIDE


def enough(field: StreamedField, gpu: Gpu, blocks: int) -> bool:
    """Whether so many blocks of a multiprocessor have the registers that threads need."""
    held, first = needed(field)
    return held <= registers(field.tile, gpu, blocks) and first <= begins_with(field.tile, gpu, blocks)


def resident(field: StreamedField, gpu: Gpu) -> int:
    """Thread blocks that a multiprocessor has at once."""
    tile, blocks = field.tile, 1
    while (
        (blocks + 1) * (field.shared_bytes + KIB) <= gpu.shared
        and (blocks + 1) * tile.threads <= gpu.threads
        and enough(field, gpu, blocks + 1)
    ):
        blocks += 1
    return blocks


def grid(conv: Conv2d, tile: StreamedTile, gpu: Gpu) -> int:
    """Thread blocks: no more than run at once, in whole clusters."""
    field = tile.field(conv)
    processors = gpu.multiprocessors
    if tile.cluster > 2 and processors >= PROCESSORS:
        processors -= processors % PROCESSORS
    at_once = processors * resident(field, gpu)
    work = field.patches * tile.pack(conv).blocks(conv) * tile.sum_blocks
    return max(min(work, at_once) // tile.cluster, 1) * tile.cluster


def streamed_kernel(conv: Conv2d, tile: StreamedTile, gpu: Gpu, name: str) -> Any:
    """The kernel over the tensors of `conv.arguments`."""
    with IRBuilder() as builder, T.prim_func(s_tir=False):
        T.func_name(name)
        tensors = arguments(conv, cast(Any, tile.pack(conv)))
        boxes = _Boxes(flat(conv), tile.field(conv), tensors["data"])
        blocks = grid(conv, tile, gpu)
        with T.launch_thread("blockIdx.x", blocks) as bx, T.launch_thread("threadIdx.x", tile.threads) as tid:
            _Kernel(tile.field(conv), tile.steps(conv), tensors, boxes, blocks, bx, tid).run(gpu)
    return builder.get()


class _Boxes:
    """The input as the hardware copies it: a step's part of a patch, by one box for every plane, or by one of every block of a cluster.

    Args:
        conv: the problem, `flat`.
        field: what a step brings of it.
    """

    def __init__(self, conv: Conv2d, field: StreamedField, source: Any) -> None:
        self._conv, self._tile, self._field = conv, field.tile, field
        part, tile = field.part, field.tile
        assert part is not None, "see `legality`"
        self._images, self._lines, self._pitch = part
        sizes, steps = (conv.in_channels, conv.width, conv.height, conv.batch), (1, conv.stride[1], conv.stride[0], 1)
        box = (tile.units * tile.unit, (self._pitch - 1) * steps[1] + 1, (self._lines - 1) * steps[2] + 1, self._images)
        strides = [math.prod(sizes[:axis]) * conv.itemsize for axis in (1, 2, 3)]
        self._map = tirx.Var("boxes", T.handle("tensormap").ty)
        T.Bind(T.tvm_stack_alloca("tensormap", 1), var=self._map)
        order = ORDERS[self._field.pixel_bytes]
        T.evaluate(T.call_packed(MAP, self._map, conv.dtype, 4, source.data, *sizes, *strides, *box, *steps, 0, order, PROMOTED, 0))

    def copy(self, slot: tuple[Any, Expr], patch: Expr, part: Expr, rank: Expr, landed: Expr) -> None:
        """One thread begins to copy a step of a patch to a slot (ring, which); what counts it is `landed`."""
        conv, tile, f = self._conv, self._tile, self._field
        (down, across), unit = f.counts, tile.units * tile.unit
        n, top, left = patch // (down * across) * tile.images, patch // across % down * tile.rows, patch % across * tile.cols
        y, x = top * conv.stride[0] - conv.padding[0], left * conv.stride[1] - conv.padding[1]
        if tile.boxes == "taps":
            part, tap = part // math.prod(conv.kernel), part % math.prod(conv.kernel)
            y, x = y + tap // conv.kernel[1] * conv.dilation[0], x + tap % conv.kernel[1] * conv.dilation[1]
        name = "copy_box" if tile.window_blocks == 1 else f"copy_shared<{tile.window_blocks}>"
        if self._images < tile.images:
            n = n + rank * self._images
        elif self._lines < f.lines:
            y = y + rank * (self._lines * conv.stride[0])
        elif self._pitch < f.pitch:
            x = x + rank * (self._pitch * conv.stride[1])
        call("expect_bytes", landed, f.pixels * unit * conv.itemsize)
        first = rank * (self._images * self._lines * self._pitch) if tile.window_blocks > 1 else 0
        for number, (row_, col) in enumerate(itertools.product(*map(range, f.planes))):
            to = pointer(*slot, (number * f.plane + first) * unit)
            call(name, to, T.address_of(self._map), part * unit, x + col, y + row_, n, landed)


class _Ring:
    """Slots of shared memory that pass from who fills them to who reads them, and back.

    Args:
        warps: of a block, that read a slot and give it back.
        blocks: of a cluster, that fill the slots of all.
    """

    def __init__(self, arena: Arena, name: str, shape: tuple[int, int], dtype: str, warps: int, blocks: int) -> None:
        self.slots, self._readers, self._blocks = shape[0], warps * blocks, blocks
        self.data = arena.take(name, shape, dtype)
        self._landed = arena.take(f"{name}_landed", (self.slots,), PHASES)
        self._given = arena.take(f"{name}_given", (self.slots,), PHASES)

    def start(self) -> None:
        """One thread starts the barriers."""
        with T.unroll(self.slots) as i:
            call("start_phases", pointer(self._landed, i))
            call(f"start_slot<{self._readers}>", pointer(self._given, i))

    def landed(self, step: Expr) -> Expr:
        """The barrier that counts what lands."""
        return pointer(self._landed, step % self.slots)

    def claim(self, step: Expr) -> None:
        """Until a step's slot may be filled."""
        call("wait_slot", pointer(self._given, step % self.slots), (step // self.slots + 1) % 2)

    def wait(self, step: Expr) -> None:
        """Until a step has landed."""
        call("wait_bulk", self.landed(step), step // self.slots % 2)

    def give_back(self, step: Expr) -> None:
        """A warp has read a step; it says so to the blocks that fill its slot."""
        call(f"release_slot<{self._blocks}>", pointer(self._given, step % self.slots))

    def end(self, steps: Expr) -> None:
        """Behind the last step: until no other block reaches for this one's slots any more."""
        if self._blocks > 1:
            with T.serial(self.slots) as more:
                self.claim(steps + more)


class _Kernel:
    def __init__(
        self, field: StreamedField, steps: int, tensors: dict[str, Any], boxes: _Boxes, blocks: int, block: Expr, tid: Expr
    ) -> None:
        conv, tile = field.conv, field.tile
        self._conv, self._tile, self._tensors, self._boxes, self._tid = conv, tile, tensors, boxes, tid
        self._blocks, self._block, self._field = blocks, block, field
        self._steps, self._channel_blocks = steps // tile.sum_blocks, tile.pack(conv).blocks(conv)  # steps of this block
        self._parts = math.prod(conv.kernel) // tile.taps  # copies of filters for a step
        work = self._field.patches * self._channel_blocks * tile.sum_blocks
        self._count = (work - block + blocks - 1) // blocks
        warps = LANES // WARP * tile.groups
        arena, f = Arena(self._field.shared_bytes, tile.dtype), self._field
        self._windows = _Ring(arena, "windows", f.ring, tile.dtype, warps, tile.window_blocks)
        self._filters = _Ring(arena, "filters", f.filter_ring, tile.dtype, warps, tile.filter_blocks)
        self._turns = arena.take("turns", (tile.turns,), PHASES)
        self._warps, self._rank = warps, block % tile.cluster
        self._sums = SharedSums(arena, f, tid, self._rank, again=work > blocks) if tile.sum_blocks > 1 else None

    def run(self, gpu: Gpu) -> None:
        """Emits the block."""
        tile, tid, blocks = self._tile, self._tid, resident(self._field, gpu)
        call(f"share_multiprocessor<{blocks}>")
        self._begin()
        with T.If(tid < tile.multipliers), T.Then():
            if tile.exchanges:
                call(f"take_registers<{registers(tile, gpu, blocks)}>")
            self._multiply()
        with T.If(tid >= tile.multipliers), T.Then():
            if tile.exchanges:
                call(f"give_registers<{LEFT}>")
            with T.If(tid == tile.multipliers), T.Then():
                self._copy_windows()
            with T.If(tid == tile.multipliers + WARP), T.Then():
                self._copy_filters()

    def _begin(self) -> None:
        with T.If(self._tid == 0), T.Then():
            self._windows.start()
            self._filters.start()
            if self._tile.turns > 1:
                with T.unroll(self._tile.turns) as i:
                    call(f"start_slot<{self._warps}>", pointer(self._turns, i))
            if self._sums is not None:
                self._sums.start()
        self._clear()
        if self._tile.cluster == 1:
            barrier()
        else:
            call("cluster_barrier")

    def _clear(self) -> None:
        """Zeros behind the last row of every slot, where outputs' windows end."""
        tile, f = self._tile, self._field
        chunks = max(f.reach - f.copied, 0) * tile.units
        if not chunks:
            return
        for first in range(0, tile.stages * chunks, tile.threads):
            at = first + self._tid
            with T.If(at < tile.stages * chunks), T.Then():
                call("clear_chunk", pointer(self._windows.data, at // chunks, (f.copied * tile.units + at % chunks) * tile.unit))
        call("fence_stores")
        if tile.cluster > 1:  # whose barrier says nothing of stores
            barrier()

    def _tile_of(self, turn: Expr) -> tuple[Expr, Expr]:
        """(block of channels, patch) that is a block's so-and-so-many-th: blocks of the same patch, or patches, run side by side."""
        patches = self._tile.filter_blocks  # that blocks of a cluster compute side by side
        together = patches * self._tile.sum_blocks
        work = self._block // together + turn * (self._blocks // together)
        return work % self._channel_blocks, work // self._channel_blocks * patches + self._block % patches

    def _part(self, part: Expr, many: int = 1) -> Expr:
        """A step of this block among all steps of a patch; or a part of one, of which there are so many."""
        return part if self._sums is None else self._rank * (self._steps * many) + part

    def _copy_windows(self) -> None:
        steps, ring = self._steps, self._windows
        with T.serial(self._count) as turn, T.serial(steps) as part:
            step = turn * steps + part
            ring.claim(step)
            _, patch = self._tile_of(turn)
            self._boxes.copy((ring.data, step % ring.slots), patch, self._part(part), self._rank, ring.landed(step))
        ring.end(self._count * steps)

    def _copy_filters(self) -> None:
        ring, per_tile, size, blocks = self._filters, self._steps * self._parts, self._field.filter_ring[1], self._tile.filter_blocks
        copy = "copy_bulk" if blocks == 1 else f"copy_shared<{blocks}>"
        with T.serial(self._count) as turn, T.serial(per_tile) as part:
            step = turn * per_tile + part
            ring.claim(step)
            channels, _ = self._tile_of(turn)
            place = channels * (per_tile * self._tile.sum_blocks) + self._part(part, self._parts)
            from_ = pointer(self._tensors["filter"], place * size)
            call(copy, pointer(ring.data, step % ring.slots, 0), from_, size * self._conv.itemsize, ring.landed(step))
        ring.end(self._count * per_tile)

    def _multiply(self) -> None:
        conv, tile, windows, filters = self._conv, self._tile, self._windows, self._filters
        product = StreamedProduct(conv, tile, filters.data, windows.data, self._tid)
        which = self._tid // (LANES * tile.groups)  # of those that take turns
        with T.serial((self._count - which + tile.turns - 1) // tile.turns) as round_:
            turn = round_ * tile.turns + which
            product.clear()
            self._await_turn(turn)
            with T.serial(self._steps) as part:
                step = turn * self._steps + part
                windows.wait(step)
                for number in range(self._parts):
                    copy = step * self._parts + number
                    filters.wait(copy)
                    if number == self._parts - 1:
                        self._pass_turn(turn, part)
                    product.multiply_taps(number * tile.taps, step % windows.slots, copy % filters.slots)
                    call("wait_products<1>")
                    if number:
                        filters.give_back(copy - 1)
                    else:
                        with T.If(part > 0), T.Then():
                            self._give_back(step - 1)
            product.finish()
            self._give_back(turn * self._steps + self._steps - 1)
            channels, patch = self._tile_of(turn)
            epilogue = patch_epilogue(conv, tile, self._tensors, StreamedOutputs(self._field, patch), channels * tile.block_m)
            if self._sums is None:
                epilogue.write(product)
            else:
                self._sums.write(product, epilogue, turn)
        if self._sums is not None:
            self._sums.end(self._count)

    def _give_back(self, step: Expr) -> None:
        """A step's windows, and the last of its filters, have been read."""
        self._filters.give_back(step * self._parts + self._parts - 1)
        self._windows.give_back(step)

    def _await_turn(self, turn: Expr) -> None:
        """Until those before have seen all that lands for them: a barrier knows two phases only."""
        turns = self._tile.turns
        if turns > 1:
            with T.If(turn > 0), T.Then():
                call("wait_slot", pointer(self._turns, (turn - 1) % turns), (turn - 1) // turns % 2)

    def _pass_turn(self, turn: Expr, part: Expr) -> None:
        turns = self._tile.turns
        if turns > 1:
            with T.If(part == self._steps - 1), T.Then():
                call("release_slot<1>", pointer(self._turns, turn % turns))
