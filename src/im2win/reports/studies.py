"""Loads the studies that the scripts of `benchmarks/` measure besides `im2win bench`: files `studies/DEVICE/*.json` beside the results.

A file holds one study, whose name is under the key "study". `TABLES` maps names to the functions that write their tables.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from im2win.reports import algorithms as algorithms_report
from im2win.reports import deploy as deploy_report
from im2win.reports import epilogues as epilogues_report
from im2win.reports import fleet as fleet_report
from im2win.reports import fuzz as fuzz_report
from im2win.reports import launch_overlap as overlap_report
from im2win.reports import learned_model as learned_report
from im2win.reports import mutation as mutation_report
from im2win.reports import rule_gains as rules_report
from im2win.reports import scheduled as scheduled_report
from im2win.reports import sliding as sliding_report
from im2win.reports import tvm_search as tvm_report
from im2win.reports import untuned as untuned_report
from im2win.reports import winograd_tc as fused_report
from im2win.reports import zoo as zoo_report
from im2win.studies.entries import (
    ALGORITHMS,
    BROKEN,
    COLD_START,
    EPILOGUES,
    FLEET,
    FUZZ,
    LAUNCH_OVERLAP,
    LEARNED_MODEL,
    MODELS,
    MUTATION,
    OPERATORS,
    OVERHEAD,
    PYTORCH,
    QUANTISED,
    RULE_GAINS,
    SCHEDULED,
    SCHEDULED_NARROW,
    SHARED,
    SLIDING,
    TVM_SEARCH,
    UNTUNED,
    WAITING,
    WINOGRAD_TC,
    ZOO,
)

Study = Mapping[str, Any]

TABLES: dict[str, Callable[[Sequence[Study]], str]] = {
    UNTUNED: untuned_report.table,
    SLIDING: sliding_report.table,
    ALGORITHMS: algorithms_report.table,
    SCHEDULED: scheduled_report.table,
    SCHEDULED_NARROW: scheduled_report.narrow_table,
    RULE_GAINS: rules_report.table,
    TVM_SEARCH: tvm_report.table,
    WINOGRAD_TC: fused_report.table,
    MODELS: deploy_report.models_table,
    OPERATORS: deploy_report.operators_table,
    QUANTISED: deploy_report.quantised_table,
    PYTORCH: deploy_report.pytorch_table,
    OVERHEAD: deploy_report.overhead_table,
    SHARED: deploy_report.shared_table,
    COLD_START: deploy_report.cold_table,
    WAITING: deploy_report.waiting_table,
    EPILOGUES: epilogues_report.table,
    ZOO: zoo_report.table,
    FUZZ: fuzz_report.table,
    BROKEN: fuzz_report.broken_table,
    MUTATION: mutation_report.table,
    FLEET: fleet_report.table,
    LEARNED_MODEL: learned_report.table,
    LAUNCH_OVERLAP: overlap_report.table,
}


class StudyError(ValueError):
    """A file among the studies that is not one. The message names it."""


def load_all(results: Path) -> list[dict[str, Any]]:
    """The studies beside the folder of results, sorted by device and name.

    Raises:
        StudyError: a file is not JSON, or its study has no table; the message names it.
    """
    studies = []
    for path in sorted(results.parent.glob("studies/*/*.json")):
        try:
            study = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise StudyError(f"{path}: not a readable JSON file ({error}).") from error
        name = study.get("study") if isinstance(study, dict) else None
        if name not in TABLES:
            raise StudyError(f"{path}: `study` (={name!r}) must be one of {', '.join(TABLES)}.")
        studies.append(study)
    return studies


def tables(studies: Sequence[Study]) -> dict[str, Callable[[], str]]:
    """By name of the study, a function that writes its table; `zoo-summary` is the zoo's summary."""
    shown: dict[str, Callable[[], str]] = {
        name: partial(table, found) for name, table in TABLES.items() if (found := [one for one in studies if one["study"] == name])
    }
    zoo = [one for one in studies if one["study"] == ZOO]
    if zoo:
        shown[f"{ZOO}-summary"] = partial(zoo_report.summary, zoo)
    return shown
