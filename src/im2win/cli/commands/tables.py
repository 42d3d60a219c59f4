"""Output of the verbs: one console and one format for each kind of number."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

PIPE_WIDTH = 400  # columns when the output is no terminal, so that nothing is truncated


def console() -> Console:
    """The console of stdout. It is created for each call, because tests and notebooks replace stdout."""
    return Console(width=None if sys.stdout.isatty() else PIPE_WIDTH, highlight=False)


@contextlib.contextmanager
def progress(title: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on stderr, if that is a terminal. Call it with what is done and the total."""
    with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def table(title: str | None, columns: Sequence[str], rows: Iterable[Sequence[object]], left: int = 1) -> Table:
    """A table whose first `left` columns are text and the others numbers, aligned right."""
    result = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for index, column in enumerate(columns):
        result.add_column(column, justify="left" if index < left else "right", no_wrap=True)
    for row in rows:
        result.add_row(*("-" if cell is None else str(cell) for cell in row))
    return result


def bytes_text(count: int | None) -> str:
    """Bytes in the largest unit that leaves at least one: "0 B", "36.0 KiB", "1.5 MiB"."""
    if count is None:
        return "-"
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if abs(size) < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def milliseconds(seconds: float | None) -> str:
    """Seconds as milliseconds with three significant digits or more."""
    return "-" if seconds is None else f"{seconds * 1e3:.3f}" if seconds < 1 else f"{seconds * 1e3:.0f}"


def duration(seconds: float | None) -> str:
    """A duration: "45 s", "3:05"."""
    if seconds is None:
        return "-"
    whole = round(seconds)
    return f"{whole} s" if whole < 60 else f"{whole // 60}:{whole % 60:02d}"


def gflops(flops: int, seconds: float | None) -> str:
    """Floating-point operations per second, in units of 1e9."""
    return "-" if not seconds else f"{flops / seconds / 1e9:.0f}"
