"""Builds and runs random kernels, and compares every output with the float64 oracle.

    python tests/fuzz/kernels.py --count 10000 --processes 2             a CPU's kernels; a second call goes on where the first one ended
    python tests/fuzz/kernels.py --count 10000 --seconds 400             as many as that time allows; a second call goes on
    python tests/fuzz/kernels.py --target cuda --count 1000              CUDA kernels in the emulator
    python tests/fuzz/kernels.py --seed 3 --replay 417                   one case, in a process of its own
    python tests/fuzz/kernels.py --case '{"target": "cpu", ...}'         a failure's case, as the file holds it

    python tests/fuzz/kernels.py --processes 30 --batch 20 --json benchmarks/studies/DEVICE/fuzz-cpu.json        a result to commit

A case is a random valid problem (every size, epilogue, layout and element type) with a schedule that computes it, a legal tile of the
schedule's space or beyond it, and a machine. It follows from seed and index, whatever the number of processes. The file holds the seed,
how far the campaign is, what the cases had, every failure with its case and the command that replays it, the machine, versions and digests
of the source. `im2win report docs/faults.md` makes a table of the files in benchmarks/studies. A process takes one core, and a second one
at times, since half of a CPU's kernels run on two threads. The exit status is 1 if there are failures.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from pathlib import Path

BEGUN = time.monotonic()  # before imports, which count
ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "support"))

from fuzz_campaign import RIGHT, Limits, State, StateError, checked, run  # noqa: E402 - the folder is on the path only now
from fuzz_jobs import Case, Job  # noqa: E402


def report(state: State) -> None:
    """One line for a batch."""
    outcomes = ", ".join(f"{count} {name}" for name, count in state.outcomes.items())
    print(f"{state.count} cases: {outcomes}; at most {state.peak_bytes >> 20} MiB a process", flush=True)


def main() -> int:
    """Reads the command line, runs the cases. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--target", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--count", type=int, default=10000, help="cases in all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=max((os.cpu_count() or 2) // 2, 1))
    parser.add_argument("--batch", type=int, default=50, help="cases of a process")
    parser.add_argument("--case-seconds", type=float, default=Limits.case_s, help="that a case may take; default: %(default).0f")
    parser.add_argument("--seconds", type=float, default=math.inf, help="when to end; a further call goes on")
    parser.add_argument("--json", type=Path, help="state and result; default: build/fuzz/TARGET-SEED.json")
    parser.add_argument("--replay", type=int, metavar="INDEX", help="run this case alone")
    parser.add_argument("--case", help="run this case alone: JSON, as a failure holds it")
    options = parser.parse_args()
    for name in ("count", "processes", "batch"):
        if getattr(options, name) < 1:
            parser.error(f"`--{name}` (={getattr(options, name)}) must be at least 1.")
    for name in ("case_seconds", "seconds"):
        if not getattr(options, name) > 0:
            parser.error(f"`--{name.replace('_', '-')}` (={getattr(options, name):g}) must be above 0.")
    limits = Limits(options.case_seconds, options.case_seconds + 120)
    if options.replay is not None or options.case is not None:
        try:
            case = Case.from_json(options.case) if options.case else None
        except (ValueError, TypeError) as error:
            parser.error(f"`--case` must be the JSON of a case ({error}).")
        answer = checked(Job(options.target, options.seed, options.replay or 0, case), limits)
        print(f"{answer.outcome}: {answer.message}\n{answer.case.to_json() if answer.case else ''}")
        return answer.outcome not in RIGHT
    path = options.json or ROOT / "build" / "fuzz" / f"{options.target}-{options.seed}.json"
    try:
        left = options.seconds - (time.monotonic() - BEGUN)
        how = {"processes": options.processes, "size": options.batch, "limits": limits, "seconds": left}
        state = run(path, options.target, options.count, options.seed, **how, report=report)
    except StateError as error:
        parser.error(str(error))
    for one in state.failures:
        print(f"\n{one['index']}: {one['kind']}: {one['message']}\n  {one['replay']}")
    print(f"{state.count} cases, {len(state.failures)} failures: {path}")
    return bool(state.failures)


if __name__ == "__main__":
    sys.exit(main())
