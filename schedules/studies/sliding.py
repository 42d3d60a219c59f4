"""Direct convolution as a sliding window: one thread for every output pixel, which computes one filter after the other.

There are two forms: operands from global memory, or the halo tile of a thread block's pixels from shared memory. A block is `block` x
`block` threads, threadIdx.x along a row. They are textbook kernels for comparison, and no tuner chooses them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from im2win.device.gpu import Gpu
from im2win.packing.cpu_blocked import FilterPack
from im2win.schedules.cuda.kernels import multistage as kernel
from im2win.schedules.cuda.primitives import Arena, Expr, barrier, local, padded
from im2win.spec.conv2d import Conv2d

FORMS = ("global", "shared")
MAX_THREADS = 1024  # threads of a block, on every CUDA device
MAX_GRID = 65535  # blocks along y and z
PACK = FilterPack(1)  # filters in their own order


def halo_shape(conv: Conv2d, block: int) -> tuple[int, int, int]:
    """(channels, rows, columns) of the halo tile of a block's pixels."""
    rows, cols = ((block - 1) * conv.stride[axis] + conv.window[axis] for axis in (0, 1))
    return conv.in_channels, rows, cols


def violations(conv: Conv2d, form: str, block: int, gpu: Gpu) -> list[str]:
    """Every rule that a form with this block breaks, as a message; empty if it can be launched."""
    threads, held = block * block, math.prod(halo_shape(conv, block)) * conv.itemsize if form == "shared" else 0
    plain = conv.dtype == "float32" and conv.layout == "NCHW" and conv.groups == 1
    rows = -(-conv.output_size[0] // max(block, 1))
    rules = [
        (form in FORMS, f"`form` (={form}) must be one of {', '.join(FORMS)}"),
        (plain, "sliding windows compute float32 in NCHW, without groups"),
        (conv.arguments == ("data", "filter", "output") and conv.activation == "none", "sliding windows have no epilogue"),
        (block >= 1, f"`block` (={block}) must be at least 1"),
        (threads <= MAX_THREADS, f"a block of {block}x{block} has {threads} threads; at most {MAX_THREADS} can be launched"),
        (rows <= MAX_GRID and conv.batch <= MAX_GRID, f"{rows} blocks along rows and {conv.batch} images must be at most {MAX_GRID}"),
        (held <= gpu.block_shared, f"a block of {block}x{block} takes {held} bytes of shared memory; it may have {gpu.block_shared}"),
    ]
    return [reason for kept, reason in rules if not kept]


def sliding_kernel(conv: Conv2d, form: str, block: int, name: str = "conv2d") -> Any:
    """The kernel over (data, filter, output). Filters are not packed."""
    out_h, out_w = conv.output_size
    with IRBuilder() as builder, T.prim_func(s_tir=False):
        T.func_name(name)
        tensors = kernel.arguments(conv, PACK)
        with (
            T.launch_thread("blockIdx.x", -(-out_w // block)) as bx,
            T.launch_thread("blockIdx.y", -(-out_h // block)) as by,
            T.launch_thread("blockIdx.z", conv.batch) as image,
            T.launch_thread("threadIdx.x", block) as tx,
            T.launch_thread("threadIdx.y", block) as ty,
        ):
            if form == "shared":
                pixel = _halo(conv, block, tensors["data"], image, (by, bx), (ty, tx))
            else:
                pixel = _image(conv, tensors["data"], image, (by * block + ty, bx * block + tx))
            row, col = by * block + ty, bx * block + tx
            inside = [at < size for at, size in ((row, out_h), (col, out_w)) if size % block]
            if inside:
                with T.If(tirx.all(*inside)), T.Then():
                    _filters(conv, tensors, image, row, col, pixel)
            else:
                _filters(conv, tensors, image, row, col, pixel)
    return builder.get()


Pixel = Callable[[Expr, Expr, Expr], Expr]
"""(input channel, kernel row, kernel column) -> what the thread's window has there, zero in the padding."""


def _filters(conv: Conv2d, tensors: dict[str, Any], image: Expr, row: Expr, col: Expr, pixel: Pixel) -> None:
    """Emits the outputs of every filter at one pixel."""
    (out_h, out_w), (rows, cols) = conv.output_size, conv.kernel
    total = local("total", (1,), "float32")
    with T.serial(conv.out_channels) as j:
        T.buffer_store(total, tirx.const(0, "float32"), [0])
        with T.serial(conv.in_channels) as c, T.serial(rows) as u, T.serial(cols) as v:
            weight = tensors["filter"][((j * conv.in_channels + c) * rows + u) * cols + v]
            T.buffer_store(total, total[0] + pixel(c, u, v) * weight, [0])
        T.buffer_store(tensors["output"], total[0], [((image * conv.out_channels + j) * out_h + row) * out_w + col])


def _input(conv: Conv2d, data: Any, image: Expr, c: Expr, y: Expr, x: Expr) -> Expr:
    """Element of the input at row y and column x."""
    return data[((image * conv.in_channels + c) * conv.height + y) * conv.width + x]


def _or_zero(conv: Conv2d, y: Expr, x: Expr, value: Expr) -> Expr:
    """An element of the input; zero outside."""
    return T.if_then_else(tirx.all(y >= 0, y < conv.height, x >= 0, x < conv.width), value, tirx.const(0, "float32"))


def _image(conv: Conv2d, data: Any, image: Expr, output: tuple[Expr, Expr]) -> Pixel:
    """The thread's window in global memory."""
    top, left = (output[axis] * conv.stride[axis] - conv.padding[axis] for axis in (0, 1))

    def pixel(c: Expr, u: Expr, v: Expr) -> Expr:
        y, x = top + u * conv.dilation[0], left + v * conv.dilation[1]
        value = _input(conv, data, image, c, y, x)
        return _or_zero(conv, y, x, value) if any(conv.padding) else value

    return pixel


def _halo(conv: Conv2d, block: int, data: Any, image: Expr, where: tuple[Expr, Expr], thread: tuple[Expr, Expr]) -> Pixel:
    """The thread's window in the block's halo tile, which all threads load to shared memory row by row, neighbours by neighbours."""
    channels, rows, cols = shape = halo_shape(conv, block)
    halo = Arena(padded(shape, "float32"), "float32").take("halo", shape, "float32")
    top, left = (where[axis] * (block * conv.stride[axis]) - conv.padding[axis] for axis in (0, 1))
    with T.serial(channels) as c, T.serial(-(-rows // block)) as i, T.serial(-(-cols // block)) as k:
        y, x = i * block + thread[0], k * block + thread[1]
        with T.If(tirx.all(y < rows, x < cols)), T.Then():
            value = _input(conv, data, image, c, top + y, left + x)
            T.buffer_store(halo, _or_zero(conv, top + y, left + x, value), [c, y, x])  # the last block's reaches beyond the input
    barrier()
    first = [thread[axis] * conv.stride[axis] for axis in (0, 1)]
    return lambda c, u, v: halo[c, first[0] + u * conv.dilation[0], first[1] + v * conv.dilation[1]]
