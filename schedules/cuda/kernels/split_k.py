"""Split-K as two kernels: partial sums over parts of the input channels, all at the same time, and their reduction with the epilogue.

With few outputs and long sums there are too few tiles to occupy a GPU. Parts of the sum multiply their number. For the first kernel a part
is a group of channels with its own filters. It stores accumulators as they are, in float32 or int32.
"""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any, cast

from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from im2win.packing.split_k import SplitPack, parts_problem
from im2win.schedules.cuda.epilogue.requantise import store_bytes
from im2win.schedules.cuda.epilogue.store import Epilogue, finished, run_length, value_type
from im2win.schedules.cuda.kernels.multistage import (
    _pipeline,
    _product,
    arguments,
    filters_of,
    pack_of,
    shared_bytes,
    step_filters,
    thread_blocks,
)
from im2win.schedules.cuda.loaders.im2col_taps import Gather
from im2win.schedules.cuda.primitives import Arena, Expr, local, named
from im2win.schedules.cuda.tile_scheduler.split_k import inner, partial_sums
from im2win.schedules.cuda.tiles.multistage import MultistageTile
from im2win.schedules.cuda.windows import WindowSource
from im2win.spec.conv2d import Conv2d
from im2win.spec.dtypes import ELEMENT_TYPES

THREADS, VECTOR = 256, 4  # threads of a block of the reduction, and neighbouring outputs of a thread


def pack_of_parts(conv: Conv2d, tile: MultistageTile) -> SplitPack:
    """The packing of filters: that of a part's problem, part after part."""
    values = asdict(pack_of(parts_problem(conv, tile.split), inner(tile)))
    values.pop("outputs")
    return SplitPack(tile.split, **values)


class _Sums(Epilogue):
    """An epilogue that stores accumulators as they are."""

    def __init__(self, conv: Conv2d, tile: MultistageTile, tensors: dict[str, Any], operand: Any, first: Expr, group: Expr) -> None:
        self._conv, self._tile, self._tensors, self._operand = conv, tile, tensors, operand
        self._first, self._group = first, group
        self._values = local("values", (run_length(conv, tile, operand.run(conv, tile)),), tile.sum_dtype)

    def _store(self, at: Expr, channel: Expr, sums: list[Any]) -> None:
        for e, value in enumerate(sums):
            T.buffer_store(self._values, value, [e])
        width = min(len(sums), VECTOR)
        for start in range(0, len(sums), width):
            if width == 1:
                T.buffer_store(self._tensors["output"], self._values[start], [at + start])
            else:
                with T.vectorized(width) as e:
                    T.buffer_store(self._tensors["output"], self._values[start + e], [at + start + e])


def split_kernel(conv: Conv2d, tile: MultistageTile, name: str) -> Any:
    """The function of the whole convolution, over "input" and the tensors of `conv.arguments`.

    "data" is the workspace for the accumulators of all parts, a flat buffer.
    """
    with IRBuilder() as builder, T.prim_func(s_tir=False):
        T.func_name(name)
        source = named("input", T.arg("input", T.buffer(conv.input_shape, conv.dtype)))
        scratch = partial_sums(conv, tile) * 4 // conv.itemsize
        tensors = arguments(conv, cast(Any, pack_of_parts(conv, tile)), (scratch,))
        sums = named("products", T.decl_buffer((partial_sums(conv, tile),), tile.sum_dtype, data=tensors["data"].data))
        given = named("input", T.decl_buffer((math.prod(conv.input_shape),), conv.dtype, data=source.data))
        _launch_parts(parts_problem(conv, tile.split), inner(tile), {"data": given, "filter": tensors["filter"], "output": sums})
        _launch_sum(conv, tile, sums, tensors)
    return builder.get()


def _launch_parts(conv: Conv2d, tile: MultistageTile, tensors: dict[str, Any]) -> None:
    """Emits the launch of all parts, as `multistage.launch_product` but for the epilogue. `conv` is that of `parts_problem`."""
    blocks, plan = thread_blocks(conv, tile), WindowSource()
    steps = math.prod(pack_of(conv, tile).shape(conv)) // blocks[0] // step_filters(conv, tile)
    with T.launch_thread("blockIdx.x", math.prod(blocks)) as bx, T.launch_thread("threadIdx.x", tile.threads) as tid:
        per_group = blocks[0] // conv.groups
        channels, windows = bx % blocks[0], bx // blocks[0]
        group = channels // per_group
        arena = Arena(shared_bytes(conv, tile, plan), tile.dtype)
        filter_ = filters_of(tile)(tile, arena, tensors["filter"], channels, steps, step_filters(conv, tile), tid)
        operand = Gather(conv, tile, plan, arena, tensors["data"], windows, group, tid)
        product = _product(conv, tile, operand, tid, run_length(conv, tile, operand.run(conv, tile)))
        _pipeline(tile, steps, filter_, operand, product)
        _Sums(conv, tile, tensors, operand, channels % per_group * tile.block_m, group).write(product)


def _launch_sum(conv: Conv2d, tile: MultistageTile, sums: Any, tensors: dict[str, Any]) -> None:
    """Emits the launch that adds the accumulators of all parts and runs the convolution's epilogue."""
    height, width = conv.output_size
    run = conv.out_channels * (height * width if conv.layout == "NCHW" else 1)  # contiguous outputs of a part
    vector = VECTOR if run % VECTOR == 0 and (conv.layout == "NHWC" or height * width % VECTOR == 0) else 1
    count = math.prod(conv.output_shape) // vector
    with T.launch_thread("blockIdx.x", -(-count // THREADS)) as bx, T.launch_thread("threadIdx.x", THREADS) as tid:
        at = bx * THREADS + tid
        with T.If(at < count), T.Then():
            place = at * vector
            total, result = local("total", (vector,), tile.sum_dtype), local("result", (vector,), value_type(conv))
            start = place // run * (tile.split * run) + place % run
            for part in range(tile.split):
                with T.vectorized(vector) as e:
                    value = sums[start + part * run + e]
                    T.buffer_store(total, value if part == 0 else total[e] + value, [e])
            channel = place // (height * width) % conv.out_channels if conv.layout == "NCHW" else place % conv.out_channels
            for e in range(vector):
                of = channel + (e if conv.layout == "NHWC" else 0)
                T.buffer_store(result, finished(conv, tile.sum_dtype, tensors, total[e], of, place + e), [e])
            if ELEMENT_TYPES[conv.out_dtype].itemsize == 1:
                store_bytes(conv.out_dtype, tensors["output"], place, result, vector)
                return
            with T.vectorized(vector) as e:
                T.buffer_store(tensors["output"], result[e], [place + e])
