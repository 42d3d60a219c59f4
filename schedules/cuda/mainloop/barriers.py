"""Device functions for barriers of warp-specialized kernels, and launch bounds with the number of resident blocks."""

from __future__ import annotations

import re
from pathlib import Path

_CALL = re.compile(r"im2win::init_empty_barrier<\d+>")

_SHARED = re.compile(r"im2win::share_multiprocessor<(\d+)>")
_KERNEL = re.compile(r"__launch_bounds__\((?P<threads>\d+)\) (?P<name>\w+)\(")


def barrier_functions(source: str) -> str:
    """Device functions, in namespace `im2win`, for sources that call them; "" for others."""
    return (Path(__file__).parent / "barriers.hpp").read_text() if _CALL.search(source) else ""


def with_residents(kernels: str) -> str:
    """The source with the number of resident blocks in the launch bounds of kernels that call `share_multiprocessor`.

    The assembler derives from it how many registers a thread begins with, which it must know where warps exchange registers (`setmaxnreg`).
    """
    parts = re.split(r'(?=extern "C" __global__)', kernels)
    blocks = {match["name"]: size[1] for part in parts if (match := _KERNEL.search(part)) and (size := _SHARED.search(part))}

    def said(match: re.Match[str]) -> str:
        more = f", {blocks[match['name']]}" if match["name"] in blocks else ""
        return f"__launch_bounds__({match['threads']}{more}) {match['name']}("

    return _KERNEL.sub(said, kernels) if blocks else kernels
