"""Tensor intrinsics of TVM schedules on NVIDIA GPUs: `mma.sync` and `ldmatrix` of a warp, for float16, bfloat16 and int8.

TVM's own are m16n8k8 for float16, and use pointers whose offsets its software pipeline does not follow (apache/tvm #19742). These multiply
16 rows by 16 columns, with 32 bytes of the sum of each (m16n8k16 or m16n8k32, twice), and pass addresses of elements, which every pass of
TVM follows. What they do is stated as TIR below, and `Schedule.tensorize` compares it with the loops that they replace.

Operands and sums of a warp are buffers of scope "warp", [..., 32 lanes, elements of a lane]. A word has 4 bytes, W elements:

    operands [16 lines, 8*W elements of the sum]    lane 4*(line % 8) + word % 4, its words in the order (word // 4, line // 8) for rows,
                                                    (line // 8, word // 4) for columns
    sums [16 rows, 16 columns]                      lane 4*(row % 8) + column % 8 // 2, in the order (column // 8, row // 8, column % 2)
"""

from __future__ import annotations

import functools
from typing import Any

from tvm.s_tir import TensorIntrin
from tvm.script import tirx as T
from tvm.tirx import call_pure_extern, register_intrin_lowering

from im2win.compute.rounding import NEAREST, SCALED
from im2win.schedules.cuda.arithmetic import MULTIPLIERS
from im2win.schedules.cuda.primitives import WORD
from im2win.spec.dtypes import ELEMENT_TYPES

LANES = 32
LINES = 16  # rows, and columns, of a product
STEP_BYTES = 32  # of the sum, in every line of a product
SUMS = LINES * LINES // LANES  # of a lane

Index = Any
Place = tuple[Index, Index]
"""(lane, element of the lane)"""

register_intrin_lowering(SCALED, target="cuda", f=lambda call: call_pure_extern(call.ty.dtype, "im2win::scaled", *call.args))
register_intrin_lowering(NEAREST, target="cuda", f=lambda call: call_pure_extern(call.ty.dtype, "__float2int_rn", *call.args))


def step(dtype: str) -> int:
    """Elements of the sum that a product takes."""
    return STEP_BYTES // ELEMENT_TYPES[dtype].itemsize


def sum_place(row: Index, column: Index) -> Place:
    """Where the sum of a row and a column of a product is."""
    return row % 8 * 4 + column % 8 // 2, column // 8 * 4 + row // 8 * 2 + column % 2


def operand_place(line: Index, k: Index, word: int, rows: bool) -> Place:
    """Where element `k` of a row or a column of a product is; `word`: elements of a word."""
    half, high = k // (4 * word), line // 8
    first, second = (half, high) if rows else (high, half)
    return line % 8 * 4 + k % (4 * word) // word, (first * 2 + second) * word + k % word


@functools.cache
def fill(dtype: str) -> str:
    """Registers the intrinsic that clears sums; returns its name."""
    sums, name = ELEMENT_TYPES[dtype].sums, f"im2win_fill_{MULTIPLIERS[dtype].kind}"
    zero = 0 if sums == "int32" else 0.0

    @T.prim_func(s_tir=True)  # type: ignore[untyped-decorator]
    def described(c: T.handle) -> None:
        C = T.match_buffer(c, (LANES, SUMS), sums, align=64, offset_factor=1, scope="warp")
        with T.sblock("root"):
            T.reads()
            T.writes(C[0:LANES, 0:SUMS])
            for i, j in T.grid(LINES, LINES):
                with T.sblock("fill"):
                    vi, vj = T.axis.remap("SS", [i, j])
                    lane, local = T.meta_var(sum_place(vi, vj))
                    T.reads()
                    T.writes(C[lane, local])
                    C[lane, local] = T.cast(zero, sums)

    @T.prim_func(s_tir=True)  # type: ignore[untyped-decorator]
    def implemented(c: T.handle) -> None:
        C = T.match_buffer(c, (LANES, SUMS), sums, align=64, offset_factor=1, scope="warp")
        with T.sblock("root"):
            T.reads()
            T.writes(C[0:LANES, 0:SUMS])
            for lane in T.thread_binding(LANES, "threadIdx.x"):
                for local in T.unroll(SUMS):
                    C[lane, local] = T.cast(zero, sums)

    TensorIntrin.register(name, described, implemented)
    return name


@functools.cache
def load(dtype: str, rows: bool) -> str:
    """Registers the intrinsic that loads an operand from shared memory by `ldmatrix`; returns its name."""
    depth, word = step(dtype), WORD // ELEMENT_TYPES[dtype].itemsize
    name = f"im2win_load_{'rows' if rows else 'columns'}_{MULTIPLIERS[dtype].kind}"
    held, unit = 4 * word, depth // 2

    @T.prim_func(s_tir=True)  # type: ignore[untyped-decorator]
    def described(to: T.handle, given: T.handle) -> None:
        A = T.match_buffer(to, (LANES, held), dtype, align=64, offset_factor=1, scope="warp")
        S = T.match_buffer(given, (LINES, depth), dtype, align=64, offset_factor=1, scope="shared.dyn")
        with T.sblock("root"):
            T.reads(S[0:LINES, 0:depth])
            T.writes(A[0:LANES, 0:held])
            for i, k in T.grid(LINES, depth):
                with T.sblock("load"):
                    vi, vk = T.axis.remap("SS", [i, k])
                    lane, local = T.meta_var(operand_place(vi, vk, word, rows))
                    T.reads(S[vi, vk])
                    T.writes(A[lane, local])
                    A[lane, local] = S[vi, vk]

    def address(lane: Index) -> Place:
        """(line, first element) of the 16 bytes that a lane points to: those of line `lane % 8` of matrix `lane // 8`."""
        outer, inner = lane // 16, lane // 8 % 2
        high, half = (inner, outer) if rows else (outer, inner)
        return high * 8 + lane % 8, half * unit

    @T.prim_func(s_tir=True)  # type: ignore[untyped-decorator]
    def implemented(to: T.handle, given: T.handle) -> None:
        s0, s1 = T.int32(), T.int32()
        A = T.match_buffer(to, (LANES, held), dtype, align=64, offset_factor=1, scope="warp")
        S = T.match_buffer(given, (LINES, depth), dtype, align=64, offset_factor=1, scope="shared.dyn", strides=[s0, s1])
        with T.sblock("root"):
            T.reads(S[0:LINES, 0:depth])
            T.writes(A[0:LANES, 0:held])
            for lane in T.thread_binding(LANES, "threadIdx.x"):
                line, first = T.meta_var(address(lane))
                A[lane, 0] = T.call_extern(
                    dtype, "im2win::load_matrices", T.address_of(A[lane, 0]), S.access_ptr("r", offset=line * s0 + first * s1, extent=unit)
                )

    TensorIntrin.register(name, described, implemented)
    return name


@functools.cache
def product(dtype: str, rows_first: bool) -> str:
    """Registers the intrinsic that multiplies 16 rows by 16 columns; returns its name.

    Args:
        rows_first: whether the first factor of a product is the element of a row.
    """
    sums, depth, word = ELEMENT_TYPES[dtype].sums, step(dtype), WORD // ELEMENT_TYPES[dtype].itemsize
    kind, held = MULTIPLIERS[dtype].kind, 4 * word
    name, function = f"im2win_mma_{kind}_{'rows' if rows_first else 'columns'}_first", f"im2win::product_lines_{kind}"

    @T.prim_func(s_tir=True)  # type: ignore[untyped-decorator]
    def described(a: T.handle, b: T.handle, c: T.handle) -> None:
        A = T.match_buffer(a, (LANES, held), dtype, align=64, offset_factor=1, scope="warp")
        B = T.match_buffer(b, (LANES, held), dtype, align=64, offset_factor=1, scope="warp")
        C = T.match_buffer(c, (LANES, SUMS), sums, align=64, offset_factor=1, scope="warp")
        with T.sblock("root"):
            T.reads(C[0:LANES, 0:SUMS], A[0:LANES, 0:held], B[0:LANES, 0:held])
            T.writes(C[0:LANES, 0:SUMS])
            for i, j, k in T.grid(LINES, LINES, depth):
                with T.sblock("product"):
                    vi, vj, vk = T.axis.remap("SSR", [i, j, k])
                    lane_a, local_a = T.meta_var(operand_place(vi if rows_first else vj, vk, word, rows_first))
                    lane_b, local_b = T.meta_var(operand_place(vj if rows_first else vi, vk, word, not rows_first))
                    lane, local = T.meta_var(sum_place(vi, vj))
                    T.reads(C[lane, local], A[lane_a, local_a], B[lane_b, local_b])
                    T.writes(C[lane, local])
                    C[lane, local] = C[lane, local] + T.cast(A[lane_a, local_a], sums) * T.cast(B[lane_b, local_b], sums)

    @T.prim_func(s_tir=True)  # type: ignore[untyped-decorator]
    def implemented(a: T.handle, b: T.handle, c: T.handle) -> None:
        A = T.match_buffer(a, (LANES, held), dtype, align=64, offset_factor=1, scope="warp")
        B = T.match_buffer(b, (LANES, held), dtype, align=64, offset_factor=1, scope="warp")
        C = T.match_buffer(c, (LANES, SUMS), sums, align=64, offset_factor=1, scope="warp")
        with T.sblock("root"):
            T.reads(C[0:LANES, 0:SUMS], A[0:LANES, 0:held], B[0:LANES, 0:held])
            T.writes(C[0:LANES, 0:SUMS])
            for lane in T.thread_binding(LANES, "threadIdx.x"):
                rows, columns = T.meta_var((A, B) if rows_first else (B, A))
                T.evaluate(
                    T.call_extern("void", function, T.address_of(C[lane, 0]), T.address_of(rows[lane, 0]), T.address_of(columns[lane, 0]))
                )

    TensorIntrin.register(name, described, implemented)
    return name
