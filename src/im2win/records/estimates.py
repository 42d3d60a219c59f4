"""How far the cost model was from measured times: what an estimate alone is worth beside a measurement.

The cost model ranks the tiles of a layer, and the first one is the default tile. Where nobody measured it, its time is known only up to the
error of the model. That error is found in records of the same device: of every similar layer the tile with the lowest estimate among those
that were measured, as the default tile is that of its layer, with its measured cost over its estimate. The factor of a layer's estimate
is the third quartile of these ratios: in three layers of four the tile took no longer than its estimate times the factor.

Ratios are of the same algorithm and schedule, of layers of the same type and layout, and of tiles with every field of the default tile.
Where fewer than `LEAST_RATIOS` layers have such, all tiles of the schedule count, in all types and layouts, and where these are too few,
all other schedules on layers like this one. CPUs' models have no unit: there the factor gives them one.

The quartile was chosen on the layers of an H200 and of an Intel CPU whose default tile was measured. Choosing between that
tile's estimate and the best record of the other schedules loses least time with it: about as little as with the median or the ninth decile
where one of these is good, and less where it is not. The order of the three kinds of ratios was chosen likewise.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence

import tvm

from im2win.records.likeness import distance
from im2win.records.log import Log
from im2win.records.merit import latest
from im2win.records.proofs import proven
from im2win.records.record import Record
from im2win.registry.backends import Device, backend_for
from im2win.registry.interface import Backend, Tile
from im2win.registry.schedules import SCHEDULES, schedule_of
from im2win.registry.sources import is_current
from im2win.spec.accuracy import Accuracy
from im2win.spec.conv2d import Conv2d

LEAST_RATIOS = 5  # of fewer the quartile would be one layer's
NEAR = 24, 64, 8  # layers that are asked for each kind of ratio: an estimate takes up to a millisecond, a layer has a hundred records
QUARTILE = 0.75


def factor(conv: Conv2d, default: tuple[str, Tile], device: Device, accuracy: Accuracy, logs: Sequence[Log]) -> float | None:
    """By what the estimate of a layer's default tile is multiplied to be set against a measured cost; None if too little was measured.

    Args:
        default: algorithm and tile that the model ranks first.
        logs: whose records of this device are asked.
    """
    method, fields = default[0], frozenset(default[1].as_dict())
    layers = _nearest(conv, backend_for(device, accuracy).name, logs)
    alike = [pair for pair in layers if _kind(pair[1]) == _kind(conv)]
    others = [key for key in SCHEDULES if key != method]
    none = frozenset[str]()
    kinds = (alike[: NEAR[0]], [method], fields), (layers[: NEAR[1]], [method], none), (alike[: NEAR[2]], others, none)
    for asked, keys, named in kinds:
        pairs = itertools.product(asked, keys)
        ratios = [ratio for (log, one), key in pairs if (ratio := _ratio(log, one, key, named, device, accuracy)) is not None]
        if len(ratios) >= LEAST_RATIOS:
            return sorted(ratios)[min(len(ratios) - 1, int(QUARTILE * len(ratios)))]
    return None


def _kind(conv: Conv2d) -> tuple[str, str]:
    return conv.dtype, conv.layout


def _nearest(conv: Conv2d, device: str, logs: Sequence[Log]) -> list[tuple[Log, Conv2d]]:
    """Layers with records of the device, grouped or not like this one, the nearest sizes first."""
    found = ((log, one) for log in logs for one in log.convs(device) if (one.groups == 1) == (conv.groups == 1))
    return sorted(found, key=lambda pair: distance(conv, pair[1]))


def _ratio(log: Log, conv: Conv2d, method: str, fields: frozenset[str], device: Device, accuracy: Accuracy) -> float | None:
    """Measured cost over the estimate, of a layer's tile with the lowest estimate among a schedule's; None if it has no record."""
    backend = backend_for(device, accuracy)
    records = log.read(conv, backend.name)
    return _ratio_of(log, conv, method, fields, device, accuracy, len(records)) if records else None


@functools.lru_cache(maxsize=1 << 14)
def _ratio_of(
    log: Log, conv: Conv2d, method: str, fields: frozenset[str], device: Device, accuracy: Accuracy, count: int
) -> float | None:
    """`_ratio` of as many records as `count` says: more records later are another question."""
    backend = backend_for(device, accuracy)
    wanted = backend.target, backend.threads, method
    here = (one for one in log.read(conv, backend.name) if (one.target, one.threads, one.method) == wanted)
    timed = (one for one in latest(here) if one.seconds is not None and fields <= one.tile.keys() and _applies(one, log))
    return min(_estimated(conv, timed, backend), default=(0.0, None), key=lambda pair: pair[0])[1]


def _applies(record: Record, log: Log) -> bool:
    """Whether a record is known to be of today's kernel without emitting it. What an earlier process emitted does not count here: the
    same question has the same answer on every machine.
    """
    made_here = record.tvm == tvm.__version__ and is_current(record.target, record.method, record.generator)
    return record.method in SCHEDULES and (made_here or proven(record, [log]))


def _estimated(conv: Conv2d, records: Iterable[Record], backend: Backend) -> Iterable[tuple[float, float | None]]:
    """The estimate of each record's tile, and the measured cost over it; not of tiles that today's rules refuse."""
    for record in records:
        row = schedule_of(record.method)
        try:
            tile = backend.tile(row, record.tile)
            if backend.violations(conv, row, tile):
                continue
            estimate = backend.cost(conv, row, tile)
        except (ValueError, TypeError, KeyError):
            continue
        if estimate > 0:
            yield estimate, record.cost / estimate
