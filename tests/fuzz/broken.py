"""Injects mistakes into kernels and counts what is caught: by the check before timing, by the emulator, and by the reconstructor's checks.

    python tests/fuzz/broken.py KERNELS [--processes 10] [--seconds 400] [--json FILE]

KERNELS are `cpu` (scheduled programs and packed filters), `cuda` (generated sources) or `reconstructed` (sources that the reconstructor
rewrote). Each kernel is judged without a mistake, too. The file is written after each verdict, and a second call goes on. A mistake that
changes no output is equivalent, and is not counted; neither is a program that does not compile. `im2win report docs/faults.md` makes a
table of the files in benchmarks/studies. The exit status is 1 if a broken kernel passes, or a right one does not.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections import Counter
from pathlib import Path

BEGUN = time.monotonic()  # before imports, which count
ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "support"))

from broken_campaign import KERNELS, Job, StateError, run  # noqa: E402 - the folder is on the path only now
from worker_broken import Verdict  # noqa: E402


def note(job: Job, verdict: Verdict) -> None:
    """A line for a kernel that was neither caught nor right."""
    if verdict.outcome not in ("caught", "ok"):
        print(f"{verdict.outcome}: {job} ({verdict.why})", flush=True)


def main() -> int:
    """Reads the command line, judges the kernels. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("kernels", choices=KERNELS, metavar="KERNELS", help=f"one of {', '.join(KERNELS)}")
    parser.add_argument("--processes", type=int, default=max((os.cpu_count() or 2) // 2, 1))
    parser.add_argument("--seconds", type=float, default=math.inf, help="when to end; a further call goes on")
    parser.add_argument("--json", type=Path, help="state and result; default: build/fuzz/broken-KERNELS.json")
    options = parser.parse_args()
    if options.processes < 1:
        parser.error(f"`--processes` (={options.processes}) must be at least 1.")
    if not options.seconds > 0:
        parser.error(f"`--seconds` (={options.seconds:g}) must be above 0.")
    path = options.json or ROOT / "build" / "fuzz" / f"broken-{options.kernels}.json"
    try:
        left = options.seconds - (time.monotonic() - BEGUN)
        state = run(path, options.kernels, processes=options.processes, seconds=left, note=note)
    except StateError as error:
        parser.error(str(error))
    for job, verdict in state.wrong:
        print(f"wrong verdict: {job}: {verdict.outcome} {verdict.why}".rstrip())
    found = Counter(verdict.outcome for verdict in state.verdicts.values())
    found["not judged"] = len(state.jobs) - len(state.verdicts)
    counts = ", ".join(f"{count} {name}" for name, count in sorted(found.items()) if count)
    print(f"{len(state.jobs)} kernels: {counts}; {len(state.wrong)} wrong verdicts: {path}")
    return bool(state.wrong)


if __name__ == "__main__":
    sys.exit(main())
