"""How much a long search adds: the best of a short tuning session against the best of a long one, measured head to head.

    python benchmarks/search_quality.py --json benchmarks/studies/DEVICE/search-quality.json KEY [KEY ...]

For every layer a session of `--short` trials runs in an empty log, then goes on to `--long` trials without an early stop. Both winners are
then timed again in interleaved rounds of one process.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import tvm

import im2win
from im2win.bench.source import digests
from im2win.common.files import replace_json
from im2win.device.cpu import Machine
from im2win.records.log import Log
from im2win.records.record import Record, utc_now
from im2win.registry.schedules import schedule_of
from im2win.reports.search import STUDY
from im2win.studies.entries import SCHEMA
from im2win.tuner.cost_model import with_cycles
from im2win.tuner.measurement import Measurement
from im2win.tuner.session import Session


def head_to_head(conv: im2win.Conv2d, records: list[Record], machine: Machine) -> list[float]:
    """Median seconds of recorded winners, timed in interleaved rounds."""
    tiles = [schedule_of(record.method).scheduler.tile(record.tile) for record in records]
    choices = [with_cycles(conv, record.algorithm, tile, machine) for record, tile in zip(records, tiles, strict=True)]
    with tempfile.TemporaryDirectory() as folder:
        measurement = Measurement(Session(conv, [choice.algorithm for choice in choices], machine, Log(folder), 1, 0))
        try:
            failed = measurement.build(choices)
            if failed:
                raise SystemExit(f"{conv}: a winner no longer builds: {failed}")
            outcomes = measurement.run(choices, samples=31, seconds=1.0)
        finally:
            measurement.close()
    return [statistics.median(outcome.samples_s) for outcome in outcomes]


def study(conv: im2win.Conv2d, short: int, long: int, machine: Machine) -> dict[str, Any]:
    """One row: both sessions' winners, their times and how long the short session took."""
    with tempfile.TemporaryDirectory() as logs:
        start = time.monotonic()
        quick = im2win.tune(conv, trials=short, logs=logs)
        seconds = time.monotonic() - start
        thorough = im2win.tune(conv, trials=long, logs=logs, patience=None)
    quick_s, thorough_s = head_to_head(conv, [quick, thorough], machine)
    return {
        "conv": str(conv), "short_trials": short, "long_trials": long, "short_ms": quick_s * 1e3, "long_ms": thorough_s * 1e3,
        "short_over_long_speed": thorough_s / quick_s, "short_session_s": seconds, "short_tile": quick.tile, "long_tile": thorough.tile,
    }  # fmt: skip


def main() -> None:
    """Reads the command line, studies every layer, writes the result after each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("keys", nargs="+", type=im2win.Conv2d.parse)
    parser.add_argument("--short", type=int, default=64)
    parser.add_argument("--long", type=int, default=500)
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    machine = Machine.host()
    facts = {"device": machine.name, "brand": machine.brand, "threads": machine.threads, "tvm": tvm.__version__}
    result: dict[str, Any] = {"study": STUDY, "schema": SCHEMA, **facts, "digests": digests("cpu"), "layers": []}
    for conv in options.keys:
        row = study(conv, options.short, options.long, machine)
        print(f"{conv}: {row['short_ms']:.3f} ms after {options.short} trials, {row['long_ms']:.3f} ms after {options.long}", flush=True)
        result["layers"].append(row)
        result["date"] = utc_now()
        replace_json(options.json, result)


if __name__ == "__main__":
    main()
