"""Which record of a layer a look-up uses: one that beats today's default tile (`im2win.records.merit`), and by how much it has to.

A record of this device and layer that is hardly faster than that of the default tile, by less than `LEAST_SAVING` and `LEAST_OWN_GAIN`,
gives way to it: gains as small as that often did not hold in a second run.

A record of another device, or of a layer that differs in more than its epilogue, is borrowed. It says less, so two more things are asked
of it: it was faster there than the default tile by `LEAST_GAIN`, and the cost model expects its tile to take here at most `MOST_EXPECTED`
times the default tile's time.

A record of this device and convolution whose default tile nobody measured is but a hint, yet its own time is known. It gives way only where
the default tile's estimate promises less by more than the error that estimates are known to have (`im2win.records.estimates`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from im2win.device.gpu import KNOWN, Gpu
from im2win.records import estimates
from im2win.records.log import Log
from im2win.records.merit import Applies, Standing, latest, standing
from im2win.records.proofs import current_proof
from im2win.records.record import Record
from im2win.records.tiers import same_convolution
from im2win.registry.backends import Device, backend_for
from im2win.registry.interface import Tile
from im2win.registry.ranking import default_of
from im2win.registry.schedules import candidates, schedule_of
from im2win.registry.sources import choice_digest
from im2win.spec import methods
from im2win.spec.accuracy import Accuracy
from im2win.spec.conv2d import Conv2d

LEAST_GAIN = 1.1  # of a borrowed record over the default tile, where it was measured
LEAST_SAVING, LEAST_OWN_GAIN = 0.5e-6, 1.05  # seconds a call and factor; see docs/measuring.md
_ROUNDED = 1e-3  # proofs state gains with three decimals
MOST_EXPECTED = 1.1  # of a borrowed tile's modelled cost over the default tile's, for the layer that borrows

UNMEASURED = ("new-algorithm", "new-tile")  # standings of a hint that no measurement refutes

Outweighs = Callable[[Record, Conv2d], bool]
Settled = Callable[[Record, Sequence[Record], Log], Record]
DefaultOf = Callable[[Conv2d, Device, Accuracy], tuple[str, Tile]]


def rivals_now(target: str, accuracy: Accuracy, *, default: bool = False) -> str:
    """What `Record.rivals` says of records written beside a measurement of today's default tile; `default`: of that tile's own record."""
    return f"{accuracy}:{choice_digest(target)}" + (":default" if default else "")


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


def vouched(record: Record, records: Sequence[Record], log: Log, device: Device, accuracy: Accuracy) -> Standing | None:
    """What a record of this device itself or its log's proof says of its standing; None if neither says, or if both are out of date."""
    today, own = (rivals_now(record.target, accuracy, default=default) for default in (False, True))
    here = [one for one in records if (one.target, one.threads) == (record.target, record.threads)]
    if default := next((one for one in reversed(here) if one.rivals == own), None):
        return Standing("met", default.method, default.cost / record.cost)
    proof = current_proof(log.folder / record.device)
    listed = proof.choices.layers.get((record.conv, accuracy)) if proof and proof.choices and proof.choices.about(device) else None
    kind, method, gain, count = listed or ("", "", None, 0)
    if gain is not None:  # that of the best record
        gain *= min(one.cost for one in latest(here)) / record.cost
    if kind != "met" and any(one.rivals == today for one in here):
        return Standing("met", record.method)
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
        logs: whose records say how far estimates are from measured times.
    """

    device: Device
    accuracy: Accuracy
    names: tuple[str, ...] | None
    applies: Applies
    default: DefaultOf | None = None
    logs: Sequence[Log] = ()
    _hints: dict[int, tuple[Record, str]] = field(default_factory=dict, compare=False, repr=False)  # kinds of standing, by `id` of records

    def unearned(self, record: Record, records: Sequence[Record], log: Log, conv: Conv2d) -> str | None:
        """The reason why a record is but a hint for a layer on this device; None if it has earned its place."""
        found = self.standing(record, records, log)
        self._hints[id(record)] = record, found.kind
        if found.reason or (record.device == backend_for(self.device).name and same_convolution(conv, record.conv2d)):
            return found.reason
        if found.gain is None:
            found = self.standing(record, records, log, anew=True)
        if found.reason or found.gain is None or found.gain < LEAST_GAIN:
            return found.reason or f"it is hardly better there than today's default tile, of {methods.shown(found.method)}"
        return self._expected_slower(record, conv)

    def outweighs(self, record: Record, conv: Conv2d) -> bool:
        """Whether a hint that `unearned` was asked about is better for a layer, by its measured time, than what its default tile promises.

        That holds for records of this device and convolution alone, and not where the default tile was measured.
        """
        backend, wanted = backend_for(self.device, self.accuracy), record.conv2d
        _, kind = self._hints.get(id(record), (record, ""))
        if record.device != backend.name or not same_convolution(conv, wanted) or kind not in UNMEASURED:
            return False
        default = self._default(wanted, backend.target)
        if default is None:
            return True
        factor = estimates.factor(wanted, default, self.device, self.accuracy, self.logs)
        return factor is not None and record.cost <= factor * backend.cost(wanted, schedule_of(default[0]), default[1])

    def settled(self, record: Record, records: Sequence[Record], log: Log) -> Record:
        """The record to use of a layer's best one on its own device: that of the default tile instead, where the best one saves little.

        Only records and proofs are asked, see `LEAST_SAVING` and `LEAST_OWN_GAIN`; nothing is ranked.
        """
        found = vouched(record, records, log, self.device, self.accuracy) if self.names is None else None
        gain = found.gain if found is not None and found.kind == "met" else None
        if found is None or gain is None or not 1 <= gain < LEAST_OWN_GAIN:
            return record
        here = [one for one in records if (one.target, one.threads) == (record.target, record.threads)]
        alike = [one for one in latest(here) if one.method == found.method and self.applies(one) is None]
        off = {place: abs(one.cost / record.cost - gain) for place, one in enumerate(alike)}
        near = min(off, key=off.__getitem__, default=None)
        if near is None or off[near] > _ROUNDED or alike[near].cost - record.cost >= LEAST_SAVING:
            return record
        return alike[near]

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
