"""The convolution of int8, uint8, bfloat16 and float16 as sums of dot products of words, and its epilogue on CPUs.

    O[n, j, m, x] = sum over u, v, w of dot(I[n, w, m*s + u*d, x*s + v*d], F[j, w, u, v]) + offset[j]        w word of channels

A word has as many neighbouring channels as an instruction multiplies and adds at once: four int8, two bfloat16, one float16 (as
float32). Products of integers and their sums are exact, in any order. Inputs may be shifted (int8 plus 128 are the unsigned bytes that
vpdpbusd multiplies) and have a zero point; both are constants that every element of a window has, so that they leave a constant in a
channel's sum, minus which is its `offset`, computed when filters are packed (`packing.cpu_dot`).

The epilogue is that of `Conv2d`, operation by operation: int32 sums plus offset and bias are converted, scaled, added to the residual,
activated, limited, rounded. Sums of bfloat16 and float16 are float32, and what follows is, too, up to the output.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import tirx

from im2win.compute.arithmetic import TensorExpressions
from im2win.spec import activations
from im2win.spec.conv2d import Conv2d
from im2win.spec.dtypes import ELEMENT_TYPES

Expr = Any

_HALF, _NAN = 0x7FFF, 0x7FC0  # half of bfloat16's last place in the bits of a float32, less one; a bfloat16 that is not a number


def widened(value: Expr) -> Expr:
    """An element of a residual or bias in the type that it is added in."""
    if str(value.ty) == "bfloat16":
        return tirx.reinterpret("float32", tirx.reinterpret("uint16", value).astype("uint32") << tirx.const(16, "uint32"))
    return value.astype("float32")


def bits_widened(bits: Expr, dtype: str, lanes: int = 1) -> Expr:
    """A vector of bfloat16 or float16, given as their bits, in float32."""
    if dtype == "float16":
        return tirx.reinterpret(f"float16x{lanes}" if lanes > 1 else "float16", bits).astype(f"float32x{lanes}" if lanes > 1 else "float32")
    wide, narrow = (f"{kind}x{lanes}" if lanes > 1 else kind for kind in ("float32", "uint32"))
    shift = tirx.const(16, "uint32")
    return tirx.reinterpret(wide, bits.astype(narrow) << (tirx.Broadcast(shift, lanes) if lanes > 1 else shift))


def scaled(total: Expr, scale: Expr, lanes: int) -> Expr:
    """A vector of int32 sums as float32, times scales; LLVM must not contract the product with an addition behind it.

    TVM does not vectorise such calls itself.
    """
    dtype = f"float32x{lanes}" if lanes > 1 else "float32"
    return tirx.call_llvm_pure_intrin(dtype, "llvm.arithmetic.fence", total.astype(dtype) * scale)


def summed(value: Expr, residual: Expr, numbers: Sequence[Expr], lanes: int) -> Expr:
    """A vector of scaled sums as integers in their own limits, plus the residual, in the steps of the output; see `Conv2d.own_steps`.

    Args:
        numbers: low, high, a, b and c as vectors.
    """
    dtype = f"float32x{lanes}" if lanes > 1 else "float32"
    low, high, a, b, c = numbers

    def fenced(product: Expr) -> Expr:
        return tirx.call_llvm_pure_intrin(dtype, "llvm.arithmetic.fence", product)

    whole = tirx.max(low, tirx.min(high, tirx.nearbyint(value)))
    return fenced(whole * a) + (fenced(residual.astype(dtype) * b) + c)


def finished(conv: Conv2d, value: Expr, residual: Expr | None) -> Expr:
    """An output, of type `conv.out_dtype`.

    Args:
        value: a sum with offset and bias, and scaled if outputs are requantised. residual: of type `conv.out_dtype`; None if value has it.
    """
    if ELEMENT_TYPES[conv.dtype].integer and not conv.requantised:
        value = value if residual is None else value + residual
        return activations.apply(conv.activation, TensorExpressions("int32"), value)
    return converted(conv, activated(conv, value, residual))


def activated(conv: Conv2d, value: Expr, residual: Expr | None) -> Expr:
    """`finished` in float32, not yet an output."""
    value = value if residual is None else value + widened(residual)
    return activations.apply(conv.activation, TensorExpressions(), value)


def limited(conv: Conv2d, value: Expr) -> Expr:
    """A float32 in the range of an integer output's type around its zero point, not yet rounded; any other as it is."""
    limits = ELEMENT_TYPES[conv.out_dtype].limits
    if limits is None:
        return value
    low, high = (tirx.const(float(limit - conv.out_zero_point), "float32") for limit in limits)
    return tirx.max(low, tirx.min(high, value))


def converted(conv: Conv2d, value: Expr) -> Expr:
    """A float32 as an output: rounded to nearest even, and limited to an integer type's range around its zero point."""
    if ELEMENT_TYPES[conv.out_dtype].limits is not None:
        whole = tirx.nearbyint(limited(conv, value)).astype("int32")
        return (whole + tirx.const(conv.out_zero_point, "int32") if conv.out_zero_point else whole).astype(conv.out_dtype)
    return cast(value, conv.out_dtype)


def cast(value: Expr, dtype: str) -> Expr:
    """A number in another floating-point type, rounded to nearest even; bfloat16 by its bits, since TVM's own conversion of it fails."""
    if str(value.ty) == dtype:
        return value
    if str(value.ty) in ("bfloat16", "float16"):
        value = widened(value)
    if dtype != "bfloat16":
        return value if str(value.ty) == dtype else value.astype(dtype)
    bits = tirx.Var("bits", "uint32")
    even = (bits >> tirx.const(16, "uint32")) & tirx.const(1, "uint32")
    rounded = ((bits + tirx.const(_HALF, "uint32") + even) >> tirx.const(16, "uint32")).astype("uint16")
    magnitude = bits & tirx.const(0x7FFFFFFF, "uint32")
    kept = tirx.Select(magnitude > tirx.const(0x7F800000, "uint32"), tirx.const(_NAN, "uint16"), rounded)
    return tirx.reinterpret("bfloat16", tirx.Let(bits, tirx.reinterpret("uint32", value), kept))
