"""On a machine with a GPU: small layers of ResNet-50 with and without launch overlap (`im2win.schedules.cuda.launch_overlap`).

    python benchmarks/gpu/launch_overlap.py OUT [--layers KEY,KEY] [--check] [--limit 110]

Each layer's best known tile is built twice, the same but for overlap. Both kernels are checked against float64, then in chains of calls
that read what the call before wrote: chains with overlap must equal those without bit for bit, on a stream and in a CUDA graph. Then calls
are timed in three ways: back to back on one stream, as a CUDA graph of many calls, and alone after the level-2 cache was overwritten, as
benchmarks do. The table has the microseconds without overlap, and the speedup by it (above 1: faster). OUT/launch-overlap.json has all
samples. --check times nothing and compares one chain each, for compute-sanitizer. Needs PyTorch with CUDA, and nvcc or nvrtc.
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from im2win.bench.cuda_builds import Library, TileRecipe, build_all, load
from im2win.bench.cuda_harness import WrongError, op_subject
from im2win.common.files import replace_json
from im2win.device.gpu import Gpu, device_gpu
from im2win.numerics.tolerance import tolerance
from im2win.reports.launch_overlap import speedup
from im2win.spec.conv2d import Conv2d
from im2win.spec.suites import Layer
from im2win.studies import gpu_study
from im2win.studies.entries import LAUNCH_OVERLAP, OVERLAP_KINDS, OVERLAPPING, SEPARATE
from im2win.tuner.runners.cuda import Bench, sample

LAYERS = (
    # channels last: one kernel each, 7x7 and 14x14
    "n32-c512x7x7-k512x3x3-p1-float16-NHWC", "n32-c512x7x7-k2048x1x1-float16-NHWC", "n32-c256x14x14-k256x3x3-p1-float16-NHWC",
    "n32-c1024x14x14-k256x1x1-float16-NHWC", "n1-c512x7x7-k512x3x3-p1-float16-NHWC", "n1-c256x14x14-k256x3x3-p1-float16-NHWC",
    # channels first: most copy their input first
    "n32-c512x7x7-k512x3x3-p1-float16", "n32-c1024x14x14-k2048x1x1-s2-float16", "n32-c512x28x28-k1024x1x1-s2-float16",
    "n32-c256x14x14-k256x3x3-p1-float16", "n32-c512x14x14-k512x3x3-s2-p1-float16", "n1-c512x7x7-k512x3x3-p1-float16",
)  # fmt: skip
CHAIN, REPEATS = 20, 25  # calls of a chain, and chains that are compared
CALLS = 100  # calls that follow one another, for a sample on a stream
GRAPH_CALLS, REPLAYS = 20, 5
ROUNDS = 9
ALONE = 31  # samples of calls by themselves
BUSY_CYCLES = 15_000_000  # the device waits so long, while the host issues the calls of a sample
SECONDS = 110.0



class Chain:
    """Calls of a layer, each on what the call before wrote.

    Where output and input have the same shape, two tensors change places, so that each call overwrites what the one before it read. Else a
    kernel of PyTorch copies as much of the output as fits to the input.
    """

    def __init__(self, op: Any, first: Any, filters: Any, calls: int = CHAIN) -> None:
        self._layer, self._first, self._calls, self._conv = op.bind(filters), first, calls, op.conv
        self._x, self._y = first.clone(), first.new_empty(op.conv.output_shape)

    def run(self) -> Any:
        """The last output."""
        self._x.copy_(self._first)
        x, y = self._x, self._y
        for _ in range(self._calls):
            self._layer(x, out=y)
            if x.shape == y.shape:
                x, y = y, x
            else:
                count = min(x.numel(), y.numel())
                x.view(-1)[:count].copy_(y.view(-1)[:count])
        return x if x.shape == y.shape else y


def chain_tensors(bench: Bench) -> tuple[Any, Any]:
    """Input and filters with which the outputs of a chain keep their magnitude."""
    depth = math.prod(bench.conv.filter_shape[1:])
    return bench.inputs["data"], bench.inputs["filter"] / math.sqrt(depth)


def captured(call: Callable[[], Any]) -> Any:
    """A CUDA graph of a call."""
    import torch

    call()  # kernels are loaded by a first call
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def compare_chains(bench: Bench, ops: dict[str, Any], repeats: int) -> None:
    """Runs chains on a stream, and one in a CUDA graph.

    Raises:
        WrongError: a chain with overlap ends in another output than the one without.
    """
    import torch

    first, filters = chain_tensors(bench)
    right = Chain(ops[SEPARATE], first, filters).run().clone()
    torch.cuda.synchronize()
    if not bool(torch.isfinite(right).all()) or not bool(right.any()):
        raise WrongError("the chain without overlap ends in zeros, or in numbers that are not finite: it compares nothing.")
    chain = Chain(ops[OVERLAPPING], first, filters)
    for number in range(repeats):
        if not torch.equal(chain.run(), right):
            raise WrongError(f"chain {number} with overlap differs from the one without.")
    last: list[Any] = []
    graph = captured(lambda: last.append(chain.run()))
    for number in range(repeats):
        graph.replay()
        if not torch.equal(last[-1], right):
            raise WrongError(f"chain {number} with overlap differs in a CUDA graph from the one without.")


def seconds_of(issue: Callable[[], Any], calls: int) -> float:
    """Seconds of a call, of so many that are issued while the device is busy."""
    import torch

    events: Any = torch.cuda.Event
    start, end = events(enable_timing=True), events(enable_timing=True)
    torch.cuda._sleep(BUSY_CYCLES)
    start.record()
    issue()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e-3 / calls


def repeated(call: Callable[[], Any], times: int) -> None:
    for _ in range(times):
        call()


def timed(bench: Bench, calls: dict[str, Callable[[], Any]]) -> dict[str, dict[str, list[float]]]:
    """Samples in seconds, by the way of timing and by kernel, in interleaved rounds."""
    graphs = {name: captured(partial(repeated, call, GRAPH_CALLS)) for name, call in calls.items()}
    taken: dict[str, dict[str, list[float]]] = {kind: {name: [] for name in calls} for kind in OVERLAP_KINDS}
    for number in range(-1, ROUNDS):
        for name, call in list(calls.items())[:: 1 if number % 2 else -1]:
            stream = seconds_of(partial(repeated, call, CALLS), CALLS)
            graph = seconds_of(partial(repeated, graphs[name].replay, REPLAYS), GRAPH_CALLS * REPLAYS)
            if number >= 0:  # the first round warms up
                taken["stream"][name].append(stream)
                taken["graph"][name].append(graph)
    for number in range(ALONE):
        for name, call in list(calls.items())[:: 1 if number % 2 else -1]:
            taken["alone"][name].append(sample(bench, call))
    return taken


def measured(key: str, libraries: dict[str, Library | str], check: bool) -> dict[str, Any]:
    """The result of a layer.

    Raises:
        WrongError, BuildError: a kernel is wrong, or was not compiled.
    """
    conv = Conv2d.parse(key)
    ops = {name: load(library) for name, library in libraries.items()}
    if ops[SEPARATE].tile != ops[OVERLAPPING].tile or ops[SEPARATE].method != ops[OVERLAPPING].method:
        kernels = " and ".join(f"{op.method} {op.tile}" for op in ops.values())
        raise WrongError(f"different kernels: {kernels}.")
    bench = Bench(conv, 0)
    subjects = {name: op_subject(bench, op, tolerance(conv, "float32")) for name, op in ops.items()}
    compare_chains(bench, ops, 1 if check else REPEATS)
    errors = {name: one.error for name, one in subjects.items()}
    head = {"layer": key, "algorithm": ops[OVERLAPPING].method, "tile": ops[OVERLAPPING].tile, "errors": errors}
    return head if check else head | {"samples_s": timed(bench, {name: one.call for name, one in subjects.items()})}


def line(result: dict[str, Any]) -> str:
    """A row of the table."""
    kind = result["tile"].get("tma_boxes", "")
    cells = f"{result['layer']:<44}{result['algorithm'].split('/')[-1]:<18}{kind:<20}"
    if "samples_s" not in result:
        return f"{cells} correct"
    for samples in result["samples_s"].values():
        cells += f"{statistics.median(samples[SEPARATE]) * 1e6:8.1f}{speedup(samples):7.3f}"
    return cells


def recipes(keys: list[str], gpu: Gpu) -> dict[tuple[str, str], TileRecipe]:
    """What is built: of each layer the best known tile, without overlap and with it."""
    return {
        (key, name): TileRecipe(Conv2d.parse(key), "auto", gpu, recorded=True, overlap=name == OVERLAPPING)
        for key in keys for name in (SEPARATE, OVERLAPPING)
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder of the result")
    parser.add_argument("--layers", help="only these keys")
    parser.add_argument("--check", action="store_true", help="check only, with short chains")
    parser.add_argument("--limit", type=float, default=SECONDS, help="seconds after which no further layer begins")
    given = parser.parse_args()
    begin, gpu, keys = time.monotonic(), device_gpu(), given.layers.split(",") if given.layers else list(LAYERS)
    given.out.mkdir(parents=True, exist_ok=True)
    results, failed = list[dict[str, Any]](), dict[str, str]()
    with tempfile.TemporaryDirectory(prefix="im2win-overlap-") as folder:
        built = build_all(recipes(keys, gpu), Path(folder))
        print(f"built in {time.monotonic() - begin:.0f} s; microseconds without overlap, speedup by it:", flush=True)
        print(f"{'layer':<44}{'schedule':<18}{'boxes':<20}" + "".join(f"{kind:>8}{'':7}" for kind in OVERLAP_KINDS))
        for key in keys:
            if time.monotonic() - begin > given.limit:
                failed[key] = "no time left"
                continue
            try:
                results.append(measured(key, {name: built[key, name] for name in (SEPARATE, OVERLAPPING)}, given.check))
                print(line(results[-1]), flush=True)
            except Exception as error:  # one layer's failure does not hide the others
                failed[key] = f"{type(error).__name__}: {error}"
                print(f"{key:<44}{failed[key][:200]}", flush=True)
    for kind in () if given.check else OVERLAP_KINDS:
        ratios = [speedup(one["samples_s"][kind]) for one in results]
        if ratios:
            print(f"{kind}: geometric mean {statistics.geometric_mean(ratios):.3f}, {min(ratios):.3f} to {max(ratios):.3f}")
    path = given.out / "launch-overlap.json"
    facts = gpu_study.head(LAUNCH_OVERLAP, [Layer(key, Conv2d.parse(key)) for key in keys], gpu)
    replace_json(path, {**facts, "layers": results, "failed": failed})
    print(f"{len(results)} layers correct, {len(failed)} failed; {time.monotonic() - begin:.0f} s; written to {path}")


if __name__ == "__main__":
    main()
