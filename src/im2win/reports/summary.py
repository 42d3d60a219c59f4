"""The cost of each layer before anything is built: operations, bytes and every algorithm's extra memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from im2win.spec.suites import Layer


def summary_rows(layers: Iterable[Layer], target: str = "cpu") -> list[dict[str, Any]]:
    """One row of plain values for each layer (ready for a table, JSON or CSV). Values are of one occurrence, whatever `count` is.

    Keys: `name`, `key` (parse it with `Conv2d.parse`), `count`, `flops`, `bytes_moved` (least bytes that must move), `flops_per_byte`
    (arithmetic intensity: the one over the other) and `algorithms`. The latter holds for each registered schedule, named
    `algorithm/schedule`, the bytes of its transformed tensor on the target (an int), or the reason why it does not support the layer there
    (a string).
    """
    from im2win.registry.schedules import SCHEDULES

    rows: list[dict[str, Any]] = []
    for layer in layers:
        conv = layer.conv
        rows.append(
            {
                "name": layer.name,
                "key": str(conv),
                "count": layer.count,
                "flops": conv.flops,
                "bytes_moved": conv.bytes_moved,
                "flops_per_byte": conv.flops / conv.bytes_moved,
                "algorithms": {
                    name: algorithm.stored_bytes(conv, target) if (reason := algorithm.supports(conv, target)) is None else reason
                    for name, algorithm in SCHEDULES.items()
                },
            }
        )
    return rows
