"""Requantisation: int32 accumulators of int8 products become outputs of another type."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from tvm.tirx.script import builder as T

from im2win.schedules.cuda.primitives import Expr, call, pointer

_CALL = re.compile(r"im2win::(?:scaled|added|store_int8)\b")


def requantisation(source: str) -> str:
    """Device functions, in namespace `im2win`, for sources that call them; "" for others."""
    return (Path(__file__).parent / "requantise.hpp").read_text() if _CALL.search(source) else ""


def scaled(total: Expr, scale: Expr) -> Expr:
    """An int32 accumulator as float32, times a scale."""
    return T.call_extern("float32", "im2win::scaled", total, scale)


def added(value: Expr, residual: Expr) -> Expr:
    """The sum of two float32 values, never contracted with the multiplication before it."""
    return T.call_extern("float32", "im2win::added", value, residual)


def exchanged(pairs: list[list[Expr]], bit: int) -> Expr:
    """Four neighbours of a window as one word, by a lane exchange.

    Two lanes whose numbers differ in `bit` hold two of four neighbours each, of two windows.

    Args:
        pairs: float32 values of this lane: its two of the window that the lower lane gets, and its two of the upper lane's window.
    """
    words = [T.call_extern("uint32", "im2win::two_int8", *pair) for pair in pairs]
    return T.call_extern("uint32", f"im2win::exchanged<{bit}>", *words)


def store_word(output: Any, at: Expr, word: Expr) -> None:
    """Stores four int8 from `at` on, a multiple of four."""
    call("store_word", pointer(output, at), word)


def store_int8(output: Any, at: Expr, values: Any, count: int) -> None:
    """Converts `count` float32 values and stores them as neighbours from `at` on, a multiple of `count`."""
    call(f"store_int8<{count}>", pointer(output, at), pointer(values, 0))
