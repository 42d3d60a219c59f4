"""TVM's default MetaSchedule search beside ours on a GPU: as many trials, the same arithmetic, one run.

    python benchmarks/tvm_search.py --json benchmarks/studies/DEVICE/tvm-search.json --limit 290

Prints a line for each layer. The file is written after each layer, and a run goes on where one before it ended; `im2win report` makes its
table.
"""

from __future__ import annotations

import argparse
import json
import math
from functools import partial
from pathlib import Path

from im2win.cli.commands import workload
from im2win.codegen.llvm import ToolchainError
from im2win.common.files import replace_json
from im2win.common.locking import LogError
from im2win.device.gpu import NoGpuError
from im2win.studies import tvm_search
from im2win.studies.entries import HAND_BUILT, OURS_BEST, OURS_SEARCHED, TVM_SEARCHED
from im2win.studies.scheduled import Entry

FIRST = ("conv1", "conv2", "conv3", "conv7")  # the layers of papers12 on which our exact kernels are the fastest of all


def show(done: int, total: int, entries: list[Entry]) -> None:
    """A line a layer, and why one of its subjects has no time."""
    times = {entry.subject: entry.ms for entry in entries}
    shown = (TVM_SEARCHED, OURS_SEARCHED, HAND_BUILT, OURS_BEST)
    cells = ", ".join(f"{name} {'-' if times.get(name) is None else f'{times[name]:.3f} ms'}" for name in shown)
    print(f"{done}/{total} {entries[0].layer}: {cells}", flush=True)
    for entry in entries:
        if entry.ms is None and entry.subject in shown:
            print(f"  {entry.subject}: {entry.failed}", flush=True)


def main() -> None:
    """Reads the command line, searches, measures, writes the study."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("suite", nargs="?", default="papers12", help="a suite or a file of layers")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--layers", help="only these, by name, with commas between them; " + ", ".join(FIRST) + " come first")
    parser.add_argument("--trials", type=int, default=64, help="candidates of each search")
    parser.add_argument("--group", type=int, default=tvm_search.GROUP, help="layers that are searched at once")
    parser.add_argument("--limit", type=float, default=math.inf, help="seconds after which no further layers are begun")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tvm-cache", type=Path, help="keep what TVM searched in this folder")
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    try:
        layers, _ = workload.read(options.suite, batch=options.batch, names=options.layers)
        before = json.loads(options.json.read_text()) if options.json.exists() else None
        ordered = sorted(layers, key=lambda layer: layer.name not in FIRST)
        how = {name: getattr(options, name) for name in ("group", "rounds")}
        tvm_search.run(
            ordered, options.trials, **how, limit_s=options.limit, cache=options.tvm_cache, progress=show, before=before,
            keep=partial(replace_json, options.json), note=partial(print, flush=True),
        )  # fmt: skip
    except (ValueError, NoGpuError, ToolchainError, LogError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
