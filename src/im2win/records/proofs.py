"""Proofs that the records of a log still apply: today's code emitted each candidate again, and its kernel is equal to the recorded one.

Emitting a kernel takes a tenth of a second for a GPU and half a second for a CPU, which is too long for every look-up. `im2win logs
restamp` therefore makes a proof once and stores it beside the records as ``<folder>/<device>/proof.json``. It holds, by method, a digest of
the source that emitted its kernels (`im2win.registry.sources`), and a digest of every record whose kernel is equal. While the source of a
method is unchanged, no kernel of it is emitted again, whatever has changed elsewhere.

The proof also lists how the records of every layer stand against the default tile (`im2win.records.merit`), so that no space is ranked for
them (`Choices`).
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tvm

from im2win.common.files import replace_text
from im2win.records.emission import EmissionError, emitted_now
from im2win.records.log import Log
from im2win.records.record import Record
from im2win.registry import sources
from im2win.registry.backends import Device

FILE = "proof.json"
_DIGITS = 12
_CHUNK = 16


def identity(record: Record) -> str:
    """Digest of what a proof states: the candidate, its device, and the fingerprint of the kernel that was timed."""
    what = [record.conv, record.method, sorted(record.tile.items()), record.target, record.device, record.tvm, record.fingerprint]
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:_DIGITS]


def facts(device: Device) -> dict[str, Any]:
    """What the default tiles of a device depend on: its numbers, not its names."""
    names = ("brand", "mcpu", "isa", "features")
    return {name: value for name, value in dataclasses.asdict(device).items() if name not in names}


@dataclass(frozen=True)
class Choices:
    """How the records of layers stand against today's default tiles of their device.

    Attributes:
        source: digest of the source that selects default tiles (`sources.choice_digest`).
        device: the device's numbers (`facts`).
        layers: by layer's key and accuracy, the fields of the best record's `merit.Standing` and the number of records it was found from.
    """

    source: str
    device: Mapping[str, Any] = field(hash=False)
    layers: Mapping[tuple[str, str], tuple[str, str, float | None, int]] = field(hash=False, repr=False)

    def current(self, target: str) -> bool:
        """Whether today's source selects the same default tiles."""
        return self.source == sources.choice_digest(target)

    def about(self, device: Device) -> bool:
        """Whether a device has the numbers of this one."""
        return dict(self.device) == facts(device)

    def to_json(self) -> dict[str, Any]:
        """Plain values: one layer and accuracy a line."""
        rows = [
            f"{key} {accuracy} {kind} {method} {math.nan if gain is None else gain:.3f} {count}"
            for (key, accuracy), (kind, method, gain, count) in sorted(self.layers.items())
        ]
        return {"source": self.source, "device": dict(self.device), "layers": rows}

    @classmethod
    def from_json(cls, found: Any) -> Choices | None:
        """The inverse of `to_json`; None if the value is something else."""
        try:
            rows = [str(row).split() for row in found["layers"]]
            layers = {(key, accuracy): (kind, method, _known(gain), int(count)) for key, accuracy, kind, method, gain, count in rows}
            return cls(str(found["source"]), dict(found["device"]), layers)
        except (ValueError, TypeError, KeyError):
            return None


def _known(gain: str) -> float | None:
    return None if gain == "nan" else float(gain)


@dataclass(frozen=True)
class Proof:
    """The content of `proof.json`.

    Attributes:
        tvm: version that emitted the kernels.
        target: kind of the device.
        sources: by method, digest of the source that emitted its kernels (`sources.code_digest`). Empty in proofs of before, which hold one
            digest of all methods' source: these cover no record any more.
        records: identities of the records whose kernels are equal.
        choices: how the records stand against default tiles; None if that was not found, or is out of date.
    """

    tvm: str
    target: str
    sources: Mapping[str, str] = field(hash=False)
    records: frozenset[str] = field(repr=False)
    choices: Choices | None = field(default=None, repr=False)

    def about(self, method: str) -> bool:
        """Whether it was made with this version of TVM and today's source of a method's kernels."""
        made_here = self.tvm == tvm.__version__ and self.target in sources.TARGETS
        return made_here and sources.is_current(self.target, method, self.sources.get(method, ""))

    def current(self) -> bool:
        """Whether it is about every method that it names, of which there is one at least."""
        return bool(self.sources) and all(map(self.about, self.sources))

    def covers(self, record: Record) -> bool:
        """Whether today's source is known to emit a record's kernel."""
        return identity(record) in self.records and self.about(record.method)

    def to_text(self) -> str:
        """The file's text: one identity a line, so that a version-control diff is readable."""
        facts = {"tvm": self.tvm, "target": self.target, "sources": dict(sorted(self.sources.items()))}
        choices = {"choices": self.choices.to_json()} if self.choices else {}
        return json.dumps({**facts, **choices, "records": sorted(self.records)}, indent=0) + "\n"

    @classmethod
    def from_text(cls, text: str) -> Proof | None:
        """The proof in a file's text; None if the text is not a proof."""
        try:
            found = json.loads(text)
            by_method = {str(method): str(digest) for method, digest in dict(found.get("sources", {})).items()}
            records, choices = frozenset(map(str, found["records"])), Choices.from_json(found.get("choices"))
            return cls(str(found["tvm"]), str(found["target"]), by_method, records, choices)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return None


@functools.lru_cache(maxsize=64)
def _read(path: Path, stamp: tuple[int, int]) -> Proof | None:
    proof = Proof.from_text(path.read_text(encoding="utf-8"))
    if proof is None or not any(map(proof.about, proof.sources)):
        return None
    outdated = proof.choices is not None and not proof.choices.current(proof.target)
    return dataclasses.replace(proof, choices=None) if outdated else proof


def current_proof(folder: Path) -> Proof | None:
    """The proof of a device's folder; None if there is none, or if it was made from other source of every method.

    Its `choices` are None if other source selects default tiles. What generates kernels is a part of that source.
    """
    path = folder / FILE
    try:
        status = os.stat(path)
        return _read(path, (status.st_mtime_ns, status.st_size))
    except (OSError, UnicodeDecodeError):
        return None


def proven(record: Record, logs: Iterable[Log]) -> bool:
    """Whether a current proof in one of these logs covers a record."""
    found = (current_proof(log.folder / record.device) for log in logs)
    return any(proof is not None and proof.covers(record) for proof in found)


@dataclass(frozen=True)
class Verdict:
    """Result of emitting a record's candidate again: its fingerprint equals that of the record, or the reason why not."""

    record: Record
    reason: str | None


def verdict(record: Record, emit: Callable[[Record], str] = emitted_now) -> Verdict:
    """Compares the fingerprint of a record's candidate, which `emit` returns, with the record's, without use of any proof."""
    if record.tvm != tvm.__version__:
        return Verdict(record, f"recorded with TVM {record.tvm}, this is {tvm.__version__}")
    try:
        now = emit(record)
    except EmissionError as error:
        return Verdict(record, str(error))
    return Verdict(record, None if now == record.fingerprint else f"its kernel has changed since ({record.fingerprint}, now {now})")


def _verdicts(records: Sequence[Record]) -> list[Verdict]:
    return [verdict(record) for record in records]


def restamp(
    log: Log,
    device: str,
    *,
    processes: int = 1,
    write: bool = True,
    anew: bool = False,
    progress: Callable[[int, int], Any] = lambda done, of: None,
) -> list[Verdict]:
    """Emits the records of a device again that its proof does not cover: new ones, and those of methods whose source has changed.

    The device's new proof covers the records whose kernels are equal.

    Args:
        processes: number of processes that emit in parallel.
        write: whether to write the proof; without it an existing proof stays unchanged.
        anew: whether to believe no proof, and to emit every record.
        progress: called with the number of records done and the total.

    Returns:
        A verdict for every record, in arbitrary order.

    Raises:
        OSError: the proof cannot be written.
    """
    records = [record for conv in log.convs(device) for record in log.read(conv, device)]
    folder = log.folder / device
    before = current_proof(folder)
    covered = {identity(record) for record in records if before is not None and before.covers(record)} if not anew else set[str]()
    found = [Verdict(record, None) for record in records if identity(record) in covered]
    rest = [record for record in records if identity(record) not in covered]
    chunks = [rest[start : start + _CHUNK] for start in range(0, len(rest), _CHUNK)]
    with ProcessPoolExecutor(processes) as pool:
        for part in pool.map(_verdicts, chunks) if processes > 1 else map(_verdicts, chunks):
            found += part
            progress(len(found), len(records))
    if write and records:
        target, equal = records[0].target, frozenset(identity(one.record) for one in found if one.reason is None)
        stated = Proof.from_text((folder / FILE).read_text(encoding="utf-8")) if (folder / FILE).is_file() else None
        # choices that are out of date say nothing of layers, but still state the numbers of the device
        methods = {record.method for record in records} & set(sources.methods())
        by_method = {method: sources.code_digest(target, method) for method in sorted(methods)}
        proof = Proof(tvm.__version__, target, by_method, equal, stated.choices if stated else None)
        replace_text(folder / FILE, proof.to_text())
    return found
