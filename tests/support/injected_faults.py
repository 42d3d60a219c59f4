"""Lists the faults that tests inject, from the markers of the tests: `@pytest.mark.fault(SUBJECT, KIND)`.

    python tests/support/injected_faults.py             prints the table
    python tests/support/injected_faults.py --write     writes it into docs/faults.md, between its markers
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "faults.md"
_MARKER = re.compile(r"(<!-- faults -->\n).*?(<!-- /faults -->)", re.DOTALL)


@dataclass(frozen=True, order=True)
class Fault:
    """A kind of fault, what it belongs to, and the test that injects it: its file, relative to the root, and its name."""

    subject: str
    kind: str
    file: str
    test: str


class FaultError(ValueError):
    """A marker that is not understood. The message names the test."""


def of_source(source: str, file: str) -> Iterator[Fault]:
    """The faults of a test file, in order. Markers of single parameters count, too.

    Raises:
        FaultError: a marker's arguments are not two texts.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            for call in (one for decorator in node.decorator_list for one in ast.walk(decorator) if _marks(one)):
                assert isinstance(call, ast.Call)
                given = [one.value for one in call.args if isinstance(one, ast.Constant) and isinstance(one.value, str)]
                if len(given) != 2 or len(call.args) != 2:
                    raise FaultError(f"{file}: the marker `fault` of {node.name} must have a subject and a kind, both texts.")
                yield Fault(given[0], given[1], file, node.name)


def _marks(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.fault"


def faults() -> list[Fault]:
    """All faults, by subject and kind."""
    sources = {path: path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py")}
    marked = {path: text for path, text in sources.items() if "mark.fault(" in text}
    return sorted(fault for path, text in marked.items() for fault in of_source(text, path.relative_to(ROOT).as_posix()))


def table(found: list[Fault]) -> str:
    """How many kinds there are, and a Markdown table of them."""
    rows = [f"| {one.subject} | {one.kind} | `{one.file}::{one.test}` |" for one in found]
    count = len({(one.subject, one.kind) for one in found})
    return "\n".join([f"{count} kinds of faults.", "", "| subject | fault | test |", "| --- | --- | --- |", *rows]) + "\n"


def page(text: str) -> str:
    """The page's text with today's table."""
    return _MARKER.sub(lambda match: match[1] + "\n" + table(faults()) + "\n" + match[2], text)


def main() -> int:
    """Reads the command line, prints or writes the table. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--write", action="store_true", help=f"write it into {PAGE.relative_to(ROOT)}")
    if parser.parse_args().write:
        PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print(table(faults()), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
