"""Log lines of im2win on stderr while a verb runs: warnings always, progress where there is no terminal for a bar."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator

from im2win.common.progress import shows_bars


class _Stderr(logging.Handler):
    """Prints to what stderr is at that moment: a bar replaces it in order to print above itself. Progress is logged by "im2win" itself."""

    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno >= logging.WARNING or record.name == "im2win"

    def emit(self, record: logging.LogRecord) -> None:
        print(f"im2win: {self.format(record)}", file=sys.stderr)


@contextlib.contextmanager
def log_lines() -> Iterator[None]:
    """A context in which lines of the logger "im2win" are printed on stderr."""
    logger, handler = logging.getLogger("im2win"), _Stderr()
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.WARNING if shows_bars() else logging.INFO)
    try:
        yield
    finally:
        logger.setLevel(before)
        logger.removeHandler(handler)
