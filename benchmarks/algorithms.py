"""All algorithms on the same layers of a CPU, in both layouts, beside im2col with a library's product.

    python benchmarks/algorithms.py --json benchmarks/studies/DEVICE/algorithms-b1.json

The tables of it in docs/papers.md are filled by `im2win report`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from im2win.cli.commands import workload
from im2win.common.files import replace_json
from im2win.studies import algorithms
from im2win.studies.algorithms import Entry


def show(done: int, total: int, entry: Entry) -> None:
    """A line a subject, and why one has no time."""
    print(f"{done}/{total} {entry.layer} {entry.conv}", flush=True)
    for name in (*entry.times, *entry.failed):
        found = f"{entry.times[name].median:.3f} ms" if name in entry.times else entry.failed[name]
        print(f"  {name:36} {found}", flush=True)


def main() -> None:
    """Reads the command line, measures, writes the study."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("suite", nargs="?", default="papers12", help="a suite or a file of layers")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--layers", help="only these, by name, with commas between them")
    parser.add_argument("--logs", type=Path, help="tuning records looked up before those that ship with the package")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    try:
        layers, _ = workload.read(options.suite, batch=options.batch, names=options.layers)
        study = algorithms.run(layers, threads=options.threads, logs=options.logs, rounds=options.rounds, progress=show)
    except ValueError as error:
        parser.error(str(error))
    replace_json(options.json, study)


if __name__ == "__main__":
    main()
