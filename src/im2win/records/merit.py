"""When a record earns its place: today's default tile had its chance against it. Other records are hints for the tuner.

A record says which candidate was the fastest of those that were tried. A later version of the package may have algorithms and tiles that
were not among them, and its default tile may be faster than the record. A record is therefore used only where, in its log, on its device,
with its target and number of threads,

- the default tile was *met*: it has a record, and is slower or failed, or is the record itself; or
- it had *rivals*: tiles of the default's algorithm and schedule were timed, at least `LEAST_RIVALS` or all there are, and none is better.

A record of another device, or of a layer that differs in more than its epilogue, is borrowed. It says less, so two more things are asked
of it: it was faster there than the default tile by `LEAST_GAIN`, and the cost model expects its tile to take here at most `MOST_EXPECTED`
times the default tile's time.

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

from im2win.device.gpu import KNOWN, Gpu
from im2win.records.log import Log, best_first
from im2win.records.proofs import current_proof
from im2win.records.record import Record
from im2win.records.tiers import same_convolution
from im2win.registry.backends import Backend, Device, Tile, backend_for
from im2win.registry.ranking import default_of
from im2win.registry.schedules import SCHEDULES, candidates, schedule_of
from im2win.registry.sources import choice_digest
from im2win.spec import methods
from im2win.spec.accuracy import Accuracy
from im2win.spec.conv2d import Conv2d

LEAST_RIVALS = 4  # tiles of the default's schedule; of fewer the best says little about what the model ranks first
LEAST_GAIN = 1.1  # of a borrowed record over the default tile, where it was measured
MOST_EXPECTED = 1.1  # of a borrowed tile's modelled cost over the default tile's, for the layer that borrows

DefaultOf = Callable[[Conv2d, Device, Accuracy], tuple[str, Tile]]
Applies = Callable[[Record], str | None]

_WHY = {
    "new-algorithm": "{method}, the algorithm of today's default tile, was not tried",
    "new-tile": "today's default tile, of {method}, was not tried, and too few others of this algorithm were",
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


def rivals_now(target: str, accuracy: Accuracy) -> str:
    """What `Record.rivals` of records says that were written beside a measurement of today's default tile."""
    return f"{accuracy}:{choice_digest(target)}"


def unsuited(record: Record, device: Device) -> str | None:
    """The reason why another device's record says nothing about this one's arithmetic; None if it may.

    Vectors have to be as wide, and GPUs of the same compute capability, as far as it is known.
    """
    if isinstance(device, Gpu):
        there = KNOWN.get(record.device)
        if there is None or there.capability.split(".")[0] != device.capability.split(".")[0]:
            known = f"compute capability {there.capability}" if there else "an unknown compute capability"
            return f"{record.device} has {known}, this device {device.capability}"
        return None
    lanes = record.tile.get("lanes", device.lanes)
    return None if lanes == device.lanes else f"its vectors have {lanes} lanes, this CPU's {device.lanes}"


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
    tried = _latest(one for one in records if one.method == method and (one.target, one.threads) == (record.target, record.threads))
    if own := next((one for one in tried if _is(one, tile, backend) and applies(one) is None), None):
        return Standing("met" if own.cost >= record.cost else "slower", method, own.cost / record.cost)
    rivals = list(itertools.islice((one for one in best_first(tried) if applies(one) is None), LEAST_RIVALS))
    if not rivals:
        return Standing("new-algorithm", method)
    if len(rivals) < LEAST_RIVALS and len(rivals) < len(backend.ranked(record.conv2d, SCHEDULES[method])):
        return Standing("new-tile", method)
    return Standing("rivals" if rivals[0].cost >= record.cost else "slower", method, rivals[0].cost / record.cost)


def _latest(records: Iterable[Record]) -> list[Record]:
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


def vouched(record: Record, records: Sequence[Record], log: Log, device: Device, accuracy: Accuracy) -> Standing | None:
    """What a record of this device itself or its log's proof says of its standing; None if neither says, or if both are out of date."""
    today = rivals_now(record.target, accuracy)
    if any((one.rivals, one.target, one.threads) == (today, record.target, record.threads) for one in records):
        return Standing("met", record.method)
    proof = current_proof(log.folder / record.device)
    if proof is None or proof.choices is None or not proof.choices.about(device):
        return None
    kind, method, gain, count = proof.choices.layers.get((record.conv, accuracy), ("", "", None, 0))
    if gain is not None:  # that of the best record
        gain *= min(one.cost for one in records if (one.target, one.threads) == (record.target, record.threads)) / record.cost
    found = Standing(kind, method, gain)
    return None if not kind or (found.reason and count != len(records)) else found  # later records may have met it


@dataclass(frozen=True)
class Judge:
    """Judges the records of a look-up.

    Attributes:
        device: this machine's.
        names: the algorithms that may be used; None for all that support a problem.
        applies: as `standing`.
        default: the default tile of a problem among all algorithms, if the caller keeps it; None to rank the space.
    """

    device: Device
    accuracy: Accuracy
    names: tuple[str, ...] | None
    applies: Applies
    default: DefaultOf | None = None

    def unearned(self, record: Record, records: Sequence[Record], log: Log, conv: Conv2d) -> str | None:
        """The reason why a record is but a hint for a layer on this device; None if it has earned its place."""
        found = self.standing(record, records, log)
        if found.reason or (record.device == backend_for(self.device).name and same_convolution(conv, record.conv2d)):
            return found.reason
        if found.gain is None:
            found = self.standing(record, records, log, anew=True)
        if found.reason or found.gain is None or found.gain < LEAST_GAIN:
            return found.reason or f"it is hardly better there than today's default tile, of {methods.shown(found.method)}"
        return self._expected_slower(record, conv)

    def _expected_slower(self, record: Record, conv: Conv2d) -> str | None:
        """The reason why a borrowed tile is expected to be slower for a layer than its default tile; None if it is not."""
        backend = backend_for(self.device, self.accuracy)
        default = self._default(conv, backend.target)
        if default is None:
            return None
        row = schedule_of(record.method)
        times = backend.cost(conv, row, backend.tile(row, record.tile)) / backend.cost(conv, schedule_of(default[0]), default[1])
        return f"it is expected to take {times:.2f} times as long here as the default tile" if times > MOST_EXPECTED else None

    def standing(self, record: Record, records: Sequence[Record], log: Log, *, anew: bool = False) -> Standing:
        """The standing of a layer's best record; `anew` evaluates it whatever records and proofs say."""
        backend = backend_for(self.device, self.accuracy)
        if not anew and self.names is None and record.device == backend.name:
            known = vouched(record, records, log, self.device, self.accuracy)
            if known is not None:
                return known
        return standing(record, records, self._default(record.conv2d, backend.target), backend, self.applies)

    def _default(self, conv: Conv2d, target: str) -> tuple[str, Tile] | None:
        """The default tile of a layer; None if it has none."""
        try:
            if self.names is None and self.default is not None:
                return self.default(conv, self.device, self.accuracy)
            able = [row.key for row in candidates("auto", conv, target, self.accuracy) if self.names is None or row.key in self.names]
        except ValueError:
            return None
        return default_of(conv, able, self.device, self.accuracy, named=self.names is not None)
