"""The sliding-window study on a GPU: forms, images, strides and thread blocks of the source document, each checked, then timed.

    python benchmarks/sliding_window.py --json benchmarks/studies/DEVICE/sliding-window.json

The table of it is filled by `im2win report`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from im2win.cli.commands import workload
from im2win.codegen.llvm import ToolchainError
from im2win.common.files import replace_json
from im2win.device.gpu import NoGpuError
from im2win.studies import sliding as cuda_sliding
from im2win.studies.sliding import BLOCKS, Entry


def show(done: int, total: int, entries: list[Entry]) -> None:
    """A line a form, and why one has no time."""
    print(f"{done}/{total} {entries[0].conv}", flush=True)
    for entry in entries:
        block = "" if entry.block is None else f" {entry.block}x{entry.block}"
        result = f"{entry.ms:.4f} ms, {entry.samples} samples, error {entry.error:.1e}" if entry.ms is not None else entry.failed
        print(f"  {entry.form + block:28} {result} {entry.algorithm}".rstrip(), flush=True)


def edges(text: str) -> list[int]:
    """Numbers with commas between them."""
    return [int(edge) for edge in text.split(",")]


def main() -> None:
    """Reads the command line, measures, writes the study."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--layers", help="only these of the suite `sliding`, by name, with commas between them")
    parser.add_argument("--blocks", type=edges, default=list(BLOCKS), help="edges of thread blocks, with commas between them")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    try:
        layers, _ = workload.read("sliding", names=options.layers)
        study = cuda_sliding.run(layers, options.blocks, rounds=options.rounds, progress=show)
    except (ValueError, NoGpuError, ToolchainError) as error:
        parser.error(str(error))
    replace_json(options.json, study)


if __name__ == "__main__":
    main()
