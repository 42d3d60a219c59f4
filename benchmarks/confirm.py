"""Confirms result files of `im2win bench` and studies after a change of the source: the same kernels would be timed.

    python benchmarks/confirm.py                   # all of them
    python benchmarks/confirm.py benchmarks/results/nvidia-h200/papers12-float32-b128.json
    python benchmarks/confirm.py --drop benchmarks/studies/nvidia-h200/zoo-float16-b1.json    # and measure again what it dropped

Nothing is measured and no device is needed (see `im2win.bench.confirmation` and `im2win.studies.confirmation`). Run it on new files too: it
adds the fingerprints of their kernels, without which no later source can confirm them. Files that name no problems are measured anew
instead. Exit status 1: a file could not be confirmed; the reason is printed.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from im2win.bench.confirmation import accuracy_of, checked, confirmed, device_named
from im2win.bench.results import Result, ResultError
from im2win.bench.source import stale
from im2win.common.files import replace_json
from im2win.registry.backends import Device
from im2win.studies import confirmation as studies
from im2win.studies.entries import UNTUNED

HERE = Path(__file__).parent
FILES = [*sorted(HERE.glob("results/*/*.json")), *sorted(HERE.glob("studies/*/*.json"))]


def main(arguments: list[str] | None = None) -> int:
    """Reads the command line and rewrites the files. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("files", nargs="*", type=Path, default=FILES, help="default: all results and studies")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--drop", action="store_true", help="remove rows of studies that have other kernels today")
    options = parser.parse_args(arguments)
    refused = 0
    with ProcessPoolExecutor(options.processes) as pool:
        for path in options.files:
            reasons = _confirm(path, pool, options.drop)
            refused += bool(reasons)
            print(f"{path}: {'; '.join(reasons[:3]) or 'made by kernels that are equal to those of today'}", flush=True)
    return 1 if refused else 0


def _confirm(path: Path, pool: ProcessPoolExecutor, drop: bool) -> list[str]:
    """Why a file is not confirmed; empty if it is."""
    found = json.loads(path.read_text(encoding="utf-8"))
    if "study" not in found:
        return _confirm_result(path, pool)
    if found["study"] not in (UNTUNED, *studies.LISTINGS):
        return ["it does not name its problems"] if stale(found.get("digests", {}), studies.timed(found)) else []
    if not found.get("digests") or (device := device_named(found["device"])) is None:
        return ["no digests" if not found.get("digests") else f"{found['device']} is unknown"]
    new, reasons = (_untuned if found["study"] == UNTUNED else _study)(found, device, pool, drop)
    replace_json(path, new)
    return reasons


def _confirm_result(path: Path, pool: ProcessPoolExecutor) -> list[str]:
    """As `_confirm`, for a result of `im2win bench`."""
    try:
        result = Result.load(path)
    except ResultError:
        return ["it has no layers"]
    device = device_named(result.device)
    if not result.digests or device is None:
        return ["no digests" if device is not None else f"{result.device} is unknown"]
    check = functools.partial(checked, device=device, accuracy=accuracy_of(result), made=result.confirmed or result.digests)
    rows = list(pool.map(check, result.layers))
    confirmed(result, rows).save(path)
    return [one.reason for one in rows if one.reason]


def _study(study: dict[str, Any], device: Device, pool: ProcessPoolExecutor, drop: bool) -> tuple[dict[str, Any], list[str]]:
    """The study with what is found, and why it is not confirmed. Rows are dropped only where it says which kernels were timed."""
    if not (keys := studies.problems(study)):
        return study, ["it does not name its problems"]
    plain = {name: study[name] for name in ("study", "accuracy") if name in study}
    found = pool.map(functools.partial(studies.chosen, study=plain, device=device), keys, chunksize=4)
    kernels = dict(zip(keys, found, strict=True))
    new, reasons = studies.confirmed(study, kernels)
    if reasons and drop and study.get("kernels"):
        new, rows = studies.kept(study, kernels), studies.LISTINGS[study["study"]].rows
        reasons = [f"{len(study[rows]) - len(new[rows])} of {len(study[rows])} rows are dropped, {reasons[0]}"]
    return new, reasons


def _untuned(study: dict[str, Any], device: Device, pool: ProcessPoolExecutor, drop: bool) -> tuple[dict[str, Any], list[str]]:
    """As `_study`, for a study of untuned layers."""
    check = functools.partial(studies.untuned_checked, device=device, then=studies.made(study))
    rows = list(pool.map(check, study["rows"], chunksize=4))
    new, reasons = studies.untuned_confirmed(study, rows)
    if drop and any(reason for _, reason in rows):
        new, others = studies.untuned_kept(study, rows)
        reasons = others or [f"{len(rows) - len(new['rows'])} of {len(rows)} rows are dropped, {reasons[0]}"]
    return new, reasons


if __name__ == "__main__":
    sys.exit(main())
