"""Injects mistakes into kernels and counts what the checks catch: the tuner's, before it times a CPU's kernel, and the emulator's.

    python tests/fuzz/broken.py [--target cpu|cuda] [--json build/fuzz/broken.json]

A mistake that changes no output is equivalent, and is not counted; neither is a program that does not compile. The exit status is 1 if a
broken kernel passes.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "support"))

import broken_cpu  # noqa: E402 - the folder is on the path only now
import broken_cuda  # noqa: E402
from broken_campaign import Job, counts, judged  # noqa: E402
from worker_broken import Verdict  # noqa: E402

from im2win.bench.cpu import commit, versions  # noqa: E402
from im2win.bench.source import digests  # noqa: E402
from im2win.common.files import replace_json  # noqa: E402
from im2win.device.cpu import Machine  # noqa: E402
from im2win.records.record import utc_now  # noqa: E402
from im2win.studies.entries import BROKEN, SCHEMA  # noqa: E402


def note(job: Job, verdict: Verdict) -> None:
    """A line for a kernel that was not caught."""
    if verdict.outcome != "caught":
        print(f"{verdict.outcome}: {job} ({verdict.why})", flush=True)


def main() -> int:
    """Reads the command line, judges the kernels, writes the counts. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--target", choices=("cpu", "cuda"), help="default: both")
    parser.add_argument("--json", type=Path, default=ROOT / "build" / "fuzz" / "broken.json")
    options = parser.parse_args()
    sources = {"cpu": broken_cpu.injected, "cuda": broken_cuda.injected}
    result = {
        "study": BROKEN, "schema": SCHEMA, "device": Machine.host().name, "date": utc_now(), "commit": commit(), "versions": versions(),
        "digests": digests("cpu"), "targets": {},
    }  # fmt: skip
    for target in [options.target] if options.target else list(sources):
        result["targets"][target] = found = counts(judged(sources[target](), note))
        print(f"{target}: {found['injected']} injected, {found['caught']} caught, {found['equivalent']} equivalent", flush=True)
    replace_json(options.json, result)
    return any(one["caught"] < one["injected"] for one in result["targets"].values())


if __name__ == "__main__":
    sys.exit(main())
