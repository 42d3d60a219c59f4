"""Proofs that the records of a log still apply: each was emitted anew by today's code and its kernel found equal.

Emitting takes a tenth of a second on a GPU's kernel and half a second on a CPU's, too long for every look-up. So a proof is made once,
by `im2win logs restamp`, and kept beside the records as ``<folder>/<device>/proof.json``: digests of the source that emitted them
(`im2win.registry.sources`) and of every record that was found equal. As long as the source is that source, nothing is emitted again.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Sequence
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

FILE = "proof.json"
_DIGITS = 12
_CHUNK = 16


def identity(record: Record) -> str:
    """Digest of what a proof is about: the candidate, its device, and the fingerprint of the kernel that was timed."""
    what = [record.conv, record.method, sorted(record.tile.items()), record.target, record.device, record.tvm, record.fingerprint]
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:_DIGITS]


@dataclass(frozen=True)
class Proof:
    """What `proof.json` holds.

    tvm: version that emitted. target: kind of the device. source: digest of the source that emitted (`sources.code_digest`).
    records: identities of the records that were emitted anew and found equal.
    """

    tvm: str
    target: str
    source: str
    records: frozenset[str] = field(repr=False)

    def current(self) -> bool:
        """Whether it was made with this version of TVM and with today's source."""
        made_here = self.tvm == tvm.__version__ and self.target in sources.TARGETS
        return made_here and self.source == sources.code_digest(self.target)

    def to_text(self) -> str:
        """The file's text: one identity a line, so that versions can be compared."""
        facts = {"tvm": self.tvm, "target": self.target, "source": self.source}
        return json.dumps({**facts, "records": sorted(self.records)}, indent=0) + "\n"

    @classmethod
    def from_text(cls, text: str) -> Proof | None:
        """The proof that a file's text holds; None if it holds none."""
        try:
            found = json.loads(text)
            facts = {name: str(found[name]) for name in ("tvm", "target", "source")}
            return cls(records=frozenset(map(str, found["records"])), **facts)
        except (ValueError, TypeError, KeyError, RecursionError):
            return None


@functools.lru_cache(maxsize=64)
def _read(path: Path, stamp: tuple[int, int]) -> Proof | None:
    proof = Proof.from_text(path.read_text(encoding="utf-8"))
    return proof if proof is not None and proof.current() else None


def current_proof(folder: Path) -> Proof | None:
    """The proof of a device's folder, if it has one and today's source is that of the proof."""
    path = folder / FILE
    try:
        status = os.stat(path)
        return _read(path, (status.st_mtime_ns, status.st_size))
    except (OSError, UnicodeDecodeError):
        return None


def proven(record: Record, logs: Iterable[Log]) -> bool:
    """Whether a current proof of one of these logs covers a record."""
    found = (current_proof(log.folder / record.device) for log in logs)
    return any(proof is not None and identity(record) in proof.records for proof in found)


@dataclass(frozen=True)
class Verdict:
    """What emitting a record's candidate anew showed: its fingerprint is still that of the record, or why it is not."""

    record: Record
    reason: str | None


def verdict(record: Record) -> Verdict:
    """Emits a record's candidate and compares; nothing is taken on trust."""
    if record.tvm != tvm.__version__:
        return Verdict(record, f"recorded with TVM {record.tvm}, this is {tvm.__version__}")
    try:
        now = emitted_now(record)
    except EmissionError as error:
        return Verdict(record, str(error))
    return Verdict(record, None if now == record.fingerprint else f"its kernel has changed since ({record.fingerprint}, now {now})")


def _verdicts(records: Sequence[Record]) -> list[Verdict]:
    return [verdict(record) for record in records]


def restamp(
    log: Log, device: str, *, processes: int = 1, write: bool = True, progress: Callable[[int, int], Any] = lambda done, of: None
) -> list[Verdict]:
    """Emits every record of a device anew; those whose kernels are equal are what the device's proof covers from now on.

    Args:
        processes: that emit at the same time.
        write: whether to write the proof; without, an existing one stays as it is.
        progress: called with the number of records done and of all.

    Returns:
        A verdict for every record, in no order that means anything.

    Raises:
        OSError: the proof cannot be written.
    """
    records = [record for conv in log.convs(device) for record in log.read(conv, device)]
    chunks = [records[start : start + _CHUNK] for start in range(0, len(records), _CHUNK)]
    found: list[Verdict] = []
    with ProcessPoolExecutor(processes) as pool:
        for part in pool.map(_verdicts, chunks) if processes > 1 else map(_verdicts, chunks):
            found += part
            progress(len(found), len(records))
    if write and records:
        target, equal = records[0].target, frozenset(identity(one.record) for one in found if one.reason is None)
        proof = Proof(tvm.__version__, target, sources.code_digest(target), equal)
        replace_text(log.folder / device / FILE, proof.to_text())
    return found
