"""Confirms result files of `im2win bench`, of the zoo and of untuned layers after a change of the source: the same kernels would be timed.

    python benchmarks/confirm.py                   # all of them
    python benchmarks/confirm.py benchmarks/results/nvidia-h200/papers12-float32-b128.json
    python benchmarks/confirm.py --drop benchmarks/studies/nvidia-h200/zoo-float16-b1.json    # and measure again what it dropped

Nothing is measured and no device is needed (see `im2win.bench.confirmation`). Run it on new files too: it adds the fingerprints of their
kernels, without which no later source can confirm them. Files of other kinds, and files that do not hold tiles, are measured anew instead.
Exit status 1: a file could not be confirmed; the reason is printed.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from im2win.bench.confirmation import (
    accuracy_of,
    checked,
    chosen,
    confirmed,
    default_moved,
    device_named,
    problems,
    untuned_confirmed,
    untuned_kept,
    zoo_confirmed,
    zoo_kept,
)
from im2win.bench.results import Result, ResultError
from im2win.common.files import replace_json

HERE = Path(__file__).parent
FILES = [*sorted(HERE.glob("results/*/*.json")), *sorted(HERE.glob("studies/*/zoo-*.json")), *sorted(HERE.glob("studies/*/untuned-*.json"))]


def main(arguments: list[str] | None = None) -> int:
    """Reads the command line and rewrites the files. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("files", nargs="*", type=Path, default=FILES, help="default: all results, the zoo's, and studies of untuned layers")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--drop", action="store_true", help="remove what has other kernels today: networks of the zoo, untuned layers")
    options = parser.parse_args(arguments)
    refused = 0
    with ProcessPoolExecutor(options.processes) as pool:
        for path in options.files:
            if path.name.startswith("zoo-"):
                reasons = _confirm_zoo(path, pool, options.drop)
            else:
                reasons = _confirm_untuned(path, pool, options.drop) if path.name.startswith("untuned-") else _confirm(path, pool)
            refused += bool(reasons)
            print(f"{path}: {'; '.join(reasons[:3]) or 'made by kernels that are equal to those of today'}", flush=True)
    return 1 if refused else 0


def _confirm(path: Path, pool: ProcessPoolExecutor) -> list[str]:
    """Why a file is not confirmed; empty if it is."""
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


def _confirm_zoo(path: Path, pool: ProcessPoolExecutor, drop: bool) -> list[str]:
    """As `_confirm`, for a file of the zoo. Networks are dropped only where the file says which kernels were timed."""
    study = json.loads(path.read_text(encoding="utf-8"))
    device, keys = device_named(study["device"]), problems(study)
    if device is None or not keys:
        return [f"{study['device']} is unknown" if device is None else "it does not list its problems"]
    kernels = dict(zip(keys, pool.map(functools.partial(chosen, device=device), keys, chunksize=4), strict=True))
    new, reasons = zoo_confirmed(study, kernels)
    if reasons and drop and study.get("kernels"):
        new = zoo_kept(study, kernels)
        reasons = [f"{len(study['rows']) - len(new['rows'])} of {len(study['rows'])} rows are dropped, {reasons[0]}"]
    replace_json(path, new)
    return reasons


def _confirm_untuned(path: Path, pool: ProcessPoolExecutor, drop: bool) -> list[str]:
    """As `_confirm`, for a study of untuned layers."""
    study = json.loads(path.read_text(encoding="utf-8"))
    device = device_named(study["device"])
    if device is None:
        return [f"{study['device']} is unknown"]
    moved = list(pool.map(functools.partial(default_moved, device=device), study["rows"], chunksize=4))
    new, reasons = untuned_confirmed(study, moved)
    if any(moved) and drop:
        new, others = untuned_kept(study, moved)
        reasons = others or [f"{len(moved) - len(new['rows'])} of {len(moved)} rows are dropped, {reasons[0]}"]
    replace_json(path, new)
    return reasons


if __name__ == "__main__":
    sys.exit(main())
