"""Records for tests of logs and of the look-up, and the rule by which they go stale."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import tvm

from im2win.device.cpu import Machine
from im2win.records.emission import emitted
from im2win.records.log import Log
from im2win.records.record import Record
from im2win.registry.backends import Device, backend_for
from im2win.registry.ranking import default_of, default_tile
from im2win.registry.schedules import candidates
from im2win.registry.sources import code_digest
from im2win.spec.accuracy import Accuracy
from im2win.spec.conv2d import Conv2d
from im2win.spec.methods import split

CONV = Conv2d(1, 64, 56, 56, 64, 3, padding=1)
DEVICE = "intel-xeon-rocketlake-2t"
TODAY = "today"  # as a record's `generator`: the digest of today's source of its method


def ok(seconds: float = 1e-3, conv: Conv2d = CONV, **changes: Any) -> Record:
    fields: dict[str, Any] = {
        "conv": str(conv), "algorithm": "im2win/stored", "tile": {"rows": 4}, "outcome": "ok", "samples_s": [seconds],
        "device": DEVICE, "threads": 2, "target": "cpu", "tvm": "0.27.0", "im2win": "0.1.0", "fingerprint": "abc",
        "seed": 0, "trial": 0, "date": "2026-01-31T12:00:00+00:00",
    }  # fmt: skip
    fields |= changes
    if "schedule" not in fields:
        fields["algorithm"], fields["schedule"] = split(fields["algorithm"])
    return of_today(Record(**fields)) if fields.get("generator") == TODAY else Record(**fields)


def of_today(record: Record) -> Record:
    """A record as if today's source had generated its kernel."""
    return replace(record, generator=code_digest(record.target, record.method))


def bad(outcome: str = "crashed", **changes: Any) -> Record:
    return ok(outcome=outcome, samples_s=[], message="signal 11", **changes)


def fill(log: Log, *records: Record) -> Log:
    for record in records:
        log.append(record)
    return log


def stale(record: Record) -> str | None:
    if record.tvm != "0.27.0":
        return f"recorded with TVM {record.tvm}"
    return None if record.fingerprint == "abc" else f"other kernel: {record.fingerprint}"


def beside_default(
    record: Record, device: Device, names: Sequence[str] | None = None, accuracy: Accuracy = "float32", slower: float = 10.0
) -> list[Record]:
    """A record, and one of today's default tile of its layer, that much slower: it must have met it to be used.

    names: the algorithms that are asked for; None for all.
    """
    able = [row.key for row in candidates("auto", record.conv2d, backend_for(device).target, accuracy)] if names is None else names
    found = default_of(record.conv2d, able, device, accuracy, named=names is not None)
    if found is None or (record.method, record.tile) == (found[0], found[1].as_dict()):
        return [record]
    algorithm, schedule = split(found[0])
    samples = tuple(slower * seconds for seconds in record.samples_s)
    default = replace(record, algorithm=algorithm, schedule=schedule, tile=found[1].as_dict(), samples_s=samples)
    return [record, of_today(default) if record == of_today(record) else default]


def fastest(key: str, method: str, accuracy: Accuracy = "float32") -> list[Record]:
    """Valid records of this CPU by which a method's default tile is faster than the layer's, so that the look-up takes it."""
    conv, machine = Conv2d.parse(key), Machine.host()
    backend = backend_for(machine)
    timed = {default_tile(conv, name, machine, accuracy): seconds for name, seconds in (("auto", 1.0), (method, 1e-6))}
    return [
        ok(
            seconds, conv, algorithm=name, tile=tile.as_dict(), fingerprint=emitted(conv, name, tile.as_dict(), "cpu"),
            device=backend.name, threads=backend.threads, tvm=tvm.__version__,
        )
        for (name, tile), seconds in timed.items()
    ]  # fmt: skip
