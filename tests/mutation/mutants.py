"""Changes the source at random, one place at a time, and sees whether the tests notice.

    python tests/mutation/mutants.py draw --count 300 --seed 0 LIST         needs Cosmic Ray: pip install 'im2win[mutation]'
    python tests/mutation/mutants.py run LIST --processes 32 --json FILE     needs what the tests need; a second call goes on
    python tests/mutation/mutants.py run LIST --processes 12 --seconds 400 --test-seconds 120 --json FILE     as many as that time allows
    python tests/mutation/mutants.py run LIST --json FILE --again survived   what survived once more, against tests that are new

`draw` writes mutants, the same number for each area of `mutation_areas.AREAS`, as lines to remove and to add: a list can be drawn on one
machine and run on another one with the same source. `run` applies them one by one in copies of the source. The file holds every mutant
with its outcome and the test that noticed it. Those that survive either compute the same, and `equivalent.json` says why, or lack a test.
The exit status of `run` is 1 if one of the latter is left.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import sys
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

BEGUN = time.monotonic()  # before imports, which count
ROOT = Path(__file__).resolve().parents[2]
for folder in ("tests/support", "src"):
    sys.path.insert(0, str(ROOT / folder))

from mutants import Mutant, MutantError, drawn  # noqa: E402 - the folders are on the path only now
from mutation_areas import AREAS, TIMED, catching  # noqa: E402
from mutation_campaign import BASELINE_S, SURVIVED, CampaignError, State, run  # noqa: E402

from im2win.common.files import replace_json  # noqa: E402
from im2win.common.json_text import parsed  # noqa: E402
from im2win.studies.entries import MUTATION, SCHEMA  # noqa: E402

EQUIVALENT = Path(__file__).with_name("equivalent.json")


def main() -> int:
    """Reads the command line, draws or runs. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    verbs = parser.add_subparsers(dest="verb", required=True)
    draw = verbs.add_parser("draw", help="write a random sample of mutants")
    draw.add_argument("list", type=Path, help="file to write")
    draw.add_argument("--count", type=int, default=300, help="mutants in all")
    draw.add_argument("--seed", type=int, default=0)
    draw.add_argument("--areas", default=",".join(AREAS), metavar="A,B", help=f"parts of the source; default: all of {', '.join(AREAS)}")
    started = verbs.add_parser("run", help="run the tests on every mutant of a sample")
    started.add_argument("list", type=Path, help="file of mutants")
    started.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="mutants at a time")
    started.add_argument("--json", type=Path, help="state and result; default: build/mutation/DEVICE.json")
    started.add_argument("--again", default="", metavar="A,B", help="outcomes of mutants that run once more")
    started.add_argument("--only", default="", metavar="TEXT", help="only mutants of files with this text in their path")
    started.add_argument("--seconds", type=float, default=math.inf, help="when to end; a further call goes on. The quickest run first")
    started.add_argument(
        "--test-seconds", type=float, default=BASELINE_S, help="a file of tests that takes longer is left out; default: %(default).0f"
    )
    started.add_argument("--folder", type=Path, help="where to put the copies of the source")
    options = parser.parse_args()
    if options.verb == "draw" and options.count < 1:
        parser.error(f"`--count` (={options.count}) must be at least 1.")
    if options.verb == "draw" and (unknown := set(options.areas.split(",")).difference(AREAS)):
        parser.error(f"`--areas` (={options.areas}): {min(unknown)!r} is none of {', '.join(AREAS)}.")
    if options.verb == "run" and options.processes < 1:
        parser.error(f"`--processes` (={options.processes}) must be at least 1.")
    for name in ("seconds", "test_seconds") if options.verb == "run" else ():
        if not getattr(options, name) > 0:
            parser.error(f"`--{name.replace('_', '-')}` (={getattr(options, name):g}) must be above 0.")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the copies are removed, and what runs in them ends
    try:
        return _draw(options) if options.verb == "draw" else _run(options)
    except (MutantError, CampaignError, OSError) as error:
        parser.error(str(error))


def _draw(options: argparse.Namespace) -> int:
    areas = {name: AREAS[name] for name in dict.fromkeys(options.areas.split(","))}
    mutants = drawn(ROOT, areas, options.count, options.seed)
    rows = [asdict(mutant) for mutant in mutants]
    replace_json(options.list, {"count": options.count, "seed": options.seed, "mutants": rows})
    print(f"{len(mutants)} mutants: {options.list}")
    return 0


def _run(options: argparse.Namespace) -> int:
    seed, mutants = _listed(options.list)
    mutants = [mutant for mutant in mutants if options.only in mutant.file]
    facts = _facts(seed)
    path = options.json or ROOT / "build" / "mutation" / f"{facts['device']}.json"
    state = State.begun(path, facts, mutants, [word for word in options.again.split(",") if word])
    reasons = equivalents()

    def reason(mutant: Mutant) -> str:
        return reasons.get((mutant.file, mutant.diff), "")

    left = options.seconds - (time.monotonic() - BEGUN)
    run(ROOT, state, catching, without=TIMED, processes=options.processes, folder=options.folder, equivalent=reason,
        say=lambda line: print(line, flush=True), seconds=left, most_s=options.test_seconds)  # fmt: skip
    found = Counter(verdict.outcome for verdict in state.verdicts.values())
    missed = [mutant for mutant, verdict in state.verdicts.items() if verdict.outcome == SURVIVED and not reason(mutant)]
    for mutant in missed:
        print(f"\n{mutant.name} survived\n{mutant.diff}")
    found["not run"] = len(mutants) - len(state.verdicts)
    counts = ", ".join(f"{count} {name}" for name, count in sorted(found.items()) if count)
    print(f"{len(mutants)} drawn: {counts}; {len(missed)} lack a test: {path}")
    return bool(missed)


def _listed(path: Path) -> tuple[int, list[Mutant]]:
    try:
        held = parsed(path.read_text(encoding="utf-8"))
        return int(held["seed"]), [Mutant(**row) for row in held["mutants"]]
    except (ValueError, KeyError, TypeError) as error:
        raise CampaignError(f"`LIST` (={path}) must be a file that `draw` wrote ({error!r}).") from error


def _facts(seed: int) -> dict[str, Any]:
    from im2win.bench.cpu import commit, versions
    from im2win.bench.source import digests
    from im2win.device.cpu import Machine
    from im2win.records.record import utc_now
    from im2win.registry.sources import combined

    machine = Machine.host()
    tests = combined(path.read_text(encoding="utf-8") for path in sorted((ROOT / "tests").rglob("*.py")))
    return {
        "study": MUTATION, "schema": SCHEMA, "device": machine.name, "brand": machine.brand, "threads": machine.threads, "seed": seed,
        "versions": versions(), "commit": commit(), "date": utc_now(), "digests": digests("cpu"), "tests": tests,
    }  # fmt: skip


def equivalents() -> dict[tuple[str, str], str]:
    """Why mutants compute the same, by file and diff. Their lines do not count, so that reasons outlive changes elsewhere."""
    return {(row["file"], row["diff"]): row["reason"] for row in json.loads(EQUIVALENT.read_text(encoding="utf-8"))}


if __name__ == "__main__":
    sys.exit(main())
