"""The rungs of the look-up ladder by name, as those see them who take tuned layers only; see `lookup.find`."""

from __future__ import annotations

from im2win.problem import Conv2d

TUNED = ("exact", "other epilogue")  # a record of this very convolution, taken on this device, chose the tile


def rung_for(conv: Conv2d, rung: str, recorded: Conv2d | None) -> str:
    """The rung on which a problem's record stands: "other epilogue" where the nearest layer is the same convolution.

    Args:
        recorded: the problem of the record, if one was found.
    """
    plain = {"bias": False, "residual": False, "activation": "none"}
    same = recorded is not None and recorded.with_(**plain) == conv.with_(**plain)
    return "other epilogue" if rung == "nearest layer" and same else rung
