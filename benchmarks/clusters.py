"""What clusters of thread blocks gain on a GPU: the best recorded tiles alone and in clusters of 2 and 4, each checked, then timed.

    python benchmarks/clusters.py --json benchmarks/studies/DEVICE/clusters.json

The table of it is filled by `im2win report`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from im2win.cli.commands import workload
from im2win.codegen.llvm import ToolchainError
from im2win.common.files import replace_json
from im2win.device.gpu import NoGpuError
from im2win.studies import clusters as cuda_clusters
from im2win.studies.clusters import ROUNDS, Entry
from im2win.studies.entries import CLUSTERS as STUDY

STUDIES = Path(__file__).resolve().parent / "studies"


def show(done: int, total: int, entries: list[Entry]) -> None:
    """A line a tile, and why one has no time."""
    print(f"{done}/{total} {entries[0].conv}", flush=True)
    for entry in entries:
        result = f"{entry.ms:.4f} ms, {entry.samples} samples, error {entry.error:.1e}" if entry.ms is not None else entry.failed
        blocks = "alone" if entry.cluster == 1 else f"clusters of {entry.cluster}"
        print(f"  {entry.family:5} {entry.algorithm:17} {blocks:13} {entry.tile['stages']} stages  {result}", flush=True)


def main() -> None:
    """Reads the command line, measures, writes the study after every problem."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--layers", help="only these of the suites papers12, resnet50 and winograd64, by name, with commas between them")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--json", type=Path, help="default: studies/DEVICE/clusters.json beside this script")
    options = parser.parse_args()

    def keep(study: dict[str, Any]) -> None:
        replace_json(options.json or STUDIES / study["device"] / f"{STUDY}.json", study)

    try:
        layers = workload.only(cuda_clusters.problems(), options.layers)
        keep(cuda_clusters.run(layers, rounds=options.rounds, progress=show, keep=keep))
    except (ValueError, NoGpuError, ToolchainError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
