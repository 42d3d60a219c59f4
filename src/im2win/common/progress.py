"""Progress of work that takes longer than a user wants to wait in the dark: a bar in a terminal, log lines elsewhere."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from im2win.common.quantities import duration

if TYPE_CHECKING:
    from rich.progress import Progress

_log = logging.getLogger("im2win")

EVERY_S = 5.0  # seconds between two log lines


class Reporter:
    """How far a piece of work has come. Its methods may be called from any thread. This class shows nothing.

    Attributes:
        what: the work, such as "compiling".
        done, total: what is done and what there is to do, in the caller's unit; `total` is None as long as it is not known.
        note: what is going on.
    """

    def __init__(self, what: str, total: int | None = None) -> None:
        self.what, self.done, self.total, self.note = what, 0, total, ""
        self.started = time.monotonic()

    def step(self, done: int | None = None, note: str = "", *, total: int | None = None) -> None:
        """Shows how far the work has come.

        Args:
            done: what is done in all (not since the last call); None leaves it as it is.
            note: what is going on, in place of the last note; "" shows none.
            total: what there is to do in all; None leaves it as it is.
        """
        self.done = self.done if done is None else done
        self.total = self.total if total is None else total
        self.note = note
        self._show()

    def line(self, text: str) -> None:
        """Prints a line on stdout, which stays where it is while progress is shown."""
        print(text)

    def _show(self) -> None:
        pass

    def count(self) -> str:
        """What is done: "12 of 63", or "12" if the total is unknown, or "" if nothing is known."""
        return f"{self.done} of {self.total}" if self.total is not None else str(self.done or "")

    def text(self) -> str:
        """The state in words: "compiling: 12 of 63 in 7 s, conv3"."""
        count = f"{self.count()} in " if self.count() else ""
        note = f", {self.note}" if self.note else ""
        return f"{self.what}: {count}{duration(time.monotonic() - self.started)}{note}"


class _Lines(Reporter):
    """Log lines of the logger "im2win", every `EVERY_S` seconds whether there was a step or not, and one at the end."""

    def __init__(self, what: str, total: int | None) -> None:
        super().__init__(what, total)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._repeat, name="im2win-progress", daemon=True)
        self._thread.start()

    def _repeat(self) -> None:
        while not self._ended.wait(EVERY_S):
            _log.info("%s", self.text())

    def close(self, *, failed: bool) -> None:
        self._ended.set()
        self._thread.join()
        if not failed:
            _log.info("%s", self.text())


class _Bar(Reporter):
    """A row of the bar that this process shows; nested and simultaneous work has a row each."""

    _lock = threading.Lock()
    _rows = 0
    _shown: Progress | None = None

    def __init__(self, what: str, total: int | None) -> None:
        super().__init__(what, total)
        with _Bar._lock:
            if _Bar._shown is None:
                _Bar._shown = _new_bar()
                _Bar._shown.start()
            _Bar._rows += 1
            self._bar = _Bar._shown
            self._task = self._bar.add_task(what, total=total, count=self.count(), note="")

    def _show(self) -> None:
        self._bar.update(self._task, completed=self.done, total=self.total, count=self.count(), note=self.note)

    def line(self, text: str) -> None:
        if sys.stdout.isatty():  # the same terminal, where a plain print would break the bar
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            print(text)

    def close(self, *, failed: bool) -> None:
        with _Bar._lock:
            self._bar.remove_task(self._task)
            _Bar._rows -= 1
            if not _Bar._rows:
                self._bar.stop()
                _Bar._shown = None


def _new_bar() -> Progress:
    """A bar on stderr. Output to a stdout that is no terminal must not be redirected to it."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    texts = (TextColumn("{task." + name + "}", markup=False) for name in ("description", "fields[count]", "fields[note]"))
    description, count, note = texts
    columns = SpinnerColumn(), description, BarColumn(bar_width=24), count, TimeElapsedColumn(), note
    return Progress(*columns, console=Console(stderr=True), transient=True, redirect_stdout=sys.stdout.isatty())


def shows_bars() -> bool:
    """Whether stderr is a terminal that can draw a bar."""
    return sys.stderr.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")


@contextlib.contextmanager
def reporting(what: str, total: int | None = None, *, quiet: bool = False) -> Iterator[Reporter]:
    """Shows the progress of what the context does, from its beginning.

    If stderr is a terminal, a bar is shown there, which vanishes at the end; a spinner runs while the total is unknown. Elsewhere the
    logger "im2win" gets lines of level INFO, every `EVERY_S` seconds and at the end if nothing failed. Contexts may be nested.

    Args:
        what: the work, such as "compiling".
        total: what there is to do, in any unit; `Reporter.step` may say it later.
        quiet: show nothing.
    """
    if quiet:
        yield Reporter(what, total)
        return
    reporter = _Bar(what, total) if shows_bars() else _Lines(what, total)
    failed = True
    try:
        yield reporter
        failed = False
    finally:
        reporter.close(failed=failed)
