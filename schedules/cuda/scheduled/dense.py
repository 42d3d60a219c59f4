"""Dense layers on GPUs as a TVM schedule: thread blocks, steps in shared memory, outer products in registers.

One schedule for every algorithm, over the definition that the CPU's schedules use (`gemm`):

    [threads: store the tensor of windows, where the algorithm has one]            # a kernel of its own
    thread block (channels, outputs), thread (channels, outputs):
        sums = 0                                                                   # registers
        for step of the sum:
            filters, windows = those of a later step                               # to a ring of buffers in shared memory
            for k in step: sums += filters[k, channels] * windows[k, outputs]      # unrolled
        out = act(sums + bias)

TVM inserts barriers and makes the pipeline. The reconstructor then removes the barrier that it need not have, and makes copies asynchronous
(`reconstruct.rules.pipelines`, `copies`), as the tile says.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tvm import te
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import LoopRV, SBlockRV

from im2win.packing.cpu_blocked import FilterPack
from im2win.schedules.cuda.legality.scheduled import along_terms
from im2win.schedules.cuda.scheduled.gemm import Gemm, Stage, gemm
from im2win.schedules.cuda.tiles.scheduled import ScheduledTile
from im2win.spec.conv2d import Conv2d

TRANSFORM_THREADS, TRANSFORM_EACH = 256, 4  # threads of a block that stores a tensor of windows; elements of a thread
VECTOR = 4  # elements of a vector of filters, 16 bytes
VECTORS = (2, 4)  # elements of vectors of outputs
SPARE = 4  # elements between rows of windows in shared memory that lanes write down the columns of


def pack_of(conv: Conv2d, tile: ScheduledTile) -> FilterPack:
    """The packing of filters: a step's of a block are contiguous."""
    return FilterPack(tile.block_m, tile.order)  # type: ignore[arg-type]


def kernel(conv: Conv2d, tensors: Sequence[te.Tensor], stage: Stage, tile: ScheduledTile) -> Any:
    """The scheduled kernels of a definition: one function over the tensors of `conv.arguments`."""
    form = gemm(conv, tensors, stage, (tile.block_m, tile.block_n, tile.block_k))
    if form.stage is not None:
        store_windows(form.sch, form.stage)
    thread, step = _product(form, tile)
    _operands(form, conv, tile, step)
    form.sch.reverse_compute_at(form.out, thread, preserve_unit_loops=True)
    _write(form, conv, tile)
    form.sch.decompose_reduction(form.product, step)
    if tile.stages > 1:
        form.sch.annotate(step, "software_pipeline_stage", [0, 0, tile.stages - 1])
        form.sch.annotate(step, "software_pipeline_order", [0, 1, 2])
    return form.sch.mod["main"]


def transform(tensors: Sequence[te.Tensor], name: str) -> Any:
    """The function (data, lowered) of the transform alone, to measure its time."""
    data, lowered = tensors[0], _tensor(tensors[-1], name)
    sch = Schedule(te.create_prim_func([data, lowered]))
    store_windows(sch, sch.get_sblock(name))
    return sch.mod["main"]


def _tensor(out: te.Tensor, name: str) -> te.Tensor:
    """The tensor of that name among those that an output is computed from."""
    found, seen = [out], set[str]()
    while found:
        tensor = found.pop()
        if tensor.op.name == name:
            return tensor
        seen.add(tensor.op.name)
        found += [one for one in tensor.op.input_tensors if one.op.name not in seen]
    raise ValueError(f"the definition has no tensor {name!r}.")


def store_windows(sch: Schedule, stage: SBlockRV) -> None:
    """Neighbouring threads store neighbouring elements of a tensor of windows; a thread has several loads on their way."""
    blocks, each, threads = sch.split(sch.fuse(*sch.get_loops(stage)), [None, TRANSFORM_EACH, TRANSFORM_THREADS])
    sch.bind(blocks, "blockIdx.x")
    sch.bind(threads, "threadIdx.x")
    sch.unroll(each)


def _product(form: Gemm, tile: ScheduledTile) -> tuple[LoopRV, LoopRV]:
    """Tiles the product. Returns the innermost loop of threads, and that of the steps."""
    sch, (down, across), (rows, cols) = form.sch, tile.strips, tile.layout
    blocks, channel, output, depth = sch.get_loops(form.product)
    channel_strip, row, channel = sch.split(channel, [down, rows, tile.thread_m // down])
    output_blocks, output_strip, col, output = sch.split(output, [None, across, cols, tile.thread_n // across])
    step, depth = sch.split(depth, [None, tile.block_k])
    sch.reorder(blocks, output_blocks, channel_strip, output_strip, row, col, step, depth, channel, output)
    axes = ("blockIdx.y", "blockIdx.x", "vthread.y", "vthread.x", "threadIdx.y", "threadIdx.x")
    for loop, axis in zip((blocks, output_blocks, channel_strip, output_strip, row, col), axes, strict=True):
        sch.bind(loop, axis)
    for loop in (depth, channel, output):
        sch.unroll(loop)
    sch.set_scope(form.product, 0, "local")
    return col, step


def _write(form: Gemm, conv: Conv2d, tile: ScheduledTile) -> None:
    """Stores a thread's outputs: neighbours in memory as vectors, where they begin at multiples of a vector."""
    sch, (channel, output) = form.sch, form.sch.get_loops(form.out)[-2:]
    if conv.layout == "NHWC":
        sch.reorder(output, channel)
        sch.unroll(output)
        wide = tile.thread_m // tile.strips[0] in VECTORS and conv.out_channels % (tile.thread_m // tile.strips[0]) == 0
        (sch.vectorize if wide else sch.unroll)(channel)
        return
    sch.unroll(channel)
    wide = tile.strip in VECTORS and math.prod(conv.output_size) % tile.strip == 0
    (sch.vectorize if wide else sch.unroll)(output)


def _operands(form: Gemm, conv: Conv2d, tile: ScheduledTile, step: LoopRV) -> None:
    """Copies a step's operands to shared memory, neighbouring threads from neighbouring places."""
    sch = form.sch
    for block, count, width in (
        (form.windows, tile.block_n * tile.block_k, 1), (form.filters, tile.block_m * tile.block_k, VECTOR),
    ):  # fmt: skip
        sch.set_scope(block, 0, "shared")
        sch.compute_at(block, step, preserve_unit_loops=True)
        loops = sch.get_loops(block)[-2:]
        if block is form.windows and along_terms(conv, tile.order):
            sch.reorder(*reversed(loops))
            loops.reverse()
            sch.storage_align(block, 0, -2, 32, SPARE)
        if block is form.windows and tile.lanes:
            depth, steps = sch.split(loops[0], [None, tile.threads // tile.lanes])
            output, lane = sch.split(loops[1], [None, tile.lanes])
            sch.reorder(depth, output, steps, lane)
            _bind(sch, tile, [depth, output], sch.fuse(steps, lane), 1)
        else:
            _bind(sch, tile, [], sch.fuse(*loops), width if count % (tile.threads * width) == 0 else 1)


def _bind(sch: Schedule, tile: ScheduledTile, others: list[LoopRV], loop: LoopRV, width: int) -> None:
    """Shares a loop out among the threads of a block, `width` neighbouring elements at a time, and unrolls the others."""
    rest, row, col, lane = sch.split(loop, [None, *tile.layout, width])
    sch.bind(row, "threadIdx.y")
    sch.bind(col, "threadIdx.x")
    for other in (*others, rest):
        sch.unroll(other)
    if width > 1:
        sch.vectorize(lane)
