"""Confirms result files of `im2win bench` after a change of the source: today's choices and kernels are those that were timed.

    python benchmarks/confirm.py                   # all of benchmarks/results
    python benchmarks/confirm.py benchmarks/results/nvidia-h200/papers12-float32-b128.json

Nothing is measured and no device is needed (see `im2win.bench.confirmation`). Run it on new files too: it adds the fingerprints of their
kernels, without which no later source can confirm them. Files of other kinds, and files that do not hold tiles, are measured anew instead.
Exit status 1: a file could not be confirmed; the reason is printed.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from im2win.bench.confirmation import accuracy_of, checked, confirmed, device_named
from im2win.bench.results import Result, ResultError

RESULTS = Path(__file__).parent / "results"


def main(arguments: list[str] | None = None) -> int:
    """Reads the command line and rewrites the files. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("files", nargs="*", type=Path, default=sorted(RESULTS.glob("*/*.json")), help="default: all results")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    options = parser.parse_args(arguments)
    refused = 0
    with ProcessPoolExecutor(options.processes) as pool:
        for path in options.files:
            reasons = _confirm(path, pool)
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


if __name__ == "__main__":
    sys.exit(main())
