"""Cold start: from a new process to the first result of a built convolution, without PyTorch, part by part.

    python benchmarks/cold_start.py --json benchmarks/studies/DEVICE/cold-start.json

Each sample is a new interpreter that has what `im2win runtime` writes into a folder, and NumPy. PyTorch, which TVM's runtime imports
wherever it is installed, is hidden, since a machine that only runs kernels has none. The process loads a library that was built before
and calls it once. Its parts, in order: Python's own start, the imports of NumPy and of TVM's runtime (`tvm_ffi`), which any user of
either pays, the import of im2win, the load of the library, the packing of filters (`bind`), and the first call. A warm second call is
timed behind it. The first process, which reads files from disk and compiles them to byte code that the others find, does not count.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import im2win
from im2win.bench.cpu import commit, versions
from im2win.bench.source import digests
from im2win.common.files import replace_json
from im2win.device.cpu import Machine
from im2win.records.record import utc_now
from im2win.spec.conv2d import ConvError
from im2win.studies.entries import COLD_PARTS, COLD_START, SCHEMA

LAYERS = ("n1-c128x28x28-k128x3x3", "n1-c64x56x56-k64x3x3-p1-bias-relu")
CHILD = """
import sys
sys.modules["torch"] = None
import time
marks = [time.perf_counter()]
import numpy
marks.append(time.perf_counter())
import tvm_ffi
marks.append(time.perf_counter())
import im2win
load = im2win.load
marks.append(time.perf_counter())
op = load(sys.argv[1])
marks.append(time.perf_counter())
conv = op.conv
made = {name: numpy.ones(shape, "float32") for name, shape in (("data", conv.input_shape), ("filter", conv.filter_shape))}
bias = {"bias": numpy.ones(conv.out_channels, "float32")} if conv.bias else {}
marks.append(time.perf_counter())
layer = op.bind(made["filter"], **bias)
marks.append(time.perf_counter())
layer(made["data"])
marks.append(time.perf_counter())
layer(made["data"])
marks.append(time.perf_counter())
foreign = sorted(name for name in ("torch", "tvm", "scipy", "xgboost") if sys.modules.get(name))
print(__import__("json").dumps([foreign, im2win.__file__, [1e3 * (b - a) for a, b in zip(marks, marks[1:])]]))
"""


def sample(library: Path, runtime: Path) -> dict[str, float]:
    """Milliseconds of each part of one new process. `runtime`: the folder that im2win is imported from.

    Raises:
        RuntimeError: the process failed, or imported another im2win, TVM's compiler or PyTorch.
    """
    begun = time.perf_counter()
    subprocess.run([sys.executable, "-c", "pass"], check=True)
    start = 1e3 * (time.perf_counter() - begun)
    command = [sys.executable, "-c", CHILD, str(library)]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    env |= {"PYTHONPATH": str(runtime), "PYTHONPYCACHEPREFIX": str(runtime.with_name("bytecode"))}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    if done.returncode:
        raise RuntimeError(f"a new process cannot use {library}: {done.stderr.strip()[-500:]}")
    foreign, origin, (numpy, ffi, ours, load, _, bind, first, second) = json.loads(done.stdout)
    if foreign or not Path(origin).is_relative_to(runtime):
        raise RuntimeError(f"loading {library} imported {' and '.join([origin, *foreign])}, not only what {runtime} has.")
    return dict(zip(COLD_PARTS, (start, numpy, ffi, ours, load, bind, first, second), strict=True))


def measure(key: str, folder: Path, runtime: Path, rounds: int) -> dict[str, dict[str, float]]:
    """By part, median, least and largest milliseconds of a layer, in as many new processes as there are rounds."""
    library = folder / "layer.so"
    im2win.build(key).export(library)
    sample(library, runtime)
    samples = [sample(library, runtime) for _ in range(rounds)]
    columns = {part: [one[part] for one in samples] for part in COLD_PARTS}
    return {part: {"median": statistics.median(ms), "least": min(ms), "most": max(ms)} for part, ms in columns.items()}


def main() -> None:
    """Reads the command line, measures, writes the study."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("layers", nargs="*", default=LAYERS, metavar="LAYER", help=f"keys in float32; default: {' '.join(LAYERS)}")
    parser.add_argument("--rounds", type=int, default=15, help="new processes")
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error(f"`--rounds` (={options.rounds}) must be at least 1.")
    machine = Machine.host()
    facts: dict[str, Any] = {
        "study": COLD_START, "schema": SCHEMA, "device": machine.name, "brand": machine.brand, "threads": machine.threads,
        "versions": versions(), "commit": commit(), "date": utc_now(), "unit": "ms", "rounds": options.rounds, "digests": digests("cpu"),
    }  # fmt: skip
    rows = {}
    with tempfile.TemporaryDirectory(prefix="im2win-cold-") as folder:
        runtime = Path(folder) / "runtime"
        im2win.export_runtime(runtime)
        for key in options.layers:
            try:
                rows[key] = measure(key, Path(folder), runtime, options.rounds)
            except (ConvError, RuntimeError) as error:
                parser.error(str(error))
            print(f"{key}: " + ", ".join(f"{part} {row['median']:.1f} ms" for part, row in rows[key].items()), flush=True)
    replace_json(options.json, {**facts, "layers": rows})


if __name__ == "__main__":
    main()
