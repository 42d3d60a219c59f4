"""TVM's CUDA schedules on a GPU: layers against peers and hand-built kernels, and what each rule of the reconstructor gains.

    python benchmarks/scheduled.py --json benchmarks/studies/DEVICE/scheduled.json
    python benchmarks/scheduled.py --narrow FOLDER

The tables of the first are filled by `im2win report`. The second measures float16 and int8 on tensor cores, in NHWC and NCHW, prints a line
for each layer, and writes everything to FOLDER/scheduled-narrow.json.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from im2win.cli.commands import workload
from im2win.codegen.llvm import ToolchainError
from im2win.common.files import replace_json
from im2win.device.gpu import NoGpuError
from im2win.studies import scheduled
from im2win.studies.entries import FIRST_SCHEDULED as FIRST
from im2win.studies.entries import HAND_BUILT
from im2win.studies.scheduled import Entry


def show(done: int, total: int, entries: list[Entry]) -> None:
    """A line a subject, and why one has no time."""
    print(f"{done}/{total} {entries[0].layer} {entries[0].conv}", flush=True)
    for entry in entries:
        result = f"{entry.ms:.4f} ms, {entry.samples} samples, error {entry.error:.1e}" if entry.ms is not None else entry.failed
        print(f"  {entry.subject:28} {result}", flush=True)


def brief(done: int, total: int, entries: list[Entry]) -> None:
    """One line a layer: milliseconds of the best tile, of the hand-built kernel, and of the fastest peer; then what failed of ours."""
    times = {entry.subject: entry.ms for entry in entries if entry.ms is not None}
    ours = min((ms for name, ms in times.items() if name.startswith(FIRST)), default=float("nan"))
    peers = {name: ms for name, ms in times.items() if not name.startswith(FIRST) and name != HAND_BUILT}
    peer = min(peers, key=lambda name: peers[name], default="-")
    hand, best = times.get(HAND_BUILT, float("nan")), peers.get(peer, float("nan"))
    name = f"{entries[0].layer} {entries[0].conv}"
    print(f"{done}/{total} {name:60} {FIRST} {ours:.4f} ms, {HAND_BUILT} {hand:.4f} ms, {peer} {best:.4f} ms", flush=True)
    for entry in entries:
        if entry.ms is None and (entry.subject.startswith(FIRST) or entry.subject == HAND_BUILT):
            print(f"  {entry.subject}: {entry.failed}", flush=True)


def narrow(options: argparse.Namespace) -> None:
    """Measures float16 and int8 in both layouts."""
    layers, _ = workload.read(options.suite, batch=options.batch, names=options.layers)
    problems = [
        replace(layer, conv=layer.conv.with_(dtype=dtype, layout=layout))
        for dtype in ("float16", "int8") for layout in ("NHWC", "NCHW") for layer in layers
    ]  # fmt: skip
    study = scheduled.narrow(problems, min(options.tiles, 3), rounds=min(options.rounds, 7), progress=brief)
    options.narrow.mkdir(parents=True, exist_ok=True)
    replace_json(options.narrow / "scheduled-narrow.json", study)


def main() -> None:
    """Reads the command line, measures, writes the study."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("suite", nargs="?", default="papers12", help="a suite or a file of layers")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--layers", help="only these, by name, with commas between them")
    parser.add_argument("--tiles", type=int, default=12, help="tiles of a layer that are timed briefly")
    parser.add_argument("--rounds", type=int, default=15)
    goal = parser.add_mutually_exclusive_group(required=True)
    goal.add_argument("--json", type=Path, help="the study of float32, to this file")
    goal.add_argument("--narrow", type=Path, help="float16 and int8 on tensor cores, to this folder; at most 3 tiles and 7 rounds")
    options = parser.parse_args()
    try:
        if options.narrow is not None:
            narrow(options)
            return
        layers, _ = workload.read(options.suite, batch=options.batch, names=options.layers)
        study = scheduled.run(layers, options.tiles, rounds=options.rounds, progress=show)
    except (ValueError, NoGpuError, ToolchainError) as error:
        parser.error(str(error))
    replace_json(options.json, study)


if __name__ == "__main__":
    main()
