"""One-line messages from errors of other libraries, for a record or a table."""

from __future__ import annotations


def brief(error: BaseException, most: int = 500) -> str:
    """An error's last message line, without the indented lines that continue it, shortened to `most` characters.

    An error without a message gives its representation.
    """
    lines = [line for line in str(error).splitlines() if line.strip()]
    said = [line for line in lines if not line[0].isspace()] or lines or [repr(error)]
    return said[-1].strip()[:most]
