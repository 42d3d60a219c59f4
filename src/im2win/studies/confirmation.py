"""Whether a study still says what today's source does, as `im2win.bench.confirmation` finds it for results of `im2win bench`.

Rows of most studies name the problems whose kernels they time. Such a study is confirmed where the kernels that today's source chooses for
these problems are those of the file; the rows whose kernels are others can be dropped, and measured again alone. A study of untuned layers
is confirmed where the model ranks the same tiles first, and both tiles of a row have their kernels.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from im2win.bench import source
from im2win.bench.source import MODELS as OTHER_OPERATORS
from im2win.bench.source import RUNTIME, TARGET, digests, same_kernels, stale
from im2win.builder.build import looked_up
from im2win.device.gpu import H200, KNOWN, Gpu
from im2win.records.emission import emitted
from im2win.registry.backends import Device
from im2win.registry.ranking import default_tile
from im2win.spec.conv2d import Conv2d
from im2win.studies.entries import EPILOGUES, MODELS, OPERATORS, PYTORCH, QUANTISED, SHARED, UNTUNED, ZOO

Study = Mapping[str, Any]
Keys = Sequence[str]

_RUN_BY = {RUNTIME: "other code ran its kernels' loops", OTHER_OPERATORS: "other code compiled the models' other operators"}


@dataclass(frozen=True)
class Listing:
    """Where a kind of study lists what it timed.

    rows: name of the list of rows, or of the rows by problem.
    of: from a row (where they are listed by problem, from the problem) to the keys of its problems; None if it does not name them.
    label: what names a row that the study's script can measure alone; "" if it measures all of them.
    default: whether default tiles were timed, whatever records say.
    """

    rows: str
    of: Callable[[Any], Keys | None]
    label: str = ""
    default: bool = False


def _of_network(row: Mapping[str, Any]) -> Keys | None:
    groups = row["groups"].values()
    return [key for one in groups for key in one["convs"]] if all("convs" in one for one in groups) else None


def _with_and_without(row: Mapping[str, Any]) -> Keys:
    return [row["conv"], str(Conv2d.parse(row["conv"]).with_(activation="none"))]


LISTINGS: dict[str, Listing] = {
    ZOO: Listing("rows", _of_network, "network"),
    MODELS: Listing("models", lambda row: row.get("convs"), "model"),
    OPERATORS: Listing("models", lambda row: row.get("convs"), "model"),
    QUANTISED: Listing("models", lambda row: row.get("convs"), "model"),
    EPILOGUES: Listing("layers", _with_and_without, "conv", default=True),
    PYTORCH: Listing("layers", lambda row: [row["conv"]] if row["conv"] else []),
    SHARED: Listing("layers", lambda key: [key]),
}
"""By name of the study."""


def timed(values: Study) -> frozenset[str] | None:
    """The methods whose kernels a file of results or of a study times; None if it does not name all of them."""
    if "study" not in values:
        return source.timed(values.get("suite", ""), values.get("layers", ()))
    rows = [row for row in values["rows"] if "default" in row] if values["study"] == UNTUNED else []
    return frozenset(row[what]["algorithm"] for row in rows for what in ("default", "tuned")) or None


def problems(study: Study) -> list[str]:
    """Keys of all problems whose kernels a study times; empty if its rows do not name them."""
    listing = LISTINGS[study["study"]]
    found = [listing.of(row) for row in study[listing.rows]]
    return sorted({key for keys in found if keys for key in keys}) if None not in found else []


def chosen(key: str, study: Study, device: Device) -> str:
    """The fingerprint of the kernel that today's source chooses for a problem of a study; "" where no algorithm computes it."""
    conv = Conv2d.parse(key)
    try:
        if LISTINGS[study["study"]].default:
            algorithm, tile = default_tile(conv, "auto", device)
        else:
            algorithm, tile, _ = looked_up(conv, device, accuracy=study.get("accuracy", "float32"))
    except ValueError:
        return ""
    return _fingerprint(conv, algorithm, tile.as_dict(), device)


def _fingerprint(conv: Conv2d, algorithm: str, tile: dict[str, Any], device: Device) -> str:
    return emitted(conv, algorithm, tile, "cuda" if isinstance(device, Gpu) else "cpu", KNOWN.get(device.name, H200))


def confirmed(study: Study, kernels: Mapping[str, str]) -> tuple[dict[str, Any], list[str]]:
    """A study with the fingerprints of its problems' kernels, and confirmed if they are equal; else the reasons why it is not.

    Args:
        kernels: by problem, what `chosen` returns.
    """
    then, today = made(study), _today(study)
    if stale(then) is None:
        return {**study, "kernels": dict(kernels)}, []
    if not study.get("kernels"):
        return dict(study), ["the file does not say which kernels were timed, and the source that made it was another"]
    reasons = _otherwise_run(then, today)
    reasons += [f"{key}: another kernel is chosen today" for key, kernel in kernels.items() if study["kernels"].get(key) != kernel]
    return dict(study) if reasons else {**study, "confirmed": today}, reasons


def kept(study: Study, kernels: Mapping[str, str]) -> dict[str, Any]:
    """A study without the rows for which another kernel is chosen today, confirmed: the study's script measures these anew.

    A study of which no row can be measured alone stays as it is.

    Args:
        kernels: by problem, what `chosen` returns.
    """
    listing = LISTINGS[study["study"]]
    if not listing.label:
        return dict(study)

    def changed(row: Mapping[str, Any]) -> bool:
        return any(study["kernels"].get(key) != kernels[key] for key in listing.of(row) or ())

    rows = study[listing.rows]
    gone = {row[listing.label] for row in rows if changed(row)}
    left = {**study, listing.rows: [row for row in rows if row[listing.label] not in gone]}
    return confirmed(left, {key: kernels[key] for key in problems(left)})[0]


def untuned_checked(row: Mapping[str, Any], device: Device, then: Mapping[str, str]) -> tuple[dict[str, Any], str]:
    """A row of a study of untuned layers with its kernels' fingerprints, and why today's source would time others; "" if it would not.

    A row whose session failed stays as it is.

    Args:
        then: digests of the source that made the study, or that confirmed it last.
    """
    if "default" not in row:
        return dict(row), ""
    conv = Conv2d.parse(row["conv"])
    name, tile = default_tile(conv, "auto", device)
    if (row["default"]["algorithm"], row["default"]["tile"]) != (name, tile.as_dict()):
        return dict(row), f"{conv}: another default tile is chosen today"
    choices = {what: row[what] for what in ("default", "tuned")}
    known = all("fingerprint" in one for one in choices.values())
    same = all(same_kernels(then, one["algorithm"]) for one in choices.values())
    if known and same:
        return dict(row), ""
    if not same and not known:
        return dict(row), f"{conv}: the file does not say which kernels were timed, and the source that made it was another"
    now = {what: one | {"fingerprint": _fingerprint(conv, one["algorithm"], one["tile"], device)} for what, one in choices.items()}
    if not same and now != choices:
        return dict(row), f"{conv}: its kernel has changed since"
    return {**row, **now}, ""


def untuned_confirmed(study: Study, checked: Sequence[tuple[dict[str, Any], str]]) -> tuple[dict[str, Any], list[str]]:
    """A study of untuned layers with its rows' fingerprints, confirmed if default tiles and kernels are those of today; else why it is not.

    Args:
        checked: by row, what `untuned_checked` returns.
    """
    then, today = made(study), _today(study)
    reasons = [*(reason for _, reason in checked if reason), *_otherwise_run(then, today)]
    left = {**study, "rows": [row for row, _ in checked]}
    return {**left, **({} if reasons or stale(then, timed({"study": UNTUNED, **study})) is None else {"confirmed": today})}, reasons


def untuned_kept(study: Study, checked: Sequence[tuple[dict[str, Any], str]]) -> tuple[dict[str, Any], list[str]]:
    """A study without the rows that today's source would not time, confirmed: `benchmarks/untuned.py` measures these anew.

    Where other code runs kernels, the study stays as it is, with the reasons.

    Args:
        checked: by row, what `untuned_checked` returns.
    """
    left, reasons = untuned_confirmed(study, [(row, reason) for row, reason in checked if not reason])
    return (dict(study), reasons) if reasons else (left, [])


def held(path: Path, rows: str, facts: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows of a file that need not be measured again: today's kernels and choices, with all the same facts. Empty if there is none.

    Args:
        rows: under which name the file has them.
    """
    if not path.exists():
        return []
    before = json.loads(path.read_text(encoding="utf-8"))
    same = stale(made(before), timed(before)) is None and all(before.get(name) == value for name, value in facts.items())
    return list(before[rows]) if same else []


def made(study: Study) -> Mapping[str, str]:
    """Digests of the source that made a study, or that confirmed it last."""
    digests_of: Mapping[str, str] = study.get("confirmed") or study.get("digests", {})
    return digests_of


def _today(study: Study) -> dict[str, str]:
    first = study["digests"]
    return digests(first[TARGET], models=OTHER_OPERATORS in first)


def _otherwise_run(then: Mapping[str, str], today: Mapping[str, str]) -> list[str]:
    return [reason for name, reason in _RUN_BY.items() if then.get(name) != today.get(name)]
