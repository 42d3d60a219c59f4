"""When a record earns its place: today's default tile had its chance against it. Other records are hints for the tuner.

A record says which candidate was the fastest of those that were tried. A later version of the package may have algorithms and tiles that
were not among them, and its default tile may be faster than the record. A record is therefore used only where, in its log, on its device,
with its target and number of threads,

- the default tile was *met*: it has a record, and is slower or failed, or is the record itself; or
- it had *rivals*: tiles of the default's algorithm and schedule were timed, at least `LEAST_RIVALS` or all there are, and none is better.
  They have every field of the default tile: tiles of before a schedule learned something are no evidence against what it does with it.

The default tile is that of the layer on this device with the accuracy asked for. To know it a whole space is ranked, a third of a second on
a CPU. Records say by `rivals` that the session that wrote them measured today's default, and proofs list layers (`proofs.Choices`); only
where neither does is the space ranked.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from im2win.records.log import best_first
from im2win.records.record import Record
from im2win.registry.interface import Backend, Tile
from im2win.registry.schedules import SCHEDULES, schedule_of
from im2win.spec import methods

LEAST_RIVALS = 4  # tiles of the default's schedule; of fewer the best says little about what the model ranks first
Applies = Callable[[Record], str | None]

_WHY = {
    "new-algorithm": "{method}, the algorithm of today's default tile, was not tried",
    "new-tile": "today's default tile, of {method}, was not tried, and too few of this algorithm with its fields were",
    "slower": "today's default tile, of {method}, or another of this algorithm is better there",
}


@dataclass(frozen=True)
class Standing:
    """How the best record of a layer stands against the default tile.

    kind: "met", "rivals", or why it is but a hint: "new-algorithm", "new-tile" or "slower". method: the default tile's. gain: cost of the
    default tile, or of the best of its rivals, over that of the record; None if it is not known.
    """

    kind: str
    method: str
    gain: float | None = None

    @property
    def reason(self) -> str | None:
        """Why the record is but a hint; None if it has earned its place."""
        return _WHY[self.kind].format(method=methods.shown(self.method)) if self.kind in _WHY else None


def standing(
    record: Record, records: Sequence[Record], default: tuple[str, Tile] | None, backend: Backend, applies: Applies
) -> Standing:
    """How a record stands against a default tile.

    Args:
        record: the best of those that apply.
        records: all of its layer in its log on its device, in the order they were written.
        default: algorithm and tile; None where the layer has none, so that anything is better.
        applies: the reason why a record does not apply, or None. Records that do not apply are no evidence.
    """
    if default is None:
        return Standing("met", record.method, math.inf)
    method, tile = default
    tried = latest(one for one in records if one.method == method and (one.target, one.threads) == (record.target, record.threads))
    if own := next((one for one in tried if _is(one, tile, backend) and applies(one) is None), None):
        return Standing("met" if own.cost >= record.cost else "slower", method, own.cost / record.cost)
    named = tile.as_dict().keys()
    alike = (one for one in best_first(tried) if named <= one.tile.keys() and applies(one) is None)
    rivals = list(itertools.islice(alike, LEAST_RIVALS))
    if not rivals and not any(applies(one) is None for one in best_first(tried)):
        return Standing("new-algorithm", method)
    if len(rivals) < LEAST_RIVALS and len(rivals) < len(backend.ranked(record.conv2d, SCHEDULES[method])):
        return Standing("new-tile", method)
    return Standing("rivals" if rivals[0].cost >= record.cost else "slower", method, rivals[0].cost / record.cost)


def latest(records: Iterable[Record]) -> list[Record]:
    """Of every candidate the last record, which counts."""
    return list({str(sorted(one.tile.items())): one for one in records}.values())


def _is(record: Record, tile: Tile, backend: Backend) -> bool:
    """Whether a record is of a tile. Values that a record of before lacks are the tile's defaults."""
    values: Any = tile.as_dict()
    if record.tile == values:
        return True
    try:
        return bool(backend.tile(schedule_of(record.method), record.tile).as_dict() == values)
    except (ValueError, TypeError, KeyError):
        return False


