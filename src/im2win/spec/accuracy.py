"""Accuracy classes of kernels: the rounding that their arithmetic may use."""

from __future__ import annotations

from typing import Literal, get_args

Accuracy = Literal["exact", "float32", "tf32", "winograd"]
"""From the most accurate to the least. "winograd": Winograd's form in the element type's own precision, transformed tiles rounded to it."""


def checked_accuracy(value: str) -> Accuracy:
    """The word as an accuracy.

    Raises:
        ValueError: it is none.
    """
    if value not in get_args(Accuracy):
        raise ValueError(f"`accuracy` (={value!r}) must be one of {', '.join(get_args(Accuracy))}.")
    return value  # type: ignore[return-value]


def allows(accuracy: Accuracy, needed: Accuracy) -> bool:
    """Whether a caller who requests `accuracy` accepts a kernel of accuracy `needed`."""
    order = get_args(Accuracy)
    return bool(order.index(needed) <= order.index(accuracy))
