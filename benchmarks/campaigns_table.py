"""Prints a line for each result file of `campaigns.sh` in a folder: how far it is, what was found, and what nobody noticed.

    python benchmarks/campaigns_table.py FOLDER
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any

from im2win.reports.fleet import gain
from im2win.studies.entries import BROKEN, FLEET, FUZZ, MUTATION, SURVIVED


def line(study: dict[str, Any]) -> str:
    """What a study of a campaign has found so far."""
    if study["study"] == FUZZ:
        outcomes = ", ".join(f"{count} {name}" for name, count in study["outcomes"].items())
        return f"{study['count']} cases: {outcomes}; {len(study['failures'])} failures; {study['cpu_s']:.0f} CPU s"
    if study["study"] == FLEET:
        alone = study["sessions"][0]
        return ", ".join(f"{one['workers']} workers {gain(one, alone):.2f}" for one in study["sessions"])
    rows = study["rows"] if study["study"] == BROKEN else study["mutants"]
    found = Counter(row.get("outcome", "not run") for row in rows)
    if study["study"] == MUTATION:
        found["equivalent"] = sum(row["outcome"] == SURVIVED for row in rows if row.get("equivalent"))
        found[SURVIVED] -= found["equivalent"]
    return f"{len(rows)}: " + ", ".join(f"{count} {name}" for name, count in sorted(found.items()) if count)


def main() -> None:
    """Reads the command line, prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    for path in sorted(parser.parse_args().folder.glob("*.json")):
        study = json.loads(path.read_text(encoding="utf-8"))
        if study.get("study") in (FUZZ, BROKEN, MUTATION, FLEET):
            print(f"{path.stem:22} {study['device']:28} {line(study)}", flush=True)


if __name__ == "__main__":
    main()
