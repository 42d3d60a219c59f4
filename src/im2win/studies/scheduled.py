"""The study of TVM's CUDA schedules: every algorithm's kernel, with and without each rule of the reconstructor, against peers, in one run.

For each layer the first tiles of the model are timed briefly. The fastest one is then timed with the rules of each form, beside the other
algorithms with the same tile, the hand-built kernel of the same arithmetic (IEEE float32 on CUDA cores) and the peers. Every kernel is
checked against the float64 reference before it is timed.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from im2win.bench.cpu import spreads
from im2win.bench.cuda_builds import Builders, Library, TileRecipe
from im2win.bench.cuda_harness import Subject, interleaved, prepared, set_up_peers
from im2win.device.gpu import Gpu, device_gpu
from im2win.numerics.tolerance import tolerance
from im2win.registry.backends import backend_for
from im2win.registry.ranking import first_of
from im2win.registry.schedules import SCHEDULES, Schedule, candidates
from im2win.schedules.cuda.families.scheduled import Scheduled
from im2win.schedules.cuda.tiles.scheduled import ScheduledTile
from im2win.spec.conv2d import Conv2d
from im2win.spec.suites import Layer
from im2win.studies.entries import FIRST_SCHEDULED as FIRST
from im2win.studies.entries import HAND_BUILT, RULES
from im2win.studies.entries import SCHEDULED as STUDY
from im2win.studies.entries import SCHEDULED_NARROW as NARROW
from im2win.studies.gpu_study import every_peer, head, kernel_subject, timed
from im2win.tuner.runners.cuda import Bench

SEED = 0
BRIEF_ROUNDS, BRIEF_S = 3, 0.1


@dataclass(frozen=True)
class Entry:
    """One subject on one layer: milliseconds per call, or the reason why there is no time.

    Attributes:
        subject: a form of the rules, an algorithm and schedule, `HAND_BUILT`, or a peer.
        error: against the reference, relative to the largest output.
    """

    layer: str
    conv: str
    subject: str
    ms: float | None = None
    p10_ms: float | None = None
    p90_ms: float | None = None
    samples: int = 0
    error: float | None = None
    algorithm: str = ""
    tile: Mapping[str, Any] | None = None
    failed: str | None = None


def others() -> list[str]:
    """The schedules of TVM beside direct's, by key."""
    return [key for key, row in SCHEDULES.items() if isinstance(row.cuda, Scheduled) and key != FIRST]


def tiles_of(conv: Conv2d, gpu: Gpu, count: int) -> list[Any]:
    """The first tiles of a layer, those that count as alike once."""
    backend, found = backend_for(gpu, "exact"), dict[Any, Any]()
    for _, tile in backend.ranked(conv, SCHEDULES[FIRST]):
        found.setdefault(backend.shape(SCHEDULES[FIRST], tile), tile)
    return list(found.values())[:count]


def narrow(
    layers: Sequence[Layer], count: int = 2, *, rounds: int = 7, seconds: float = 0.08,
    progress: Callable[[int, int, list[Entry]], None] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Times TVM's schedules on tensor cores beside the hand-built kernels and the peers, on the first GPU.

    Args:
        layers: problems in float16, bfloat16 or int8. count: tiles of a layer, each a subject: `direct/scheduled 1` and so on.
        rounds, seconds, progress: see `run`.

    Returns:
        The study, as it is written to JSON.

    Raises:
        ValueError, NoGpuError, ToolchainError: see `run`.
    """
    gpu = checked(layers, count, rounds)
    facts = head(NARROW, layers, gpu)
    recipes = {(layer.conv, name): recipe for layer in layers for name, recipe in narrow_subjects(layer.conv, gpu, count).items()}
    with tempfile.TemporaryDirectory(prefix="im2win-scheduled-") as folder, Builders() as builders:
        entries = _timed(layers, builders.build_all(recipes, Path(folder)), rounds, seconds, progress)
    return {**facts, "tiles": count, "entries": [asdict(entry) for entry in entries]}


def checked(layers: Sequence[Layer], count: int, rounds: int) -> Gpu:
    """The first GPU, ready to build and time for; raises as `run`."""
    if not layers or count < 1 or rounds < 1:
        raise ValueError(f"`layers` must name one at least, and `count` (={count}) and `rounds` (={rounds}) must be at least 1.")
    gpu = device_gpu()
    backend_for(gpu).check_tools()
    set_up_peers("exact")
    return gpu


def _timed(
    layers: Sequence[Layer], built: Mapping[tuple[Conv2d, str], Any], rounds: int, seconds: float,
    progress: Callable[[int, int, list[Entry]], None] | None,
) -> list[Entry]:  # fmt: skip
    """The entries of all layers, one layer after the other; `built` has each one's kernels by name."""
    entries: list[Entry] = []
    for done, layer in enumerate(layers, 1):
        found = time_layer(layer, {name: one for (conv, name), one in built.items() if conv == layer.conv}, rounds, seconds)
        entries += found
        if progress is not None:
            progress(done, len(layers), found)
    return entries


def narrow_subjects(conv: Conv2d, gpu: Gpu, count: int) -> dict[str, TileRecipe]:
    """What `narrow` builds for a layer, by name: the first tiles of the model, and the hand-built kernel if there is one."""
    found = {
        f"{FIRST} {number}": TileRecipe(conv, FIRST, gpu, "exact", tile=tile) for number, tile in enumerate(tiles_of(conv, gpu, count), 1)
    }
    return found | {HAND_BUILT: hand_built(conv, gpu)}


def hand_built(conv: Conv2d, gpu: Gpu) -> TileRecipe:
    """The default kernel among those that are written loop by loop; of float32 in IEEE arithmetic."""
    backend = backend_for(gpu, "exact")
    rows: list[Schedule] = [row for row in candidates("auto", conv, "cuda", "exact") if not isinstance(row.cuda, Scheduled)]
    first = first_of(conv, {row.key: backend.ranked(conv, row)[:1] for row in rows}, backend)
    if first is None:
        raise ValueError(f"no hand-built kernel computes {conv} with accuracy 'exact'.")
    _, name, tile = first
    return TileRecipe(conv, name, gpu, "exact", tile=tile)


def run(
    layers: Sequence[Layer], count: int = 12, *, rounds: int = 15, seconds: float = 0.4,
    progress: Callable[[int, int, list[Entry]], None] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Times every form on every layer on the first GPU.

    Args:
        layers: problems in float32. count: tiles of a layer that are timed briefly.
        rounds, seconds: most samples, and most seconds of timed calls, of a subject on a layer.
        progress: called with (layers done, layers in all, entries of the layer) after each layer.

    Returns:
        The study, as it is written to JSON.

    Raises:
        ValueError: no layers, or `count` or `rounds` below 1.
        NoGpuError: there is no GPU. ToolchainError: there is no CUDA compiler.
    """
    gpu = checked(layers, count, rounds)
    facts = head(STUDY, layers, gpu)
    with tempfile.TemporaryDirectory(prefix="im2win-scheduled-") as folder, Builders() as builders:
        recipes = {
            (layer.conv, tile): TileRecipe(layer.conv, FIRST, gpu, "exact", tile=tile)
            for layer in layers
            for tile in tiles_of(layer.conv, gpu, count)
        }
        (Path(folder) / "first").mkdir()
        built = builders.build_all(recipes, Path(folder) / "first")
        best = {
            layer.conv: _fastest(layer.conv, {tile: one for (conv, tile), one in built.items() if conv == layer.conv}) for layer in layers
        }
        timed_forms = {(conv, name): recipe for conv, tile in best.items() for name, recipe in forms(conv, tile, gpu).items()}
        entries = _timed(layers, builders.build_all(timed_forms, Path(folder)), rounds, seconds, progress)
    return {**facts, "tiles": count, "entries": [asdict(entry) for entry in entries]}


def forms(conv: Conv2d, tile: ScheduledTile, gpu: Gpu) -> dict[str, TileRecipe]:
    """What is timed on a layer, by name: a tile with the rules of each form, the other algorithms, and the hand-built kernel."""
    found = {name: TileRecipe(conv, FIRST, gpu, "exact", tile=replace(tile, rules=rules)) for name, rules in RULES.items()}
    able = [key for key in others() if SCHEDULES[key].supports(conv, "cuda", "exact") is None]
    return found | {key: TileRecipe(conv, key, gpu, "exact", tile=tile) for key in able} | {HAND_BUILT: hand_built(conv, gpu)}


def _fastest(conv: Conv2d, libraries: Mapping[ScheduledTile, Library | str]) -> ScheduledTile:
    """The tile whose kernel is the fastest in a few rounds; the first of all if none was timed."""
    bench = Bench(conv, SEED)
    names = {str(place): tile for place, tile in enumerate(libraries)}
    subjects = [(name, partial(kernel_subject, bench, libraries[tile], tolerance(conv))) for name, tile in names.items()]
    ready, _ = prepared(subjects)
    samples = spreads(interleaved(bench, ready, BRIEF_ROUNDS, BRIEF_S)) if ready else {}
    return names[min(samples, key=lambda name: samples[name].median)] if samples else next(iter(libraries))


def time_layer(
    layer: Layer, libraries: Mapping[str, Library | str], rounds: int, seconds: float,
    others: Mapping[str, Callable[[Bench], Subject]] | None = None,
) -> list[Entry]:  # fmt: skip
    """Checks and times every form and every peer on one layer. `others`: further peers by name, which are prepared for its bench."""
    conv = layer.conv
    bench = Bench(conv, SEED)
    with every_peer(bench) as peers:
        ours = [(name, partial(kernel_subject, bench, library, tolerance(conv))) for name, library in libraries.items()]
        more = [(name, partial(prepare, bench)) for name, prepare in (others or {}).items()]
        ready, failed = prepared([*ours, *more, *peers])
        found = spreads(interleaved(bench, ready, rounds, seconds))
    entries = []
    for name in (*libraries, *(one for one in (*ready, *failed) if one not in libraries)):
        subject: Subject | None = ready.get(name)
        entry = timed(Entry(layer.name, str(conv), name), found.get(name), subject, failed.get(name))
        mine = subject is not None and entry.ms is not None and name in libraries
        entries.append(replace(entry, algorithm=subject.algorithm, tile=dict(subject.tile)) if mine and subject else entry)
    return entries
