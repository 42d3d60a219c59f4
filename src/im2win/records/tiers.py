"""Names of the look-up tiers, as seen by callers that accept only tuned layers; see `records.lookup.find`."""

from __future__ import annotations

from typing import Any, Literal, get_args

from im2win.spec.conv2d import Conv2d

Untuned = Literal["default", "keep"]
"""What layers get that no record of this device is about: im2win's tile, or what they had."""
OLDER = "older record"  # of this very convolution on this device, from before today's default tile: tuning again would measure that
TUNED = ("exact", "other epilogue", "other type")  # tiers with a record of this very convolution on this device
NO_RECORD = "no record of this layer on this device"  # the reason why a layer is left alone with `untuned="keep"`


def tier_for(conv: Conv2d, tier: str, recorded: Conv2d | None) -> str:
    """The tier of a problem's record: "other epilogue" where the nearest layer is the same convolution with another epilogue.

    Args:
        recorded: the problem of the record, if one was found.
    """
    return "other epilogue" if tier == "nearest layer" and recorded is not None and same_convolution(conv, recorded) else tier


def same_convolution(conv: Conv2d, other: Conv2d) -> bool:
    """Whether two problems are equal but for their epilogues."""
    plain: dict[str, Any] = {"bias": False, "residual": False, "activation": "none", "out_dtype": None}
    return other.with_(**plain) == conv.with_(**plain)


def checked_untuned(untuned: str) -> Untuned:
    """The word, if it is a valid one.

    Raises:
        ValueError: it is not; the message names the argument and the valid words.
    """
    if untuned not in get_args(Untuned):
        raise ValueError(f"`untuned` (={untuned!r}) must be one of {', '.join(get_args(Untuned))}.")
    return untuned  # type: ignore[return-value]
