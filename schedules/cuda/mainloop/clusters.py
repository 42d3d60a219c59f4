"""Thread blocks in clusters: device functions that reach each other's shared memory, and the attribute of kernels that call them."""

from __future__ import annotations

import re
from pathlib import Path

_CALL = re.compile(r"im2win::(?:copy_shared|send_four)<(\d+)>")
_KERNEL = re.compile(r'extern "C" __global__ void (?=(?:__launch_bounds__\(\d+\) )?(?P<name>\w+)\()')


def cluster_functions(source: str) -> str:
    """Device functions, in namespace im2win, for sources that call them; nothing for others."""
    return (Path(__file__).parent / "clusters.hpp").read_text() if _CALL.search(source) else ""


def with_clusters(kernels: str) -> str:
    """The source of kernels in which those that call functions of a cluster say how many blocks one has."""
    parts = re.split(r'(?=extern "C" __global__)', kernels)
    sizes = {match["name"]: size[1] for part in parts if (match := _KERNEL.match(part)) and (size := _CALL.search(part))}

    def said(match: re.Match[str]) -> str:
        size = sizes.get(match["name"])
        return match[0] + (f"__cluster_dims__({size}, 1, 1) " if size else "")

    return _KERNEL.sub(said, kernels) if sizes else kernels
