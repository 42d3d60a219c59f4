"""The study of searches: TVM's default MetaSchedule beside our TVM schedules, with as many trials and the same arithmetic, in one run.

Both search anew, in float32 with IEEE products on CUDA cores. TVM gets the textbook definition and its default space; ours is
`direct/scheduled` of the accuracy "exact". The hand-built kernel that the model chooses, the best kernel that the records know, PyTorch and
cuDNN's algorithms by name are timed beside them. Layers are taken a few at a time: TVM's searches of these run at once, since one of them
leaves most CPUs idle, then ours, one after the other; then they are timed. So a run that must end early has whole layers.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from im2win.bench.cuda_builds import Builders, Library, TileRecipe
from im2win.bench.cuda_harness import tvm_subject
from im2win.common.messages import brief
from im2win.device.cpu import usable_cpus
from im2win.device.gpu import Gpu
from im2win.records.log import Log
from im2win.records.record import EQUAL, Record
from im2win.registry.backends import backend_for
from im2win.registry.schedules import schedule_of
from im2win.spec.conv2d import Conv2d
from im2win.spec.suites import Layer
from im2win.studies.entries import FIRST_SCHEDULED as FIRST
from im2win.studies.entries import HAND_BUILT, OURS_BEST, OURS_SEARCHED, TVM_SEARCHED
from im2win.studies.entries import TVM_SEARCH as STUDY
from im2win.studies.gpu_study import head, same
from im2win.studies.scheduled import Entry, checked, hand_built, time_layer
from im2win.tuner.pool import Pool
from im2win.tuner.tuning import TuneError, tune

GROUP = 4  # layers that are searched at once
KERNELS = 3  # of ours that a layer times
TIMING_S = 15.0  # seconds of a layer, about, that TVM's searches leave for ours and for the timing


def run(
    layers: Sequence[Layer], trials: int = 64, *, group: int = GROUP, limit_s: float = math.inf, rounds: int = 15, seconds: float = 0.3,
    cache: Path | None = None, progress: Callable[[int, int, list[Entry]], None] | None = None, before: Mapping[str, Any] | None = None,
    keep: Callable[[dict[str, Any]], None] | None = None, note: Callable[[str], object] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Searches and times every layer on the first GPU.

    Args:
        layers: problems in float32, NCHW, without an epilogue, the most important first.
        trials: candidates that each search may try. Ours ends earlier where it gains nothing more.
        group: layers that TVM searches at once, fewer where no more are left or fit into `limit_s`.
        limit_s: seconds after which no layers are begun, and at which TVM's searches end; a layer whose search ended has no time of TVM.
        rounds, seconds: most samples, and most seconds of timed calls, of a subject on a layer.
        cache: keep TVM's searches in this folder.
        progress: called with (layers done, layers in all, entries of the layer) after each layer.
        before: an interrupted study. Its layers are not searched again if it is of the same device, libraries, kernels and trials.
        keep: called with the study after each layer.
        note: called with lines of text while TVM searches.

    Returns:
        The study, as it is written to JSON: beside the facts of the run and `entries`, in `searches` the layers of each group, the trials
        of ours by layer, and the seconds of TVM's searches and of ours.

    Raises:
        ValueError: no layers, or `trials`, `group`, `rounds` or `limit_s` too small.
        NoGpuError: there is no GPU. ToolchainError: there is no CUDA compiler.
    """
    if min(trials, group) < 1 or not limit_s > 0:
        raise ValueError(f"`trials` (={trials}) and `group` (={group}) must be at least 1, and `limit_s` (={limit_s:g}) above 0.")
    begun = time.monotonic()
    gpu = checked(layers, trials, rounds)
    study: dict[str, Any] = {**head(STUDY, layers, gpu), "trials": trials, "searches": [], "entries": []}
    if before is not None and before.get("trials") == trials and same(before, study):
        study |= {name: list(before[name]) for name in ("searches", "entries")}
    known = {entry["conv"] for entry in study["entries"]}
    left_over = [layer for layer in layers if str(layer.conv) not in known]
    slowest = 0.0  # seconds of a layer
    processes = min(KERNELS * group, max(1, usable_cpus() - 1))
    with tempfile.TemporaryDirectory(prefix="im2win-searches-") as folder, Pool(gpu) as pool, Builders(processes) as builders:
        while left_over:
            started = time.monotonic()
            fitting = int(min((limit_s - (started - begun)) / slowest, group)) if slowest else group
            if fitting < 1:
                break
            some, left_over = left_over[:fitting], left_over[fitting:]
            place = Path(folder) / str(len(left_over))
            place.mkdir()
            left = limit_s - (started - begun) - TIMING_S * len(some)
            failed, searches = _searched(some, gpu, trials, cache or place / "tvm", left, note)
            built, ours = _ours(some, gpu, trials, place, pool, builders)
            study["searches"].append({"layers": [layer.name for layer in some], **searches, **ours})
            tvm = partial(tvm_subject, gpu=gpu, trials=trials, cache=cache or place / "tvm", failed=failed)
            for done, layer in enumerate(some, len(layers) - len(left_over) - len(some) + 1):
                entries = time_layer(layer, built[layer.conv], rounds, seconds, {TVM_SEARCHED: tvm})
                study["entries"] += [asdict(entry) for entry in entries]
                if keep is not None:
                    keep(study)
                if progress is not None:
                    progress(done, len(layers), entries)
            slowest = max(slowest, (time.monotonic() - started) / len(some))
    return study


def _searched(
    layers: Sequence[Layer], gpu: Gpu, trials: int, cache: Path, left_s: float, note: Callable[[str], object] | None
) -> tuple[dict[Conv2d, str], dict[str, Any]]:
    """TVM's searches: the reasons of those that failed, and their seconds. `left_s`: seconds in which they must end, but for a minimum."""
    from im2win.bench.peers.tvm_searches import SEARCH_S, search_all

    started = time.monotonic()
    limit_s = max(1.0, min(left_s, SEARCH_S))
    failed = search_all([layer.conv for layer in layers], trials, gpu, cache, note=note, processes=len(layers), limit_s=limit_s)
    return failed, {"tvm_s": round(time.monotonic() - started, 1)}


def _ours(
    layers: Sequence[Layer], gpu: Gpu, trials: int, folder: Path, pool: Pool, builders: Builders
) -> tuple[dict[Conv2d, dict[str, Library | str]], dict[str, Any]]:
    """Our search: the kernels of each layer by subject, or the reason why there is none, and how many trials and seconds it took."""
    started, logs = time.monotonic(), folder / "logs"
    recipes: dict[tuple[Conv2d, str], TileRecipe] = {}
    reasons: dict[tuple[Conv2d, str], str] = {}
    for conv in (layer.conv for layer in layers):
        recipes[conv, HAND_BUILT] = hand_built(conv, gpu)
        recipes[conv, OURS_BEST] = TileRecipe(conv, "auto", gpu, "exact", recorded=True)
        try:
            record = tune(conv, "cuda", algorithm=FIRST, trials=trials, logs=logs, accuracy="exact", pool=pool)
        except (ValueError, TuneError) as error:
            reasons[conv, OURS_SEARCHED] = brief(error)
            continue
        tile = backend_for(gpu, "exact").tile(schedule_of(record.method), record.tile)
        recipes[conv, OURS_SEARCHED] = TileRecipe(conv, record.method, gpu, "exact", tile=tile)
    seconds = time.monotonic() - started
    (folder / "built").mkdir()
    built = {**reasons, **builders.build_all(recipes, folder / "built")}
    libraries = {
        layer.conv: {name: built[layer.conv, name] for name in (OURS_SEARCHED, HAND_BUILT, OURS_BEST)} for layer in layers
    }
    return libraries, {"trials": {layer.name: _trials(layer.conv, gpu, logs) for layer in layers}, "ours_s": round(seconds, 1)}


def _trials(conv: Conv2d, gpu: Gpu, logs: Path) -> int:
    """Candidates of our search that were built and measured, or failed."""
    records: Mapping[Any, Record] = {(one.method, str(one.tile)): one for one in Log(logs).read(conv, gpu.name)}
    return sum(one.outcome != EQUAL and one.method == FIRST for one in records.values())
