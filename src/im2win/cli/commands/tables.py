"""Output of the verbs: one console, one form of tables, and JSON for programs."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from im2win.common.progress import reporting
from im2win.common.quantities import bytes_text, duration, gflops, milliseconds

__all__ = ["bytes_text", "console", "duration", "gflops", "milliseconds", "print_json", "progress", "table"]

PIPE_WIDTH = 400  # columns when the output is no terminal, so that nothing is truncated


def console() -> Console:
    """The console of stdout. It is created for each call, because tests and notebooks replace stdout."""
    return Console(width=None if sys.stdout.isatty() else PIPE_WIDTH, highlight=False)


def print_json(value: Any) -> None:
    """Prints a value as JSON on stdout, with nothing else: no colours and no broken lines."""
    typer.echo(json.dumps(value, indent=1))


@contextlib.contextmanager
def progress(title: str) -> Iterator[Callable[[int, int], None]]:
    """Progress of work that counts: call it with what is done and the total."""
    with reporting(title) as reporter:
        yield lambda done, total: reporter.step(done, total=total)


def table(title: str | None, columns: Sequence[str], rows: Iterable[Sequence[object]], left: int = 1) -> Table:
    """A table whose first `left` columns are text and the others numbers, aligned right."""
    result = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for index, column in enumerate(columns):
        result.add_column(column, justify="left" if index < left else "right", no_wrap=True)
    for row in rows:
        result.add_row(*("-" if cell is None else str(cell) for cell in row))
    return result
