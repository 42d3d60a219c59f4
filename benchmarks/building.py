"""Where the seconds of building a GPU's candidates go: CPU seconds and time of each step, alone and in parallel processes.

    python benchmarks/building.py --count 8 --processes 31 --json building.json n128-c128x28x28-k128x3x3-float16-NHWC

Needs no GPU, but the driver library and the CUDA compilers that are compared: nvcc on PATH, and NVRTC as a package (`im2win[cuda]`). The
candidates are the best of each algorithm by the analytic model, in turn. Steps: lowering the schedule, TVM's passes and code generator with
the reconstructor, each compiler, all of these once more as a session does it, and the linker. With `--processes` so many build the same
candidates at the same time: what a session with as many building processes sees. Nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from im2win.codegen import cuda as cuda_codegen
from im2win.codegen import nvrtc
from im2win.common.files import replace_json
from im2win.device.gpu import H200
from im2win.records.record import utc_now
from im2win.registry import cuda_lowering
from im2win.registry.backends import backend_for
from im2win.registry.schedules import Schedule, candidates
from im2win.spec.conv2d import Conv2d

Seconds = tuple[float, float]  # of CPUs, and of the clock


def used() -> Seconds:
    """CPU seconds of this process and those that it started, and the clock."""
    own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime, time.perf_counter()


def timed(step: Callable[[], Any]) -> tuple[Any, Seconds]:
    """What a step gives, and the seconds that it took."""
    before = used()
    given = step()
    after = used()
    return given, (after[0] - before[0], after[1] - before[1])


def tiles(conv: Conv2d, count: int) -> Iterator[tuple[Schedule, Any]]:
    """The best tiles of each schedule by the model: the first of each, then the second of each, and so on."""
    backend = backend_for(H200, "float32")
    ranked = [(row, backend.ranked(conv, row)[:count]) for row in candidates("auto", conv, "cuda", "float32")]
    every = [(row, found[place][1]) for place in range(count) for row, found in ranked if place < len(found)]
    yield from every[:count]


def measured(conv: Conv2d, row: Schedule, tile: Any) -> dict[str, Seconds]:
    """The seconds of each step of one candidate."""
    module, lower = timed(lambda: cuda_lowering.lower(conv, row, tile, H200))
    generated, generate = timed(lambda: cuda_codegen.generate_source(module, H200))
    found = {"lower": lower, "generate": generate}
    if nvrtc.available():
        found["nvrtc"] = timed(lambda: nvrtc.cubin(generated.source, H200.arch))[1]
    if cuda_codegen.compiler() == "nvcc":
        found["nvcc"] = timed(lambda: cuda_codegen.cubin(generated.source, H200))[1]
    with tempfile.TemporaryDirectory() as folder:
        compiled, whole = timed(lambda: cuda_codegen.compile_module(module, H200))
        _, found["link"] = timed(lambda: compiled.export(Path(folder) / "conv.so"))
    return {**found, "all but the link": whole}


def here(conv: Conv2d, count: int) -> list[dict[str, Seconds]]:
    """The seconds of each candidate in this process; the first is built twice, since what is loaded then is loaded once."""
    every = list(tiles(conv, count))
    measured(conv, *every[0])
    return [measured(conv, row, tile) for row, tile in every]


def together(conv: Conv2d, count: int, processes: int) -> list[dict[str, Seconds]]:
    """The seconds of each candidate in processes that build at the same time."""
    command = [sys.executable, __file__, str(conv), "--count", str(count), "--rows"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) for _ in range(processes)]
    return [row for one in started for row in json.loads(one.communicate()[0].splitlines()[-1])]


def means(rows: list[dict[str, Seconds]]) -> dict[str, dict[str, float]]:
    """CPU seconds and time of each step, on average."""
    columns = {name: list(zip(*(row[name] for row in rows), strict=True)) for name in rows[0]}
    return {name: {"cpu_s": statistics.mean(cpu), "s": statistics.mean(clock)} for name, (cpu, clock) in columns.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("layer", type=Conv2d.parse, help="key of the layer")
    parser.add_argument("--count", type=int, default=8, help="candidates")
    parser.add_argument("--processes", type=int, default=1, help="processes that build at the same time")
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("--rows", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.count < 1 or arguments.processes < 1:
        parser.error("`--count` and `--processes` must be at least 1.")
    if arguments.rows:
        print(json.dumps(here(arguments.layer, arguments.count)))
        return
    found = {}
    for processes in sorted({1, arguments.processes}):
        found[processes] = means(together(arguments.layer, arguments.count, processes))
        said = (f"{name} {one['cpu_s']:.2f} CPU s in {one['s']:.2f} s" for name, one in found[processes].items())
        print(f"{processes} at a time: {', '.join(said)}", flush=True)
    if arguments.json is not None:
        made = {"date": utc_now(), "conv": str(arguments.layer), "cpus": len(os.sched_getaffinity(0)), "count": arguments.count}
        replace_json(arguments.json, {**made, "processes": {str(number): one for number, one in found.items()}})


if __name__ == "__main__":
    main()
