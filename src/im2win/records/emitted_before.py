"""Fingerprints that today's source emitted in earlier processes, kept in the cache folder.

A user's records outlive versions of im2win, and no proof covers them. Without this every process would emit their kernels again at its
first look-up, half a second each.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
from pathlib import Path

import tvm

from im2win.common.files import default_folder
from im2win.records.emission import emitted_now
from im2win.records.record import Record
from im2win.registry.sources import code_digest

_DIGITS = 16


def known(record: Record) -> str | None:
    """The fingerprint of the kernel that today's source emits for a record's candidate; None if it was never emitted.

    Raises:
        ValueError: the registry has no row of its method.
    """
    return _content(_path(record)).get(_candidate(record))


def emitted_once(record: Record) -> str:
    """As `known`; a kernel that was never emitted is emitted now, and its fingerprint is kept.

    Raises:
        EmissionError: as `emission.emitted_now`. It is not kept. ValueError: as `known`.
    """
    if (found := known(record)) is not None:
        return found
    fingerprint, path = emitted_now(record), _path(record)
    _content(path)[_candidate(record)] = fingerprint
    with contextlib.suppress(OSError):  # it is only slower without
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            os.write(descriptor, f"{_candidate(record)} {fingerprint}\n".encode("ascii"))  # in one piece, whoever else writes
        finally:
            os.close(descriptor)
    return fingerprint


def _candidate(record: Record) -> str:
    """Digest of all that a candidate's kernel depends on, beside the source and TVM."""
    what = [record.conv, record.method, sorted(record.tile.items()), record.device if record.target == "cuda" else ""]
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:_DIGITS]


def _path(record: Record) -> Path:
    """The file of a record's target and method, today's source of these and this TVM."""
    method, digest = record.method.replace("/", "-"), code_digest(record.target, record.method)
    return default_folder() / "emitted" / f"{record.target}-{method}-{digest}-{tvm.__version__}.txt"


@functools.lru_cache(maxsize=64)
def _content(path: Path) -> dict[str, str]:
    """What the file held when this process first asked. Lines that are not whole are skipped."""
    try:
        lines = path.read_text(encoding="ascii", errors="replace").splitlines(keepends=True)
    except OSError:
        return {}
    whole = (line.split() for line in lines if line.endswith("\n"))
    return {words[0]: words[1] for words in whole if len(words) == 2 and len(words[0]) == _DIGITS}
