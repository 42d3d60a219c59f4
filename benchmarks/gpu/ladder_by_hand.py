"""On a machine with a GPU: the rungs of the thesis' ladder as TVM schedules beside the same rungs written loop by loop, in one run.

    python benchmarks/gpu/ladder_by_hand.py OUT [--layers conv1,conv9] [--seconds 0.15] [--limit 240]

Prints the speed of every scheduled rung over its kernel by hand (above 1: the schedule is faster), and that of the project's im2win
schedule over Alg. 9. OUT/ladder-by-hand.json has all times, and is written after each layer. Needs PyTorch with CUDA and nvcc.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path

from im2win.bench.results import Result, Row, geometric_mean
from im2win.reports.ladder import ALGORITHM_9, rates
from im2win.schedules.studies.cuda_ladder import BY_HAND, RUNGS, WITHOUT
from im2win.spec.suites import suite
from im2win.studies import cuda_ladder

BATCH = 128
PRODUCTION = "production"
WORST = 0.95  # of the speed by hand


def ratios(row: Row) -> dict[str, float]:
    """Of each scheduled rung its speed over that by hand, of the project's kernel over Alg. 9; those that were timed."""
    speeds = rates(row)
    pairs = {name: f"by_hand_{name}" for name in (*RUNGS, *WITHOUT)} | {PRODUCTION: ALGORITHM_9}
    return {name: speeds[name] / speeds[other] for name, other in pairs.items() if {name, other} <= speeds.keys()}


def show(result: Result) -> None:
    """Prints a line for each rung: the mean ratio, and that of every layer; then failures, and the rungs that are too slow."""
    found = {row.layer: ratios(row) for row in result.layers}
    means = {}
    print(f"{'rung':24}{'mean':>7}  " + "".join(f"{layer:>8}" for layer in found))
    for name in (*RUNGS, *WITHOUT):
        values = [one.get(name) for one in found.values()]
        means[name] = geometric_mean(value for value in values if value is not None)
        cells = "".join("       -" if value is None else f"{value:8.3f}" for value in values)
        print(f"{name:24}{means[name] or 0.0:7.3f}  {cells}")
    for row in result.layers:
        for name, reason in (*row.peers_failed.items(), *([("production", row.failed)] if row.failed else [])):
            print(f"failed: {row.layer} {name}: {reason}")
    slow = [name for name, mean in means.items() if name != PRODUCTION and (mean is None or mean < WORST)]
    print(f"slower than {WORST} of the speed by hand: {', '.join(slow) or 'none'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder of the result")
    parser.add_argument("--layers", help="only these, by name")
    parser.add_argument("--seconds", type=float, default=0.15, help="most seconds of timed calls of a rung on a layer")
    parser.add_argument("--limit", type=float, default=math.inf, help="seconds after which no further layer is begun")
    given = parser.parse_args()
    names = given.layers.split(",") if given.layers else None
    layers = [layer for layer in suite("papers12", batch=BATCH) if names is None or layer.name in names]
    rungs = {**RUNGS, **WITHOUT, **BY_HAND}
    begun = time.monotonic()

    def progress(done: int, total: int, row: Row) -> None:
        print(f"{done}/{total} {row.layer}, after {time.monotonic() - begun:.0f} s", flush=True)

    file = given.out / "ladder-by-hand.json"
    result = cuda_ladder.run(
        layers, rungs, rounds=15, seconds=given.seconds, suite="by-hand", limit_s=given.limit, progress=progress,
        keep=lambda found: found.save(file),
    )  # fmt: skip
    show(result)
    print(f"written to {file}")


if __name__ == "__main__":
    main()
