"""Tables, their form in Markdown, and the format of their numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Table:
    """A table whose first `words` columns are text and the others numbers. Cells may hold `code` and **bold** as Markdown has them."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: int = 1

    def markdown(self) -> str:
        """The table in Markdown."""
        return table(self.columns, self.rows, self.words)


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], words: int = 1) -> str:
    """A table whose first `words` columns are text and the others numbers."""
    rule = ["---"] * words + ["---:"] * (len(columns) - words)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (columns, rule, *rows))


def number(value: float | None, digits: int) -> str:
    """The value with `digits` decimals; a dash for None."""
    return "–" if value is None else f"{value:.{digits}f}"  # noqa: RUF001


def ms(value: float | None) -> str:
    """Milliseconds with about three significant digits."""
    return number(value, 3 if value is not None and value < 10 else 1 if value is not None and value >= 100 else 2)
