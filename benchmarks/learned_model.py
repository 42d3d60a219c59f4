"""Does the learned model help? Searches with and without it, replayed on candidates of each layer that are measured once.

    python benchmarks/learned_model.py --target cuda --logs build/learned-model --json benchmarks/studies/DEVICE/learned-model.json

What is measured is kept in the folder of `--logs`: a run that was stopped goes on, and a layer that is done is not measured again. All
GPUs that `CUDA_VISIBLE_DEVICES` names measure at the same time, a layer each. Without `--json` a run only measures, so that several
processes can measure disjoint layers in one folder; `--replay-only` then makes the study of all of them. A run with `--limit` ends by
itself and makes the study of the layers that are measured whole; the next one goes on with the others.
"""

from __future__ import annotations

import argparse
import math
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from im2win.cli.commands import workload
from im2win.codegen.llvm import ToolchainError
from im2win.common.files import replace_json
from im2win.common.locking import LogError
from im2win.common.worker_pool import MachineError
from im2win.device.gpu import KNOWN, NoGpuError
from im2win.registry.backends import Device, device_for
from im2win.spec.conv2d import Conv2d
from im2win.spec.suites import Layer
from im2win.studies import learned_model
from im2win.studies.learned_pool import LayerPool, done_before, load, measure_layer, rankings
from im2win.tuner.layers import shared_out
from im2win.tuner.pool import Pool, Ranking, pools

TOGETHER = 4  # layers whose tiles are ranked at once
DEFAULTS = {"cpu": (1, None, None), "cuda": (128, "float16", "NHWC")}  # batch, element type and layout


def read(named: Sequence[str], batch: int, dtype: str | None, layout: str | None) -> list[Layer]:
    """Distinct layers of `SUITE` or `SUITE:LAYER,LAYER`, as often as given."""
    found = []
    for text in named:
        what, _, names = text.partition(":")
        found += workload.read(what, batch=batch, names=names or None, dtype=dtype, layout=layout)[0]
    return list({layer.conv: layer for layer in found}.values())


class Over(Exception):
    """The time of the run is over."""


def measured(layers: Sequence[Layer], device: Device, folder: Path, top: int, uniform: int, end: float) -> list[LayerPool]:
    """The pools of layers, each measured as far as it was not. At the time `end` (of `time.monotonic`) those that are done are returned."""
    found: dict[str, LayerPool] = {}
    lacking = [layer for layer in layers if done_before(layer, device, folder, top, uniform) is None]
    ranked: dict[Conv2d, tuple[Ranking, float]] = {}

    def one(layer: Layer, workers: Pool, stop: threading.Event) -> None:
        def report(done: int, total: int) -> None:
            if stop.is_set():
                raise KeyboardInterrupt
            if time.monotonic() > end:
                print(f"{layer.name}: {done} of {total} candidates; the next run goes on", flush=True)
                raise Over
            if done % 50 == 0:
                print(f"{layer.name}: {done} of {total} candidates", flush=True)

        if layer in lacking and time.monotonic() > end:
            return
        if layer in lacking and layer.conv not in ranked:
            alone = [one for one in lacking[lacking.index(layer) :] if one.conv not in ranked][: TOGETHER if single else 1]
            ranked.update(rankings(alone, device, workers))
        try:
            pool = measure_layer(layer, device, folder, top, uniform, workers, report, ranked=ranked.get(layer.conv))
        except Over:
            return
        found[str(layer.conv)] = pool
        place, best = pool.best
        print(
            f"{layer.name}: {len(pool.measured)} of {pool.space} candidates in {pool.measuring_s:.0f} s, after {pool.ranking_s:.1f} s of "
            f"ranking; best {1e3 * best:.4f} ms, number {pool.places[place]} by estimate",
            flush=True,
        )

    with pools(device, len(layers)) as workers:
        single = len(workers) == 1
        shared_out(layers, workers, one)
    return [found[str(layer.conv)] for layer in layers if str(layer.conv) in found]


def kept(layers: Sequence[Layer], device: Device, folder: Path) -> list[LayerPool]:
    """The pools that a folder holds.

    Raises:
        ValueError: it lacks one.
    """
    found = [load(folder, device, layer.conv) for layer in layers]
    if lacking := [layer.name for layer, pool in zip(layers, found, strict=True) if pool is None]:
        raise ValueError(f"`--logs` (={str(folder)!r}) has no candidates of today's source for {', '.join(lacking)} on {device.name}.")
    return [pool for pool in found if pool is not None]


def show(done: int, total: int) -> None:
    """A line for some replays."""
    if done % 50 == 0 or done == total:
        print(f"{done} of {total} replays", flush=True)


def main() -> None:
    """Reads the command line, measures, replays, writes the study."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--target", choices=list(DEFAULTS), default="cpu")
    parser.add_argument("--layers", nargs="+", default=["papers12"], metavar="SUITE[:A,B]", help="suites, or layers of them by name")
    parser.add_argument("--batch", type=int, help="1 on a CPU and 128 on a GPU if not said")
    parser.add_argument("--dtype", help="that of the suite on a CPU and float16 on a GPU if not said")
    parser.add_argument("--layout", help="that of the suite on a CPU and NHWC on a GPU if not said")
    parser.add_argument("--top", type=int, default=200, help="candidates by the analytic estimate")
    parser.add_argument("--uniform", type=int, default=200, help="candidates drawn from the whole space")
    parser.add_argument("--seeds", type=int, default=learned_model.SEEDS)
    parser.add_argument("--logs", type=Path, required=True, help="folder of what is measured")
    parser.add_argument("--limit", type=float, default=math.inf, help="seconds after which no candidate is measured; the next run goes on")
    parser.add_argument("--replay-only", action="store_true", help="measure nothing")
    parser.add_argument("--device", choices=list(KNOWN), help="with --replay-only, the GPU that measured, where this machine has none")
    parser.add_argument("--json", type=Path, help="write the study here; without it, candidates are measured only")
    options = parser.parse_args()
    if options.top < 1 or options.uniform < 1 or options.seeds < 1:
        parser.error(f"`--top` (={options.top}), `--uniform` (={options.uniform}) and `--seeds` (={options.seeds}) must be at least 1.")
    if options.replay_only and options.json is None:
        parser.error("`--replay-only` needs `--json`.")
    if options.device and not (options.replay_only and options.target == "cuda"):
        parser.error("`--device` is for `--replay-only --target cuda`.")
    if not options.limit > 0:
        parser.error(f"`--limit` (={options.limit:g}) must be above 0.")
    end = time.monotonic() + options.limit
    batch, dtype, layout = DEFAULTS[options.target]
    try:
        layers = read(options.layers, options.batch or batch, options.dtype or dtype, options.layout or layout)
        device = KNOWN[options.device] if options.device else device_for(options.target)
        if options.replay_only:
            found = kept(layers, device, options.logs)
        else:
            found = measured(layers, device, options.logs, options.top, options.uniform, end)
            print(f"{len(found)} of {len(layers)} layers are measured", flush=True)
        if options.json is not None and found:
            replace_json(options.json, learned_model.run(found, device, options.seeds, show))
    except (ValueError, NoGpuError, ToolchainError, LogError) as error:
        parser.error(str(error))
    except MachineError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
