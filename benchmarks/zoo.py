"""The zoo: thirty-eight networks with `im2win.torch.optimize` as a user calls it, beside PyTorch, torch.compile and ONNX Runtime.

    python benchmarks/zoo.py --batch 1 --json benchmarks/studies/DEVICE/zoo-float32-b1.json
    python benchmarks/zoo.py --device cuda --batch 32 --dtype float16 --json ...

The file is written after each network. Networks that it already holds with today's kernels and choices, on the same device with the
same versions, are skipped. Each row says by a digest which source of the package measured it.
"""

from __future__ import annotations

import argparse
import logging
from pathlib import Path
from typing import Any

from im2win.bench.cpu import commit, versions
from im2win.bench.source import SOURCE, digests
from im2win.bench.zoo import ALLOWED, SUBJECTS, measured, reference
from im2win.bench.zoo_builds import build_ahead
from im2win.bench.zoo_networks import NETWORKS
from im2win.common.files import replace_json
from im2win.device.gpu import NoGpuError
from im2win.records.record import utc_now
from im2win.registry.backends import backend_for, device_for
from im2win.studies.confirmation import held
from im2win.studies.entries import SCHEMA, ZOO


def main(arguments: list[str] | None = None) -> None:
    """Reads the command line, measures, writes the study."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", choices=SUBJECTS, default="cpu")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--dtype", choices=ALLOWED, default="float32")
    parser.add_argument("--only", default=",".join(NETWORKS), help="only these networks, with commas between them")
    parser.add_argument("--subjects", help="only these, with commas between them: ours, ours_nhwc (channels-last) and peers")
    parser.add_argument("--build-ahead", action="store_true", help="build the operators of all networks first, in one batch")
    parser.add_argument("--seconds", type=float, default=20, help="of timing, all subjects of a network and mode together")
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")  # what optimize is doing
    subjects = options.subjects.split(",") if options.subjects else SUBJECTS[options.device]
    if unknown := [name for name in subjects if name not in SUBJECTS[options.device]]:
        parser.error(f"`--subjects` (={','.join(unknown)}) must be among {', '.join(SUBJECTS[options.device])}.")
    try:
        device: Any = device_for(options.device)
    except NoGpuError as missing:
        parser.error(str(missing))
    threads = backend_for(device).threads if options.device == "cpu" else 1
    made = digests(options.device)
    facts = {
        "device": device.name, "brand": device.brand, "threads": threads, "dtype": options.dtype, "batch": options.batch,
        "versions": versions(),
    }  # fmt: skip
    rows = held(options.json, "rows", facts)
    names = [name for name in options.only.split(",") if not any(row["network"] == name for row in rows)]
    if options.build_ahead:
        for name, why in build_ahead(names, options.batch, options.dtype, options.device, subjects).items():
            print(f"{name} is not built ahead: {why}", flush=True)
    for name in names:
        found = measured(name, options.batch, options.dtype, options.device, subjects, options.seconds, threads)
        rows += [row | {"source": made[SOURCE], "reference": reference(options.dtype)} for row in found]
        replace_json(options.json, {
            "study": ZOO, "schema": SCHEMA, **facts, "tolerance": ALLOWED[options.dtype], "unit": "ms",
            "commit": commit(), "date": utc_now(), "digests": made, "rows": rows,
        })  # fmt: skip
        for row in found:
            print(f"{name} {row['mode']} ({row['seconds']:.0f} s)", flush=True)
            for subject, one in row["subjects"].items():
                print(f"  {subject:14} " + (f"{one['median']:.3f} ms" if "median" in one else one["failed"]), flush=True)


if __name__ == "__main__":
    main()
