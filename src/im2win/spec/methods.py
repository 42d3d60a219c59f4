"""Names of what computes a layer: an algorithm, which is mathematics, and the schedule that says how it runs.

Both together are written ``algorithm/schedule`` where a program reads them, and ``algorithm / schedule`` where people do.
"""

from __future__ import annotations

# What one name stood for before algorithms and schedules were told apart; records, results and callers may still say it.
OLD_NAMES = {
    "direct": "direct/tiled",
    "direct_persistent": "direct/persistent",
    "direct_streamed": "direct/warp_specialized",
    "im2win": "im2win/stored",
    "im2win_fused": "im2win/fused",
    "im2col": "im2col/tiled",
    "implicit_gemm": "implicit_gemm/tiled",
    "implicit_gemm_split": "implicit_gemm/split_k",
    "mec": "mec/tiled",
    "mcfa": "mcfa/tiled",
    "winograd": "winograd/tiled",
    "winograd_tc": "winograd/tensor_cores",
}


def key(algorithm: str, schedule: str) -> str:
    """An algorithm and its schedule in one word: "direct/persistent"."""
    return f"{algorithm}/{schedule}"


def split(method: str) -> tuple[str, str]:
    """(algorithm, schedule) of a key, or of an old name; the schedule is "" for a name of neither form."""
    algorithm, _, schedule = OLD_NAMES.get(method, method).partition("/")
    return algorithm, schedule


def shown(method: str) -> str:
    """A key or an old name as people read it: "direct / persistent"; other names as they are."""
    algorithm, schedule = split(method)
    return f"{algorithm} / {schedule}" if schedule else method
