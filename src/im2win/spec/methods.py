"""Names of methods that compute a layer: an algorithm, which is mathematics, and a schedule, which says how it runs.

Both together are written ``algorithm/schedule`` for programs, and ``algorithm / schedule`` for people. The old names of methods and of a
tile's fields stand here too, for files that were written before they changed.
"""

from __future__ import annotations

from typing import Any

# Old names from before algorithms and schedules were separated; records, results and callers may still contain them.
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

# Old names of a tile's fields, and old values by old field.
OLD_FIELDS = {"strip": "row_block", "turns": "pingpong", "boxes": "tma_boxes"}
OLD_VALUES = {("shared", "sums"): "accumulators", ("boxes", "patches"): "halo"}


def key(algorithm: str, schedule: str) -> str:
    """An algorithm and its schedule in one word: "direct/persistent"."""
    return f"{algorithm}/{schedule}"


def split(method: str) -> tuple[str, str]:
    """(algorithm, schedule) of a key or an old name; the schedule is "" for any other name."""
    algorithm, _, schedule = OLD_NAMES.get(method, method).partition("/")
    return algorithm, schedule


def shown(method: str) -> str:
    """A key or an old name in the form for people: "direct / persistent"; other names are unchanged."""
    algorithm, schedule = split(method)
    return f"{algorithm} / {schedule}" if schedule else method


def converted_tile(tile: Any) -> Any:
    """A tile's values under today's names of its fields. What is not a mapping is returned unchanged; so are today's tiles."""
    if not isinstance(tile, dict):
        return tile
    values = {name: OLD_VALUES.get((name, value), value) if isinstance(value, str) else value for name, value in tile.items()}
    return {OLD_FIELDS.get(name, name): value for name, value in values.items()}
