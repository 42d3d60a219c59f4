"""Reports of random kernels (tests/fuzz/kernels.py) and of kernels with deliberate mistakes (tests/fuzz/broken.py)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from im2win.bench.source import kernels_of, same_kernels
from im2win.common import markdown
from im2win.reports.memory import mebibytes

Study = Mapping[str, Any]
RIGHT = ("equal", "close", "refused")
CAUGHT, MISSED, EQUIVALENT, REFUSED, NOT_JUDGED = "caught", "missed", "equivalent", "refused", "not judged"


def table(studies: Sequence[Study]) -> str:
    """Markdown: a line for each campaign, then each failure, what no algorithm computes, and what the campaigns ran with."""
    columns = ["kernels", "machine", "cases", *RIGHT, "failures", "peak memory, MiB", "CPU s a case"]
    found = sorted(studies, key=lambda study: (study["target"], study["device"]))
    parts = [markdown.table(columns, [_row(study) for study in found], words=2)]
    parts += [f"{_kernels(study)}, case {one['index']}: {one['kind']}." for study in found for one in study["failures"]]
    parts += [f"{_kernels(study)}, refused: {_refused(study)}." for study in found if study["refused"]]
    return "\n\n".join([*parts, *dict.fromkeys(_caption(study) for study in found), *_changed(found)])


def _kernels(study: Study) -> str:
    return f"CUDA, emulated, for {study['gpu']}" if study["gpu"] else "CPU"


def _row(study: Study) -> list[str]:
    outcomes, cases = study["outcomes"], study["count"]
    counts = [cases, *(outcomes.get(name, 0) for name in RIGHT), len(study["failures"])]
    measured = [mebibytes(study["peak_bytes"]), markdown.number(study["cpu_s"] / cases, 2)]
    return [_kernels(study), f"`{study['device']}`", *map(str, counts), *measured]


def _refused(study: Study) -> str:
    return ", ".join(f'"{reason}" ({count})' for reason, count in study["refused"].items())


def _made(study: Study) -> str:
    """Where, with what and when a study was made."""
    versions = f"apache-tvm {study['versions']['apache-tvm']}, Python {study['versions']['python']}"
    commit = f"commit {study['commit']}; " if study["commit"] else ""
    return f"{study['brand']}; {versions}; {commit}{study['date'][:10]}."


def _caption(study: Study) -> str:
    return f"Seed {study['seed']}; {_made(study)} Peak memory: of the largest process, or of a compiler that it ran."


def _changed(studies: Sequence[Study]) -> list[str]:
    """A sentence for each study with kernels that today's source makes otherwise."""
    said = []
    for study in studies:
        methods = [name for name, _ in kernels_of(study["digests"])]
        changed = [name for name in methods if not same_kernels(study["digests"], name)]
        if changed:
            name = study.get("kernels") or study["target"]
            said.append(f"Since then the source of {len(changed)} of {len(methods)} methods' kernels has changed ({name}).")
    return said


def broken_table(studies: Sequence[Study]) -> str:
    """Markdown for every device: a line for each kind of mistake, sums, each mistake that was missed, and what the campaigns ran with."""
    columns = ["kernels", "mistake", "injected", CAUGHT, MISSED, EQUIVALENT, REFUSED, NOT_JUDGED]
    parts = []
    for device in dict.fromkeys(study["device"] for study in studies):
        found = [study for study in studies if study["device"] == device]
        rows = [row for study in found for row in _broken_rows(study)]
        rows.append(["**all**", "", *map(str, _counts([row for study in found for row in study["rows"]]))])
        parts.append(markdown.table(columns, rows, words=2))
        parts += [_wrong(study, row) for study in found for row in study["rows"] if row.get("outcome") == _bad(row)]
        parts += dict.fromkeys(f"`{device}`; {_made(study)} Equivalent: changes no output. Refused: does not compile." for study in found)
        parts += _changed(found)
    return "\n\n".join(parts)


def _broken_rows(study: Study) -> list[list[str]]:
    kinds: dict[str, list[Mapping[str, Any]]] = {}
    for row in study["rows"]:
        kinds.setdefault(row["mistake"], []).append(row)
    right = kinds.pop("", [])
    rows = [[study["kernels"], kind, *map(str, _counts(of))] for kind, of in sorted(kinds.items())]
    ok = sum(row.get("outcome") == "ok" for row in right)
    total = _counts(study["rows"])
    return [*rows, [study["kernels"], f"**all**; without a mistake {ok} of {len(right)} pass", *map(str, total)]]


def _counts(rows: Sequence[Mapping[str, Any]]) -> list[int]:
    """Of kernels with a mistake: injected (those that were caught or missed), caught, missed, equivalent, refused, not judged."""
    found = Counter(row.get("outcome", NOT_JUDGED) for row in rows if row["mistake"])
    return [found[CAUGHT] + found[MISSED], *(found[name] for name in (CAUGHT, MISSED, EQUIVALENT, REFUSED, NOT_JUDGED))]


def _bad(row: Mapping[str, Any]) -> str:
    """The outcome that a row must not have."""
    return MISSED if row["mistake"] else CAUGHT


def _wrong(study: Study, row: Mapping[str, Any]) -> str:
    what = row["mistake"] or "no mistake"
    return f"{study['kernels']}, {row['kernel']}: {what} ({row['place']}) was {row['outcome']}: {row['why']}."
