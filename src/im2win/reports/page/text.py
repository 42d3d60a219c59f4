"""Texts of files in the form that a page shows: printable, of a length that can be read."""

from __future__ import annotations

import re

LONGEST = 400  # characters
# Controls, marks that change the direction of a line, surrogates and code points that are no characters.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff]")


def printable(text: str) -> str:
    """The text with a replacement character for what cannot be shown."""
    return _UNPRINTABLE.sub("\ufffd", text)


def shortened(text: str, most: int = LONGEST) -> str:
    """The text in `most` characters, with an ellipsis for what is left out."""
    return text if len(text) <= most else text[: most - 1] + "…"
