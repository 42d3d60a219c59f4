"""Quantities as text: bytes, times and speeds, each with its unit and with as many digits as matter."""

from __future__ import annotations


def bytes_text(count: int | None) -> str:
    """Bytes in the largest unit that leaves at least one: "0 B", "36.0 KiB", "1.5 MiB"."""
    if count is None:
        return "-"
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if abs(size) < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def counted(count: int, what: str, verb: str = "") -> str:
    """A number of things, with a verb of the plural: "1 layer", "2 layers", "1 layer has", "2 layers have"."""
    one = {"have": "has", "are": "is", "were": "was"}
    name = what if count == 1 else f"{what}s"
    return " ".join(filter(None, (str(count), name, one.get(verb, f"{verb}s" if verb else "") if count == 1 else verb)))


def milliseconds(seconds: float | None) -> str:
    """Seconds as milliseconds with three significant digits or more."""
    return "-" if seconds is None else f"{seconds * 1e3:.3f}" if seconds < 1 else f"{seconds * 1e3:.0f}"


def duration(seconds: float | None) -> str:
    """A duration: "45 s", "3:05"."""
    if seconds is None:
        return "-"
    whole = round(seconds)
    return f"{whole} s" if whole < 60 else f"{whole // 60}:{whole % 60:02d}"


def gflops(flops: int, seconds: float | None) -> str:
    """Floating-point operations per second, in units of 1e9."""
    return "-" if not seconds else f"{flops / seconds / 1e9:.0f}"
