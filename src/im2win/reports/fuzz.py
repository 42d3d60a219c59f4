"""Reports of random kernels (tests/fuzz/kernels.py) and of kernels with deliberate mistakes (tests/fuzz/broken.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from im2win.common import markdown
from im2win.reports.memory import mebibytes

Study = Mapping[str, Any]
RIGHT = ("equal", "close", "refused")


def table(studies: Sequence[Study]) -> str:
    """Markdown: a line for each campaign, then each failure, then what the campaigns ran with."""
    columns = ["kernels", "machine", "cases", *RIGHT, "failures", "peak memory, MiB", "CPU s a case"]
    found = sorted(studies, key=lambda study: (study["target"], study["device"]))
    parts = [markdown.table(columns, [_row(study) for study in found], words=2)]
    parts += [f"{_kernels(study)}, case {one['index']}: {one['kind']}." for study in found for one in study["failures"]]
    return "\n\n".join([*parts, *dict.fromkeys(_caption(study) for study in found)])


def _kernels(study: Study) -> str:
    return f"CUDA, emulated, for {study['gpu']}" if study["gpu"] else "CPU"


def _row(study: Study) -> list[str]:
    outcomes, cases = study["outcomes"], study["count"]
    counts = [cases, *(outcomes.get(name, 0) for name in RIGHT), len(study["failures"])]
    measured = [mebibytes(study["peak_bytes"]), markdown.number(study["cpu_s"] / cases, 2)]
    return [_kernels(study), f"`{study['device']}`", *map(str, counts), *measured]


def _caption(study: Study) -> str:
    versions = f"apache-tvm {study['versions']['apache-tvm']}, Python {study['versions']['python']}"
    facts = f"{study['brand']}; {versions}; seed {study['seed']}; {study['date'][:10]}."
    return f"{facts} Peak memory: of the largest process, or of a compiler that it ran."


def broken_table(studies: Sequence[Study]) -> str:
    """Markdown for every device: a line for each kind of mistake, and their sum."""
    columns = ["kernels", "mistake", "injected", "caught", "equivalent"]
    parts = []
    for study in studies:
        rows = []
        for target, found in study["targets"].items():
            for kind, counts in found["kinds"].items():
                caught, missed = counts.get("caught", 0), counts.get("missed", 0)
                rows.append([target, kind, *map(str, (caught + missed, caught, counts.get("equivalent", 0)))])
            rows.append([target, "**all**", *(str(found[name]) for name in ("injected", "caught", "equivalent"))])
        parts += [markdown.table(columns, rows, words=2), f"`{study['device']}`; {study['date'][:10]}. Equivalent: changes no output."]
    return "\n\n".join(parts)
