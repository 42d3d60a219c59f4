"""Processes that append records to a log. They import no TVM: a test starts several."""

from __future__ import annotations

from dataclasses import replace
from multiprocessing.connection import Connection

from im2win.records.log import Log
from im2win.records.record import Record


def append_many(folder: str, record: Record, count: int) -> None:
    """Appends a record with trials from 0 to `count` - 1."""
    log = Log(folder)
    for trial in range(count):
        log.append(replace(record, trial=trial))


def append_for_ever(folder: str, record: Record, done: Connection) -> None:
    """The same without end; sends each trial that is written."""
    log = Log(folder)
    for trial in range(10**9):
        log.append(replace(record, trial=trial))
        done.send(trial)
