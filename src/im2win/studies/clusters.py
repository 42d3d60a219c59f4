"""The study of thread-block clusters: the best recorded wgmma tiles, without clusters and in clusters of 2 and 4, in one run.

The blocks of a cluster share multicast copies of filters (`cuda.loaders.multicast`), and wait for each other before a pipeline stage is
written again. One stage more may hide that wait, and may also help blocks without clusters. All tiles are therefore timed with the recorded
number of stages and with one more. Every variant is checked against the float64 reference before it is timed and again afterwards, as in
the benchmark (cuda_harness.py).
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from im2win.bench.cpu import spreads
from im2win.bench.cuda_builds import Library, TileRecipe, build_all
from im2win.bench.cuda_harness import Contender, interleaved, prepared
from im2win.bench.results import Spread
from im2win.device.gpu import Gpu, device_gpu
from im2win.numerics.tolerance import tolerance
from im2win.records.log import Log, best_first
from im2win.records.lookup import PACKAGED, superseded, tile_problems
from im2win.registry.backends import backend_for
from im2win.registry.schedules import SCHEDULES, schedule_of
from im2win.schedules.cuda.legality.multistage import CLUSTERS
from im2win.schedules.cuda.tiles.multistage import CudaTile
from im2win.schedules.cuda.tiles.persistent import PersistentTile
from im2win.spec.conv2d import LAYOUTS, Conv2d
from im2win.spec.suites import Layer, suite
from im2win.studies.entries import CLUSTERS as STUDY
from im2win.studies.entries import ROWS, STAYS, TAPS
from im2win.studies.gpu_study import head, kernel_contender, timed
from im2win.tuner.runners.cuda import Bench, verify

SEED = 0
ROUNDS = 9
MORE = (0, 1)  # pipeline stages beyond the recorded tile's
_HALF_NHWC = {"dtype": "float16", "layout": "NHWC"}
_MAPS = ("map224", "map320", "map512")
_PROBLEMS: tuple[tuple[str, int, dict[str, str]], ...] = (
    ("papers12", 128, {"dtype": "float32", "layout": "NCHW"}),
    ("papers12", 128, _HALF_NHWC),
    ("resnet50", 32, _HALF_NHWC),
    *(("winograd64", batch, {"dtype": "float16", "layout": layout}) for layout in LAYOUTS for batch in (1, 16)),
)


@dataclass(frozen=True)
class Variant:
    """A recorded tile, without clusters or with them; `more` is its number of pipeline stages beyond the record's."""

    family: str
    algorithm: str
    tile: Any
    more: int

    def __str__(self) -> str:
        return f"{self.family} {self.algorithm} cluster {self.tile.cluster} stages {self.tile.stages}"


@dataclass(frozen=True)
class Entry:
    """One variant on one problem: milliseconds per call, or the reason why there is no time.

    Attributes:
        family: "taps", "rows" or "stays", see the function `family`.
        cluster: thread blocks of a cluster.
        more: pipeline stages beyond the recorded tile's.
        error: against the reference, relative to the largest output.
    """

    conv: str
    family: str
    algorithm: str
    tile: dict[str, Any]
    cluster: int
    more: int
    ms: float | None = None
    p10_ms: float | None = None
    p90_ms: float | None = None
    samples: int = 0
    error: float | None = None
    failed: str | None = None


def problems() -> list[Layer]:
    """The layers of the study: those of the im2win papers, of ResNet-50, and some maps of the suite `winograd64`."""
    return [
        Layer(layer.name, layer.conv.with_(**types), layer.count)
        for name, batch, types in _PROBLEMS
        for layer in suite(name, batch)
        if name != "winograd64" or layer.name in _MAPS
    ]


def family(tile: Any) -> str | None:
    """The family of a tile among those that are compared; None if it is in none.

    They are wgmma kernels tap by tap without Winograd's form and without split-K, Winograd tiles of a row, and persistent kernels.
    """
    if type(tile) is PersistentTile:
        return STAYS
    if type(tile) is not CudaTile or not tile.warpgroup:
        return None
    if tile.in_rows:
        return ROWS
    return TAPS if tile.outputs == 0 else None


def chosen(conv: Conv2d, gpu: Gpu, log: Log) -> dict[str, tuple[str, Any]]:
    """By family, algorithm and tile of a problem's best record (`Record.cost`) on this GPU, among records without clusters.

    The tile must be legal today. The code may have changed since the record, because everything is measured again.
    """
    backend, found = backend_for(gpu), dict[str, tuple[str, Any]]()
    records = log.read(conv, gpu.name)
    for record in best_first(record for record in records if record.target == "cuda" and record.method in SCHEDULES):
        if superseded(record, records) or tile_problems(conv, record.method, record.tile, gpu):
            continue
        tile: Any = backend.tile(schedule_of(record.method), record.tile)
        name = family(tile)
        if name is not None and tile.cluster == 1:
            found.setdefault(name, (record.method, tile))
    return found


def variants(conv: Conv2d, gpu: Gpu, log: Log) -> list[Variant]:
    """Every legal variant of the tiles chosen for a problem; none for a tile that does not support clusters."""
    found = []
    for name, (algorithm, tile) in chosen(conv, gpu, log).items():
        made = (
            Variant(name, algorithm, replace(tile, cluster=blocks, stages=tile.stages + more), more)
            for blocks, more in itertools.product(CLUSTERS, MORE)
        )
        legal = [one for one in made if not tile_problems(conv, algorithm, one.tile.as_dict(), gpu)]
        found += legal if any(one.tile.cluster > 1 for one in legal) else []
    return found


def recipes(layers: Sequence[Layer], gpu: Gpu, log: Log) -> dict[tuple[Conv2d, Variant], TileRecipe]:
    """Recipes of the kernels, by problem and variant."""
    convs = dict.fromkeys(layer.conv for layer in layers)
    return {(conv, one): TileRecipe(conv, one.algorithm, gpu, tile=one.tile) for conv in convs for one in variants(conv, gpu, log)}


def run(
    layers: Sequence[Layer],
    *,
    log: Log | None = None,
    rounds: int = ROUNDS,
    progress: Callable[[int, int, list[Entry]], None] | None = None,
    keep: Callable[[dict[str, Any]], object] | None = None,
) -> dict[str, Any]:
    """Times every variant on every layer on the first GPU. All kernels are built before the first is timed.

    Args:
        layers: problems, as `problems` returns them; those without a tile that supports clusters have no entry.
        log: records of tiles; None: the records that ship with the package.
        rounds: samples of each variant.
        progress: called with (problems done, problems in all, entries of the problem) after each problem.
        keep: called with the partial study after each problem.

    Returns:
        The study, as it is written to JSON (see `cluster_report`).

    Raises:
        ValueError: `rounds` below 1, or no layer has a recorded tile that supports clusters.
        NoGpuError: there is no GPU.
        ToolchainError: there is no CUDA compiler.
    """
    if rounds < 1:
        raise ValueError(f"clusters: `rounds` (={rounds}) must be at least 1.")
    gpu = device_gpu()
    backend_for(gpu).check_tools()
    import torch

    log = Log(PACKAGED) if log is None else log
    wanted = recipes(layers, gpu, log)
    if not wanted:
        raise ValueError(f"clusters: `layers` must have one of which {log.folder} has a tile for {gpu.name} that may be in clusters.")
    facts = head(STUDY, layers, gpu)
    entries: list[Entry] = []

    def study() -> dict[str, Any]:
        return {**facts, "entries": [asdict(entry) for entry in entries]}

    with tempfile.TemporaryDirectory(prefix="im2win-clusters-") as folder:
        built = build_all(wanted, Path(folder))
        convs = list(dict.fromkeys(conv for conv, _ in wanted))
        for done, conv in enumerate(convs, 1):
            torch.cuda.empty_cache()
            found = time_problem(conv, gpu, {one: library for (of, one), library in built.items() if of == conv}, rounds)
            entries += found
            if progress is not None:
                progress(done, len(convs), found)
            if keep is not None:
                keep(study())
    return study()


def time_problem(conv: Conv2d, gpu: Gpu, libraries: Mapping[Variant, Library | str], rounds: int) -> list[Entry]:
    """Checks and times the variants of one problem in interleaved rounds, and checks them again."""
    bench, backend = Bench(conv, SEED), backend_for(gpu)
    allowed = {str(one): tolerance(conv, backend.accuracy(one.tile)) for one in libraries}
    preparations = [(str(one), partial(kernel_contender, bench, library, allowed[str(one)])) for one, library in libraries.items()]
    ready, failed = prepared(preparations)
    samples = interleaved(bench, ready, rounds)
    for name, contender in ready.items():
        message, _ = verify(bench, contender.call, allowed[name])
        if message:
            failed[name] = f"after timing: {message}"
            del samples[name]
    found = spreads(samples)
    return [_entry(conv, one, found.get(str(one)), ready.get(str(one)), failed.get(str(one))) for one in libraries]


def _entry(conv: Conv2d, one: Variant, spread: Spread | None, contender: Contender | None, failed: str | None) -> Entry:
    entry = Entry(str(conv), one.family, one.algorithm, one.tile.as_dict(), one.tile.cluster, one.more)
    return timed(entry, spread, contender, failed)
