"""TVM's CUDA schedules on a GPU: layers against peers and hand-built kernels, and what each rule of the reconstructor gains.

    python benchmarks/scheduled.py --json benchmarks/studies/DEVICE/scheduled.json

The tables of it are filled by `im2win report`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from im2win.cli.commands import workload
from im2win.codegen.llvm import ToolchainError
from im2win.common.files import replace_json
from im2win.device.gpu import NoGpuError
from im2win.studies import scheduled
from im2win.studies.scheduled import Entry


def show(done: int, total: int, entries: list[Entry]) -> None:
    """A line a subject, and why one has no time."""
    print(f"{done}/{total} {entries[0].layer} {entries[0].conv}", flush=True)
    for entry in entries:
        result = f"{entry.ms:.4f} ms, {entry.samples} samples, error {entry.error:.1e}" if entry.ms is not None else entry.failed
        print(f"  {entry.subject:28} {result}", flush=True)


def main() -> None:
    """Reads the command line, measures, writes the study."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("suite", nargs="?", default="papers12", help="a suite or a file of layers")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--layers", help="only these, by name, with commas between them")
    parser.add_argument("--tiles", type=int, default=12, help="tiles of a layer that are timed briefly")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    try:
        layers, _ = workload.read(options.suite, batch=options.batch, names=options.layers)
        study = scheduled.run(layers, options.tiles, rounds=options.rounds, progress=show)
    except (ValueError, NoGpuError, ToolchainError) as error:
        parser.error(str(error))
    replace_json(options.json, study)


if __name__ == "__main__":
    main()
