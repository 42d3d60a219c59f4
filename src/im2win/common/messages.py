"""Errors of other people's libraries in one line, for a record or a table."""

from __future__ import annotations


def brief(error: BaseException, most: int = 500) -> str:
    """What an error says in its last line, those left out that go on with the line before them, indented; its representation if nothing."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    said = [line for line in lines if not line[0].isspace()] or lines or [repr(error)]
    return said[-1].strip()[:most]
