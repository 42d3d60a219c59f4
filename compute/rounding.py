"""Operations on float32 that round once, as operators of their own: a compiler must not contract or reorder them.

They are vectorised like any other operator. Every target says how it lowers them: `tvm.tirx.register_intrin_lowering`.

- scaled: float32(total) * scale, each rounded to nearest even; never contracted with an addition behind it.
- nearest: the nearest integer, ties to even.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.ir.op import register_op_attr

from im2win.spec.dtypes import ELEMENT_TYPES

Expr = Any

SCALED, NEAREST = "tirx.im2win_scaled", "tirx.im2win_nearest"
_PURE = 1  # the effect of a call, `tvm.tirx.CallEffectKind.Pure` as a number

for _name in (SCALED, NEAREST):
    register_op_attr(_name, "TCallEffectKind", _PURE)
    register_op_attr(_name, "TVectorizable", True)


def scaled(total: Expr, scale: Expr) -> Expr:
    """An int32 sum, times a float32 scale."""
    return tirx.call_intrin("float32", SCALED, total, scale)


def nearest(value: Expr) -> Expr:
    """A float32 as the nearest int32."""
    return tirx.call_intrin("int32", NEAREST, value)


def converted(value: Expr, dtype: str, out_dtype: str) -> Expr:
    """A value of type `dtype` as an output: rounded to nearest even, and limited to the range of int8 where outputs are."""
    if dtype == out_dtype:
        return value
    limits = ELEMENT_TYPES[out_dtype].limits
    if limits is None:
        return value.astype(out_dtype)
    low, high = (tirx.const(float(limit), "float32") for limit in limits)
    return nearest(tirx.max(low, tirx.min(high, value))).astype(out_dtype)
