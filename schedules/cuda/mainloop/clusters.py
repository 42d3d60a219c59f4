"""Thread-block clusters: device functions that access other blocks' shared memory, and the cluster attribute of kernels that call them."""

from __future__ import annotations

import re
from pathlib import Path

_CALL = re.compile(r"im2win::(?:copy_shared|send_four)<(\d+)>")
_KERNEL = re.compile(r'extern "C" __global__ void (?=(?:__launch_bounds__\(\d+\) )?(?P<name>\w+)\()')


def cluster_functions(source: str) -> str:
    """Device functions, in namespace `im2win`, for sources that call them; "" for others."""
    return (Path(__file__).parent / "clusters.hpp").read_text() if _CALL.search(source) else ""


def with_clusters(kernels: str) -> str:
    """The source with `__cluster_dims__` on kernels that call functions of a cluster."""
    parts = re.split(r'(?=extern "C" __global__)', kernels)
    sizes = {match["name"]: size[1] for part in parts if (match := _KERNEL.match(part)) and (size := _CALL.search(part))}

    def said(match: re.Match[str]) -> str:
        size = sizes.get(match["name"])
        return match[0] + (f"__cluster_dims__({size}, 1, 1) " if size else "")

    return _KERNEL.sub(said, kernels) if sizes else kernels
