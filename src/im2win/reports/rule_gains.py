"""Report of the study of the reconstructor's rules on TVM's schedules (studies/rule_gains.py): gains, and what racecheck found."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from im2win.common import markdown
from im2win.reports.scheduled import geometric_mean
from im2win.studies.entries import ALL_RULES, DEFAULT_RULES, RULES_IN_ORDER, WITHOUT_ONE

Study = Mapping[str, Any]

Times = Mapping[str, float]
"""Milliseconds of a problem's kernels, by their rules."""


def table(studies: Sequence[Study]) -> str:
    """Markdown for every device: a line for each rule, then for each problem, then what racecheck found."""
    parts = (part for study in studies for part in (_rules(study), _problems(study), _races(study), _caption(study)))
    return "\n\n".join(part for part in parts if part)


def times(study: Study) -> dict[tuple[str, str, str], dict[str, float]]:
    """Times by layer, problem and algorithm; a kernel with the source of another has its time."""
    found: dict[tuple[str, str, str], dict[str, float]] = {}
    for entry in study["entries"]:
        one = found.setdefault((entry["layer"], entry["conv"], entry["algorithm"]), {})
        if entry["ms"] is not None:
            one[entry["rules"]] = entry["ms"]
        elif entry["same_as"] in one:
            one[entry["rules"]] = one[entry["same_as"]]
    return found


def gains(study: Study, before: str, after: str) -> list[float]:
    """How much faster kernels are with the rules `after` than with `before`, of those whose source differs."""
    same = {(one["conv"], one["algorithm"], one["rules"]): one["same_as"] for one in study["entries"] if one["same_as"] is not None}
    found = []
    for (_, conv, algorithm), ms in times(study).items():
        first, second = (same.get((conv, algorithm, rules), rules) for rules in (before, after))
        differ = first != second
        if before in ms and after in ms and differ:
            found.append(ms[before] / ms[after])
    return found


def _shown(found: Sequence[float]) -> list[str]:
    if not found:
        return ["0", "-", "-"]
    return [str(len(found)), f"{geometric_mean(found):.2f}x", f"{min(found):.2f}x to {max(found):.2f}x"]


def _rules(study: Study) -> str:
    """What each rule gains alone, and where all others are applied."""
    rows = [[rule, *_shown(gains(study, "", rule)), *_shown(gains(study, without, ALL_RULES))] for rule, without in WITHOUT_ONE.items()]
    for name, rules in (("default", DEFAULT_RULES), ("all", ALL_RULES)):
        rows.append([f"{name} rules", *_shown(gains(study, "", rules)), "", "", ""])
    best = [ms[""] / min(ms.values()) for ms in times(study).values() if "" in ms]
    rows.append(["best form of each kernel", *_shown(best), "", "", ""])
    heads = ["rules", "kernels changed", "gain alone", "from, to", "kernels changed", "gain beside the others", "from, to"]
    return markdown.table(heads, rows, words=1)


def _problems(study: Study) -> str:
    """Milliseconds without rules, and the gain of each form."""
    forms = {**{rule: rule for rule in RULES_IN_ORDER}, "default": DEFAULT_RULES, "all": ALL_RULES}
    rows = []
    for (layer, conv, algorithm), ms in times(study).items():
        plain = ms.get("", math.nan)
        cells = [f"{plain / ms[rules]:.2f}x" if rules in ms else "-" for rules in forms.values()]
        best = min(ms, key=lambda rules: ms[rules], default="")
        rows.append([layer, f"`{conv}`", algorithm.partition("/")[0], f"{plain:.3f}", *cells, best or "none"])
    return markdown.table(["layer", "problem", "algorithm", "without rules ms", *forms, "fastest"], rows, words=3)


def _races(study: Study) -> str:
    """What racecheck found; "" where it has not run."""
    rows = []
    for race in study["races"]:
        found = race["failed"] or race["hazard"] or "no hazard"
        kernel = "without a barrier" if race["barriers_removed"] else f"{race['changes']} changes"
        rows.append([f"`{race['conv']}`", race["algorithm"].partition("/")[0], kernel, found])
    return markdown.table(["problem", "algorithm", "kernel", "racecheck"], rows, words=4) if rows else ""


def _caption(study: Study) -> str:
    versions = ", ".join(f"{name} {study['versions'][name]}" for name in ("apache-tvm", "cuda"))
    return (
        f"The tile that the model ranks first, untuned; {study['brand']} (`{study['device']}`); {versions}; {study['date'][:10]}. Gains: "
        "time without the rule over time with it, geometric means over the kernels whose source the rule changes."
    )
