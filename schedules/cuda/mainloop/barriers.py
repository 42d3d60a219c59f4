"""What kernels of filters and windows in steps call beside the device functions of blocks that stay."""

from __future__ import annotations

import re
from pathlib import Path

_CALL = re.compile(r"im2win::start_slot<\d+>")

_SHARED = re.compile(r"im2win::share_multiprocessor<(\d+)>")
_KERNEL = re.compile(r"__launch_bounds__\((?P<threads>\d+)\) (?P<name>\w+)\(")


def slot_functions(source: str) -> str:
    """Device functions, in namespace im2win, for sources that call them; nothing for others."""
    return (Path(__file__).parent / "barriers.hpp").read_text() if _CALL.search(source) else ""


def with_residents(kernels: str) -> str:
    """The source of kernels in which those that know it say how many blocks share a multiprocessor: the assembler has to know how many
    registers a thread begins with where threads exchange them.
    """
    parts = re.split(r'(?=extern "C" __global__)', kernels)
    blocks = {match["name"]: size[1] for part in parts if (match := _KERNEL.search(part)) and (size := _SHARED.search(part))}

    def said(match: re.Match[str]) -> str:
        more = f", {blocks[match['name']]}" if match["name"] in blocks else ""
        return f"__launch_bounds__({match['threads']}{more}) {match['name']}("

    return _KERNEL.sub(said, kernels) if blocks else kernels
