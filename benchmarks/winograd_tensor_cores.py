"""The study of Winograd's form on tensor cores: unfused, fused both ways, our others and cuDNN, each checked, then timed.

    python benchmarks/winograd_tensor_cores.py --json benchmarks/studies/DEVICE/winograd-tensor-cores.json

Its table and its plot are made by `im2win report`. A run that is stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from functools import partial
from pathlib import Path

from im2win.cli.commands import workload
from im2win.codegen.llvm import ToolchainError
from im2win.common.files import replace_json
from im2win.device.gpu import NoGpuError
from im2win.spec.conv2d import LAYOUTS
from im2win.spec.suites import Layer
from im2win.studies import winograd_tc as cuda_fused_study
from im2win.studies.winograd_tc import TRIES, Entry


def show(done: int, total: int, entries: list[Entry]) -> None:
    """A line a tile or peer, and why one has no time."""
    print(f"{done}/{total} {entries[0].conv}", flush=True)
    for entry in entries:
        result = f"{entry.ms:.4f} ms, {entry.samples} samples, error {entry.error:.1e}" if entry.ms is not None else entry.failed
        print(f"  {entry.form:28} {result} {entry.algorithm}".rstrip(), flush=True)


def numbers(text: str) -> list[int]:
    """Numbers with commas between them."""
    return [int(number) for number in text.split(",")]


def main() -> None:
    """Reads the command line, measures, writes the study."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--layers", help="only these of the suite `winograd64`, by name, with commas between them")
    parser.add_argument("--layers-of-many", help="the same for problems of several images; those of --layers if not said")
    parser.add_argument("--batches", type=numbers, default=[1, 16], help="images, with commas between them")
    parser.add_argument("--layout", choices=LAYOUTS, help="only this one")
    parser.add_argument("--tries", type=int, default=TRIES, help="tiles of a form in float16")
    parser.add_argument("--int8-tries", type=int, default=TRIES, help="tiles of a form in int8")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=0.5, help="that a tile's timed calls take, about")
    parser.add_argument("--limit", type=float, default=math.inf, help="seconds after which no further problem is begun")
    parser.add_argument("--tvm-trials", type=int, default=0, help="candidates that TVM's default search may try on a layer")
    parser.add_argument("--tvm-cache", type=Path, help="keep what it searched in this folder")
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    try:
        layers: list[Layer] = []
        for layout, batch in itertools.product([options.layout] if options.layout else LAYOUTS, options.batches):
            names = options.layers if batch == 1 else options.layers_of_many or options.layers
            layers += workload.read("winograd64", batch=batch, dtype="float16", layout=layout, names=names)[0]
        layers.sort(key=lambda layer: layer.conv.batch * layer.conv.height**2)  # those that take the least time first
        before = json.loads(options.json.read_text()) if options.json.exists() else None
        keep = partial(replace_json, options.json)
        how = {name: getattr(options, name) for name in ("tries", "int8_tries", "rounds", "seconds", "tvm_trials", "tvm_cache")}
        how["limit_s"] = options.limit
        keep(cuda_fused_study.run(layers, **how, progress=show, before=before, keep=keep, note=partial(print, flush=True)))
    except (ValueError, NoGpuError, ToolchainError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
