"""Does the learned model help? Searches with and without it, replayed on candidates of each layer that are measured once.

    python benchmarks/learned_model.py --target cuda --logs build/learned-model --json benchmarks/studies/DEVICE/learned-model.json

What is measured is kept in the folder of `--logs`: a run that was stopped goes on, and a layer that is done is not measured again. All
GPUs that `CUDA_VISIBLE_DEVICES` names measure at the same time, a layer each. Without `--json` a run only measures, so that several
processes can measure disjoint layers in one folder; `--replay-only` then makes the study of all of them.
"""

from __future__ import annotations

import argparse
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from im2win.cli.commands import workload
from im2win.codegen.llvm import ToolchainError
from im2win.common.files import replace_json
from im2win.common.locking import LogError
from im2win.common.worker_pool import MachineError
from im2win.device.gpu import KNOWN, NoGpuError
from im2win.registry.backends import Device, device_for
from im2win.spec.suites import Layer
from im2win.studies import learned_model
from im2win.studies.learned_pool import LayerPool, load, measure_layer
from im2win.tuner.layers import shared_out
from im2win.tuner.pool import Pool, pools

DEFAULTS = {"cpu": (1, None, None), "cuda": (128, "float16", "NHWC")}  # batch, element type and layout


def read(named: Sequence[str], batch: int, dtype: str | None, layout: str | None) -> list[Layer]:
    """Distinct layers of `SUITE` or `SUITE:LAYER,LAYER`, as often as given."""
    found = []
    for text in named:
        what, _, names = text.partition(":")
        found += workload.read(what, batch=batch, names=names or None, dtype=dtype, layout=layout)[0]
    return list({layer.conv: layer for layer in found}.values())


def measured(layers: Sequence[Layer], device: Device, folder: Path, top: int, uniform: int) -> list[LayerPool]:
    """The pools of layers, each measured as far as it was not."""
    found: dict[str, LayerPool] = {}

    def one(layer: Layer, workers: Pool, stop: threading.Event) -> None:
        def report(done: int, total: int) -> None:
            if stop.is_set():
                raise KeyboardInterrupt
            if done % 50 == 0:
                print(f"{layer.name}: {done} of {total} candidates", flush=True)

        pool = found[str(layer.conv)] = measure_layer(layer, device, folder, top, uniform, workers, report)
        place, best = pool.best
        print(
            f"{layer.name}: {len(pool.measured)} of {pool.space} candidates in {pool.measuring_s:.0f} s, after {pool.ranking_s:.1f} s of "
            f"ranking; best {1e3 * best:.4f} ms, number {pool.places[place]} by estimate",
            flush=True,
        )

    with pools(device, len(layers)) as workers:
        shared_out(layers, workers, one)
    return [found[str(layer.conv)] for layer in layers]


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
    batch, dtype, layout = DEFAULTS[options.target]
    try:
        layers = read(options.layers, options.batch or batch, options.dtype or dtype, options.layout or layout)
        device = KNOWN[options.device] if options.device else device_for(options.target)
        if options.replay_only:
            found = kept(layers, device, options.logs)
        else:
            found = measured(layers, device, options.logs, options.top, options.uniform)
        if options.json is not None:
            replace_json(options.json, learned_model.run(found, device, options.seeds, show))
    except (ValueError, NoGpuError, ToolchainError, LogError) as error:
        parser.error(str(error))
    except MachineError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
