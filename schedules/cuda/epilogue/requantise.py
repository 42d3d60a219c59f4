"""Requantisation: int32 accumulators of int8 products, or float32 sums of float8_e4m3fn products, become outputs of another type."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from tvm.tirx.script import builder as T

from im2win.schedules.cuda.primitives import Expr, call, pointer
from im2win.spec.dtypes import ELEMENT_TYPES

_CALL = re.compile(r"im2win::(?:scaled|added|store_int8)\b")
_FLOAT8 = re.compile(r"im2win::(?:multiplied|store_float8)\b")


def requantisation(source: str) -> str:
    """Device functions, in namespace `im2win`, for sources that call them; "" for others."""
    float8 = _FLOAT8.search(source) is not None
    names = ["requantise.hpp"] * (float8 or _CALL.search(source) is not None) + ["float8.hpp"] * float8
    return "".join((Path(__file__).parent / name).read_text() for name in names)


def scaled(total: Expr, scale: Expr) -> Expr:
    """An int32 accumulator as float32, times a scale."""
    return T.call_extern("float32", "im2win::scaled", total, scale)


def multiplied(value: Expr, scale: Expr) -> Expr:
    """The product of two float32 values, never contracted with an addition."""
    return T.call_extern("float32", "im2win::multiplied", value, scale)


def float8_value(stored: Expr) -> Expr:
    """The float32 value of a float8_e4m3fn, given as its byte."""
    return T.call_extern("float32", "im2win::float8_value", stored)


def added(value: Expr, residual: Expr) -> Expr:
    """The sum of two float32 values, never contracted with the multiplication before it."""
    return T.call_extern("float32", "im2win::added", value, residual)


def exchanged(dtype: str, pairs: list[list[Expr]], bit: int) -> Expr:
    """Four neighbours of a window as one word, by a lane exchange.

    Two lanes whose numbers differ in `bit` hold two of four neighbours each, of two windows.

    Args:
        dtype: of outputs, of one byte each.
        pairs: float32 values of this lane: its two of the window that the lower lane gets, and its two of the upper lane's window.
    """
    words = [T.call_extern("uint32", f"im2win::{ELEMENT_TYPES[dtype].pair}", *pair) for pair in pairs]
    return T.call_extern("uint32", f"im2win::exchanged<{bit}>", *words)


def store_word(output: Any, at: Expr, word: Expr) -> None:
    """Stores four outputs of one byte from `at` on, a multiple of four."""
    call("store_word", pointer(output, at), word)


def store_bytes(dtype: str, output: Any, at: Expr, values: Any, count: int) -> None:
    """Converts `count` float32 values to a type of one byte and stores them as neighbours from `at` on, a multiple of `count`."""
    call(f"store_{'int8' if ELEMENT_TYPES[dtype].integer else 'float8'}<{count}>", pointer(output, at), pointer(values, 0))
