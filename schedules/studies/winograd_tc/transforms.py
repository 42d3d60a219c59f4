"""The input and output transforms of Winograd on tensor cores, in float16 and int8."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import tirx
from tvm.tirx.script import builder as T

from im2win.numerics.matvec_program import Program, program
from im2win.numerics.winograd_int8 import LARGEST, STEP
from im2win.numerics.winograd_matrices import transform
from im2win.packing.winograd_int8 import QuantisedPack
from im2win.schedules.cuda.epilogue.store import activated
from im2win.schedules.cuda.primitives import Expr, local, named
from im2win.schedules.studies.winograd_tc.tile import THREADS, WARP, WORD, Sizes
from im2win.spec.conv2d import Conv2d
from im2win.spec.dtypes import ELEMENT_TYPES

NEAR = 4  # neighbouring tiles of a warp in the input transform, channels first


def _run(steps: Program, given: list[Expr], dtype: str) -> list[Expr]:
    """Emits the product of a matrix and a vector in float32, or in int32 for a matrix of integers. Registers with the result."""
    values = local("steps", (max(len(steps.steps), 1),), dtype)
    known = list(given)
    for place, step in enumerate(steps.steps):
        factor, right = step.factor, known[step.right]
        assert dtype == "float32" or factor.denominator == 1, f"{factor} is no integer"
        term = right if abs(factor) == 1 else right * tirx.const(float(abs(factor)), dtype)
        if step.left is not None:
            term = known[step.left] + term if factor > 0 else known[step.left] - term
        elif factor < 0:
            term = tirx.const(0, dtype) - term
        T.buffer_store(values, term, [place])
        known.append(values[place])
    return [known[place] for place in steps.outputs]


def both_ways(steps: Program, given: Any, name: str, dtype: str = "float32") -> Any:
    """Registers with matrix * given * matrix^T."""
    rows = len(steps.outputs)
    half = local(f"{name}_half", (rows, steps.inputs), dtype)
    whole = local(name, (rows, rows), dtype)
    with T.unroll(steps.inputs) as j:
        for i, value in enumerate(_run(steps, [given[i, j] for i in range(steps.inputs)], dtype)):
            T.buffer_store(half, value, [i, j])
    with T.unroll(rows) as i:
        for j, value in enumerate(_run(steps, [half[i, j] for j in range(steps.inputs)], dtype)):
            T.buffer_store(whole, value, [i, j])
    return whole


def each(count: int, threads: int, thread: Expr, body: Callable[[Expr], None]) -> None:
    """Calls body(number) for `count` numbers; neighbouring threads have neighbouring numbers."""
    with T.serial(-(-count // threads)) as turn:
        at = turn * threads + thread
        if count % threads:
            with T.If(at < count), T.Then():
                body(at)
        else:
            body(at)


def quantised(value: Expr) -> Expr:
    """An int32 in units of STEP, rounded to nearest even."""
    bits = STEP.bit_length() - 1
    odd = T.bitwise_and(T.shift_right(value, bits), 1)
    return T.shift_right(value + (STEP // 2 - 1) + odd, bits)


def _stored(value: Expr, dtype: str) -> Expr:
    """A transformed input as operand of products: int8 is in units of STEP, at most LARGEST."""
    return T.min(quantised(value), LARGEST).astype("int8") if dtype == "int8" else value.astype(dtype)


def launch_input_transform(sizes: Sizes, data: Any, out: Any) -> None:
    """Emits the launch of the input transform, which computes V.

    A thread block computes a block of tiles with all its channels, in the shape that the products have if both are fused.
    """
    conv, tile = sizes.conv, sizes.tile
    m, t, depth = tile.outputs, tile.size, sizes.depth
    (rows, cols), (top, left, _, _) = sizes.counts, conv.padding
    warps = THREADS // WARP if tile.fusion == "none" else tile.warps
    dtype = ELEMENT_TYPES[conv.dtype].sums  # exact for int8, nearly exact for float16
    width = WORD // conv.itemsize  # channels that a thread loads at once
    if conv.layout == "NCHW" or conv.in_channels % width:
        width = 1
    steps = program(transform(m, conv.kernel[0]).bt)
    threads = ("threadIdx.x", WARP), ("threadIdx.y", warps)
    with T.launch_thread("blockIdx.x", sizes.blocks) as bx, T.launch_thread(*threads[0]) as lane, T.launch_thread(*threads[1]) as warp:

        def some(at: Expr) -> None:
            place, c = _tile_and_channel(sizes, at, width)
            number = bx * tile.block_m + place
            n, y, x = number // (rows * cols), number // cols % rows * m - top, number % cols * m - left
            loaded, made = (local(name, (t, t, width), conv.dtype) for name in ("loaded", "made"))
            near_n, near_c = T.min(n, conv.batch - 1), T.min(c, conv.in_channels - width)
            with T.unroll(t) as i, T.unroll(t) as j, T.vectorized(width) as e:
                near_h, near_w = T.max(T.min(y + i, conv.height - 1), 0), T.max(T.min(x + j, conv.width - 1), 0)
                near = (near_n, near_c + e, near_h, near_w) if conv.layout == "NCHW" else (near_n, near_h, near_w, near_c + e)
                T.buffer_store(loaded, data[near], [i, j, e])
            for channel in range(width):
                given = local("given", (t, t), dtype)
                with T.unroll(t) as i, T.unroll(t) as j:
                    h, w = y + i, x + j
                    inside = tirx.all(n < conv.batch, c < conv.in_channels, h >= 0, h < conv.height, w >= 0, w < conv.width)
                    T.buffer_store(given, T.if_then_else(inside, loaded[i, j, channel].astype(dtype), tirx.const(0, dtype)), [i, j])
                found = both_ways(steps, given, "transformed", dtype)
                with T.unroll(t) as i, T.unroll(t) as j:
                    T.buffer_store(made, _stored(found[i, j], conv.dtype), [i, j, channel])
            with T.unroll(t) as i, T.unroll(t) as j, T.vectorized(width) as e:
                at_v = ((bx * tile.positions + i * t + j) * tile.block_m + place) * sizes.pitch + c
                T.buffer_store(out, made[i, j, e], [at_v + e])

        each(tile.block_m * depth // width, WARP * warps, warp * WARP + lane, some)


def _tile_and_channel(sizes: Sizes, at: Expr, width: int) -> tuple[Expr, Expr]:
    """(tile of the block, first of its channels) of the at-th part of a transform: neighbouring threads read neighbouring inputs.

    Channels first, a warp has NEAR tiles of eight channels: it reads as many 32-byte sectors as that, and writes half as many.
    """
    if sizes.conv.layout == "NHWC":
        parts = sizes.depth // width
        return at // parts, at % parts * width
    channels, rows = WARP // NEAR, sizes.tile.block_m
    return at % NEAR + at // WARP % (rows // NEAR) * NEAR, at // NEAR % channels + at // (channels * rows) * channels


def launch_output_transform(sizes: Sizes, products: Any, tensors: dict[str, Any]) -> None:
    """Emits the launch of the output transform: outputs with bias, residual and activation, one tile of one channel a thread.

    Neighbouring threads have neighbouring channels in NHWC, neighbouring tiles in NCHW.
    """
    conv, tile = sizes.conv, sizes.tile
    m, t, channels = tile.outputs, tile.size, conv.out_channels
    (rows, cols), (out_h, out_w) = sizes.counts, conv.output_size
    steps, count = program(transform(m, conv.kernel[0]).at), sizes.tiles * channels
    pack, (down, right) = tile.pack(conv), sizes.product_strides
    scale = scales_of(pack, conv, tensors["filter"]) if isinstance(pack, QuantisedPack) else None
    between = "float32" if scale is None else "int32"
    with T.launch_thread("blockIdx.x", -(-count // THREADS)) as bx, T.launch_thread("threadIdx.x", THREADS) as thread:
        at = bx * THREADS + thread
        with T.If(at < count), T.Then():
            if conv.layout == "NHWC":
                k, number = at % channels, at // channels
            else:
                k = at // (rows * cols) % channels
                number = at // (rows * cols * channels) * (rows * cols) + at % (rows * cols)
            n, y, x = number // (rows * cols), number // cols % rows * m, number % cols * m
            block = (number // tile.block_m * sizes.filter_blocks + k // tile.block_n) * tile.positions
            inner = number % tile.block_m * down + k % tile.block_n * right
            given = local("given", (t, t), between)
            with T.unroll(t) as i, T.unroll(t) as j:
                T.buffer_store(given, products[(block + i * t + j) * (tile.block_m * tile.block_n) + inner], [i, j])
            found = both_ways(steps, given, "outputs", between)
            with T.unroll(m) as i, T.unroll(m) as j, T.If(tirx.all(y + i < out_h, x + j < out_w)), T.Then():
                if conv.layout == "NCHW":
                    to = ((n * channels + k) * out_h + y + i) * out_w + x + j
                else:
                    to = ((n * out_h + y + i) * out_w + x + j) * channels + k
                value = found[i, j] if scale is None else rounded(found[i, j], scale(k))
                if conv.bias:
                    value = value + tensors["bias"][k].astype(between)
                if conv.residual:
                    value = value + tensors["residual"][to].astype(between)
                T.buffer_store(tensors["output"], activated(conv.activation, value, between).astype(conv.out_dtype), [to])


def rounded(value: Expr, scale: Expr) -> Expr:
    """An int8 output: an accumulator of quantised products times its scale, rounded to nearest even."""
    return T.nearbyint(value.astype("float32") * scale).astype("int32")


def scales_of(pack: QuantisedPack, conv: Conv2d, filters: Any) -> Callable[[Expr], Expr]:
    """A function of the output channel: the scale of its accumulators, stored behind the filters of its block."""
    (blocks, size), values = pack.shape(conv), pack.values(conv)
    scales = named("filter", T.decl_buffer((blocks * size // 4,), "float32", data=filters.data))  # launches need one name for a tensor
    return lambda k: scales[k // pack.block * (size // 4) + values // 4 + k % pack.block]
