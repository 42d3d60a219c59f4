"""What kernels of filters and windows in steps call beside the device functions of blocks that stay."""

from __future__ import annotations

import re
from pathlib import Path

_CALL = re.compile(r"im2win::start_slot<\d+>")

_TAKEN = re.compile(r"im2win::take_registers<\d+, (\d+)>")
_KERNEL = re.compile(r"__launch_bounds__\((?P<threads>\d+)\) (?P<name>\w+)\(")


def slot_functions(source: str) -> str:
    """Device functions, in namespace im2win, for sources that call them; nothing for others."""
    return (Path(__file__).parent / "device.hpp").read_text() if _CALL.search(source) else ""


def with_residents(kernels: str) -> str:
    """The source of kernels in which those whose threads exchange registers say how many blocks share a multiprocessor: so the assembler
    knows how many registers a thread begins with.
    """
    parts = re.split(r'(?=extern "C" __global__)', kernels)
    blocks = {match["name"]: taken[1] for part in parts if (match := _KERNEL.search(part)) and (taken := _TAKEN.search(part))}

    def said(match: re.Match[str]) -> str:
        more = f", {blocks[match['name']]}" if match["name"] in blocks else ""
        return f"__launch_bounds__({match['threads']}{more}) {match['name']}("

    return _KERNEL.sub(said, kernels) if blocks else kernels
