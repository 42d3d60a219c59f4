"""Report of a mutation run (tests/mutation/mutants.py): by area, what became of its mutants; and every mutant that no test noticed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from im2win.common import markdown
from im2win.studies.entries import INCOMPETENT, KILLED, SURVIVED, TIMEOUT

Study = Mapping[str, Any]
EQUIVALENT = "equivalent"
NOT_RUN = "not run"
COLUMNS = ("drawn", KILLED, TIMEOUT, INCOMPETENT, SURVIVED, EQUIVALENT, NOT_RUN, "noticed")


def table(studies: Sequence[Study]) -> str:
    """Markdown for every device: a line for each area, then the mutants that survived, with the reason of those that are equivalent."""
    return "\n\n".join("\n\n".join([_areas(study), _survivors(study), _caption(study)]) for study in studies)


def counts(rows: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Numbers of mutants that were drawn, and of these by outcome. Survivors with a reason are equivalent, the others have survived."""
    found = {name: sum(_outcome(row) == name for row in rows) for name in COLUMNS[1:-1]}
    return {"drawn": len(rows), **found}


def noticed(found: Mapping[str, int]) -> float | None:
    """The share of mutants that something noticed, of those that ran and are not equivalent; None if there are none."""
    meant = found["drawn"] - found[NOT_RUN] - found[EQUIVALENT]
    return (meant - found[SURVIVED]) / meant if meant else None


def _outcome(row: Mapping[str, Any]) -> str:
    outcome: str = row.get("outcome", NOT_RUN)
    return EQUIVALENT if outcome == SURVIVED and row.get(EQUIVALENT) else outcome


def _areas(study: Study) -> str:
    areas = list(dict.fromkeys(row["area"] for row in study["mutants"]))
    rows = [_cells(f"`{area}`", [row for row in study["mutants"] if row["area"] == area]) for area in areas]
    return markdown.table(["area", *COLUMNS], [*rows, _cells("all", study["mutants"])])


def _cells(title: str, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    found = counts(rows)
    share = noticed(found)
    return [title, *(str(found[name]) for name in COLUMNS[:-1]), "–" if share is None else f"{100 * share:.0f} %"]  # noqa: RUF001


def _survivors(study: Study) -> str:
    rows = [row for row in study["mutants"] if row.get("outcome") == SURVIVED]
    cells = [[f"`{row['file']}`:{row['line']}", _code(row["diff"]), _why(row)] for row in rows]
    return markdown.table(["survivor", "becomes", "why"], cells, words=3) if cells else "No mutant survived."


def _why(row: Mapping[str, Any]) -> str:
    """Why a mutant survived."""
    left_out = ", ".join(f"`{name}`" for name in row.get("left_out", ()))
    return row.get(EQUIVALENT) or "no test notices it" + (f"; left out: {left_out}" if left_out else "")


def _code(diff: str) -> str:
    """The lines that a mutant puts in place of others, as code in a cell."""
    lines = [line[1:].strip() for line in diff.splitlines() if line.startswith("+") and line[1:].strip()]
    return f"`{' '.join(lines)}`".replace("|", "\\|") if lines else "nothing"


def _caption(study: Study) -> str:
    versions = study["versions"]
    commit = f"commit {study['commit']}; " if study.get("commit") else ""
    seconds = sum(row.get("seconds", 0.0) for row in study["mutants"])
    return (
        f"Sample of seed {study['seed']}, {study['brand']} (`{study['device']}`); Python {versions.get('python', '?')}, "
        f"apache-tvm {versions.get('apache-tvm', '?')}; {commit}{study['date'][:10]}; {seconds / 3600:.1f} hours of tests. "
        "Noticed: of the mutants that ran and are not equivalent, those that fail a test, do not end, or cannot be imported (incompetent)."
    )
