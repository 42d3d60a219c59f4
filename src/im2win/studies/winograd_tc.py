"""The study of Winograd's form on tensor cores, in float16 and int8, unfused and fused, against cuDNN, in one run.

It repeats the comparison of partial kernel fusion (PKF; docs/papers.md, section 4) with the better of cuDNN's two Winograd algorithms on
the suite `winograd64`. While a problem is measured, the CPUs compile the kernels of those that follow. Every form is checked against the
float64 reference before it is timed, and im2win's again afterwards, as in the benchmark (cuda_harness.py). A form whose kernel is refused
has the rule's reason and no time.
"""

from __future__ import annotations

import contextlib
import math
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from im2win.bench.cpu import spreads
from im2win.bench.cuda_builds import Builders, Library, Recipe, TileRecipe
from im2win.bench.cuda_harness import Subject, interleaved, prepared, set_up_peers, tvm_searched
from im2win.device.gpu import Gpu, device_gpu
from im2win.numerics.tolerance import tolerance
from im2win.registry.backends import backend_for
from im2win.registry.schedules import schedule_of
from im2win.spec.accuracy import Accuracy
from im2win.spec.conv2d import Conv2d
from im2win.spec.suites import Layer
from im2win.studies.entries import INTEGERS, OTHERS, PROTOTYPE, REQUANTISED, REQUANTISED_PEER, SYNCHRONOUS, TVM, WHOLE
from im2win.studies.entries import WINOGRAD_TC as STUDY
from im2win.studies.gpu_study import every_peer, head, kernel_subject, same, timed
from im2win.tuner.build_worker import RankJob
from im2win.tuner.runners.check import verify
from im2win.tuner.runners.cuda import Bench

SEED = 0
ROW = "winograd/tensor_cores"
ACCURACY: Accuracy = "winograd"
TRIES = 4  # tiles of a form that are built and timed, best estimate first; the fastest gives the form's time
FORMS: dict[str, dict[str, Any]] = {
    SYNCHRONOUS: {"mapping": "bgemm", "fusion": "none"},
    PROTOTYPE: {"mapping": "sync_free", "fusion": "none"},
    **{
        f"pkf-{fusion}-{block}": {"mapping": "sync_free", "fusion": fusion, "block_m": block}
        for fusion in ("shmem", "llc")
        for block in (16, 32)
    },
}
"""What tiles of each form have in common; the number is the document's TB_M.

The prototype's warps each load what they multiply; in the synchronous one a thread block's warps wait for each other's loads.
"""
INT8_FORMS: dict[str, dict[str, Any]] = {
    **{f"{INTEGERS}-{form}": common for form, common in FORMS.items() if form != SYNCHRONOUS},
}
"""The same in int8."""

Try = tuple[str, int]
"""(form, place of the tile in the model's order)"""

Named = list[tuple[str, Callable[[], Subject]]]

Ranked = Sequence[tuple[float, Any]]
"""Legal tiles of `ROW` on a problem with the model's estimates, best first."""


@dataclass(frozen=True)
class Entry:
    """One tile of a form, or one peer, on one problem: milliseconds per call, or the reason why there is no time.

    Attributes:
        size, batch, layout: of the problem's maps.
        tile: of an im2win kernel; the chosen one where the records or the model choose it.
        error: against the reference, relative to the largest output.
    """

    conv: str
    size: int
    batch: int
    layout: str
    form: str
    tile: dict[str, Any] | None = None
    ms: float | None = None
    p10_ms: float | None = None
    p90_ms: float | None = None
    samples: int = 0
    error: float | None = None
    algorithm: str = ""
    failed: str | None = None


def recipes(conv: Conv2d, gpu: Gpu, tries: int, ranked: Ranked) -> dict[Try, Recipe]:
    """Recipes for a problem: the first tiles of every form, `winograd/tiled`, and the best kernel of any algorithm.

    The tiles of the last two come from the records, or else from the model. `winograd/tiled` is one kernel where it runs along rows, and
    several launches where it runs in bands of tiles (docs/winograd.md): its entry's tile says which.
    """
    whole = TileRecipe(conv, "winograd", gpu, ACCURACY, recorded=True)
    others = TileRecipe(conv, "auto", gpu, recorded=True)
    return {**_first_tiles(conv, gpu, tries, FORMS, ranked), (WHOLE, 0): whole, (OTHERS, 0): others}


def integers(conv: Conv2d, gpu: Gpu, tries: int, ranked: Ranked) -> dict[Try, Recipe]:
    """Recipes for the problem in int8, whose kernels without Winograd's form are exact.

    cuDNN's algorithms by name do not support this type.
    """
    whole = conv.with_(dtype="int8")
    return {**_first_tiles(whole, gpu, tries, INT8_FORMS, ranked), (INTEGERS, 0): TileRecipe(whole, "auto", gpu, recorded=True)}


def requantised(conv: Conv2d, gpu: Gpu, tries: int, ranked: Ranked) -> dict[Try, Recipe]:
    """Recipes for the problem with int8 outputs: the best kernel, which is without Winograd's form."""
    return {(REQUANTISED, 0): TileRecipe(conv.with_(dtype="int8", out_dtype="int8"), "auto", gpu, recorded=True)}


@dataclass(frozen=True)
class Part:
    """Forms that are timed on the same tensors, in the same rounds.

    Attributes:
        types: of the problem's tensors.
        forms: each has at least one entry.
        recipes: of im2win's kernels, by problem in float16, GPU, number of tiles and ranking.
        ranks: whether it tries tiles of the model.
        peers: selects those that take part from all peers.
    """

    types: Mapping[str, str]
    forms: tuple[str, ...]
    recipes: Callable[[Conv2d, Gpu, int, Ranked], dict[Try, Recipe]]
    ranks: bool
    peers: Callable[[Named], Named] | None

    def of_forms(self, forms: Sequence[str], conv: Conv2d, gpu: Gpu, tries: int, ranked: Ranked) -> dict[Try, Recipe]:
        """im2win's recipes of some of the forms."""
        return {one: recipe for one, recipe in self.recipes(conv, gpu, tries, ranked).items() if one[0] in forms} if forms else {}


def _by_name(peers: Named) -> Named:
    """cuDNN's algorithms, under names that state the problem."""
    return [(name.replace("cudnn_", REQUANTISED_PEER), prepare) for name, prepare in peers if name.startswith("cudnn_")]


def _first_tiles(conv: Conv2d, gpu: Gpu, tries: int, forms: Mapping[str, Mapping[str, Any]], ranked: Ranked) -> dict[Try, Recipe]:
    found: dict[Try, Recipe] = {}
    for form, common in forms.items():
        tiles = [tile for _, tile in ranked if all(getattr(tile, name) == value for name, value in common.items())]
        found |= {(form, place): TileRecipe(conv, ROW, gpu, ACCURACY, tile=tile) for place, tile in enumerate(tiles[:tries])}
    return found


PARTS = (
    Part({}, (*FORMS, WHOLE, OTHERS), recipes, True, list),
    Part({"dtype": "int8"}, (*INT8_FORMS, INTEGERS), integers, True, None),
    Part({"dtype": "int8", "out_dtype": "int8"}, (REQUANTISED,), requantised, False, _by_name),
)
"""Of float16, with all peers; of int8, by itself; of int8 with int8 outputs, beside those of cuDNN (see `cudnn_subjects`)."""


def run(
    layers: Sequence[Layer],
    *,
    tries: int = TRIES,
    int8_tries: int = TRIES,
    rounds: int = 15,
    seconds: float = 0.5,
    tvm_trials: int = 0,
    tvm_cache: Path | None = None,
    limit_s: float = math.inf,
    progress: Callable[[int, int, list[Entry]], None] | None = None,
    before: Mapping[str, Any] | None = None,
    keep: Callable[[dict[str, Any]], None] | None = None,
    note: Callable[[str], object] | None = None,
) -> dict[str, Any]:
    """Times every form on every layer on the first GPU.

    Args:
        layers: problems in float16, as in the suite `winograd64`.
        tries, int8_tries: tiles of a form in float16 and in int8 on a layer.
        rounds: most samples of a tile on a layer.
        seconds: most seconds of timed calls of a tile on a layer.
        tvm_trials: candidates that TVM's default search may try for a channels-first layer; 0 leaves it out.
        tvm_cache, note: as in `im2win.bench.cuda.run`.
        limit_s: seconds after which no further layer is begun; a later run goes on with those that are lacking.
        progress: called with (layers done, layers in all, entries of the layer) after each layer.
        before: an interrupted study. Its entries are not measured again if it is of the same device, libraries and kernels; layers that
            lack some forms, or had them removed, get these.
        keep: called with the partial study after each layer.

    Returns:
        The study, as it is written to JSON (see `fused_report`).

    Raises:
        ValueError: no layers, one that the schedule does not support, or `tries`, `int8_tries`, `rounds` or `limit_s` too small.
        NoGpuError: there is no GPU.
        ToolchainError: there is no CUDA compiler.
    """
    if not layers or min(tries, int8_tries, rounds) < 1:
        numbers = f"`tries` (={tries}), `int8_tries` (={int8_tries}) and `rounds` (={rounds})"
        raise ValueError(f"`layers` must name at least one, and {numbers} must be at least 1.")
    if not limit_s > 0:
        raise ValueError(f"`limit_s` (={limit_s:g}) must be above 0.")
    started = time.monotonic()
    for layer in layers:
        if (reason := schedule_of(ROW).supports(layer.conv, "cuda", ACCURACY)) is not None:
            raise ValueError(f"`layers` (={layer.conv}) must be of the row {ROW}: {reason}.")
    gpu = device_gpu()
    backend_for(gpu).check_tools()
    set_up_peers("float32")
    facts = head(STUDY, layers, gpu)
    entries = [Entry(**entry) for entry in before["entries"]] if before is not None and same(before, facts) else []

    def study() -> dict[str, Any]:
        return {**facts, "entries": [asdict(entry) for entry in entries]}

    def known(conv: Conv2d) -> set[str]:
        return {entry.form for entry in entries if _problem(entry) == (conv.height, conv.batch, conv.layout)}

    with contextlib.ExitStack() as stack:
        wanted = [layer.conv for layer in layers if tvm_trials and layer.conv.layout == "NCHW" and TVM not in known(layer.conv)]
        cache = tvm_cache or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="im2win-tvm-")))
        by_tvm = tvm_searched(wanted, gpu, tvm_trials, cache, note) if wanted else {}
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="im2win-winograd-")))
        builders = stack.enter_context(Builders())
        lacking = {layer.conv: [[form for form in part.forms if form not in known(layer.conv)] for part in PARTS] for layer in layers}
        made = _recipes(lacking, gpu, (tries, int8_tries), builders)
        built = stack.enter_context(builders.begun(made, folder))
        for done, layer in enumerate(layers, 1):
            conv, found = layer.conv, list[Entry]()
            searched = by_tvm if conv in wanted else {}
            if not any(lacking[conv]) and not searched:
                continue
            if time.monotonic() - started > limit_s:
                break
            for place, (part, forms) in enumerate(zip(PARTS, lacking[conv], strict=True)):
                others = searched if place == 0 else {}
                ours = {one: recipe for (problem, number, one), recipe in made.items() if (problem, number) == (conv, place)}
                if forms or others:
                    libraries = {one: built[conv, place, one] for one in ours}
                    found += time_part(part, conv, ours, libraries, forms, rounds, seconds, others)
            entries += found
            if progress is not None:
                progress(done, len(layers), found)
            if keep is not None:
                keep(study())
    return study()


def _recipes(
    lacking: Mapping[Conv2d, Sequence[Sequence[str]]], gpu: Gpu, tries: tuple[int, int], builders: Builders
) -> dict[tuple[Conv2d, int, Try], Recipe]:
    """im2win's recipes of the forms that problems lack, by problem, place in `PARTS` and try, in the order of the problems."""
    asked = [(conv, place) for conv, forms in lacking.items() for place, part in enumerate(PARTS) if part.ranks and forms[place]]
    jobs = [RankJob(conv.with_(**PARTS[place].types), ROW, gpu, ACCURACY) for conv, place in asked]
    ranked = dict(zip(asked, builders.ranked(jobs), strict=True))
    made: dict[tuple[Conv2d, int, Try], Recipe] = {}
    for conv, by_part in lacking.items():
        for place, (part, forms) in enumerate(zip(PARTS, by_part, strict=True)):
            count = tries[1 if part.types else 0]
            own = part.of_forms(forms, conv, gpu, count, ranked.get((conv, place), ()))
            made |= {(conv, place, one): recipe for one, recipe in own.items()}
    return made


def _problem(entry: Entry) -> tuple[int, int, str]:
    return entry.size, entry.batch, entry.layout


def time_part(
    part: Part, conv: Conv2d, ours: Mapping[Try, Recipe], libraries: Mapping[Try, Library | str], forms: Sequence[str], rounds: int,
    seconds: float, searched: Mapping[str, Callable[[Bench], Subject]],
) -> list[Entry]:
    """Checks and times these forms on one problem, TVM's search if there is one, and the peers if the forms are all of the part's."""
    bench = Bench(conv.with_(**part.types), SEED)
    others = [(name, partial(prepare, bench)) for name, prepare in searched.items()]
    if part.peers is None or len(forms) < len(part.forms):
        return _time(bench, ours, libraries, others, forms, rounds, seconds)
    with every_peer(bench) as peers:
        return _time(bench, ours, libraries, [*part.peers(peers), *others], forms, rounds, seconds)


def _time(
    bench: Bench,
    ours: Mapping[Try, Recipe],
    libraries: Mapping[Try, Library | str],
    peers: Sequence[tuple[str, Callable[[], Subject]]],
    forms: Iterable[str],
    rounds: int,
    seconds: float,
) -> list[Entry]:
    """Checks and times tiles and peers; im2win's tiles are checked again afterwards.

    Args:
        forms: each has an entry, even without a time.
    """
    conv = bench.conv
    names = {f"{form} {place}": (form, place) for form, place in libraries}
    plain = (OTHERS, INTEGERS, REQUANTISED)
    allowed = {name: tolerance(conv, "float32" if form in plain else ACCURACY) for name, (form, _) in names.items()}
    mine = [(name, partial(kernel_subject, bench, libraries[one], allowed[name])) for name, one in names.items()]
    ready, failed = prepared([*mine, *peers])
    samples = interleaved(bench, ready, rounds, seconds)
    for name in names.keys() & ready.keys():
        message, _ = verify(bench, ready[name].call, allowed[name])
        if message:
            failed[name] = f"after timing: {message}"
            del samples[name]
    found = spreads(samples)
    every = {**{name: form for name, (form, _) in names.items()}, **{name: name for name in (*ready, *failed) if name not in names}}
    entries = []
    for name, form in every.items():
        recipe = ours.get(names[name]) if name in names else None
        tile = recipe.tile.as_dict() if isinstance(recipe, TileRecipe) and recipe.tile is not None else None
        if tile is None and name in names and name in ready:
            tile = dict(ready[name].tile)
        entry = Entry(str(conv), conv.height, conv.batch, conv.layout, form, tile)
        entry = timed(entry, found.get(name), ready.get(name), failed.get(name))
        entries.append(entry if entry.ms is None else replace(entry, algorithm=ready[name].algorithm))
    missing = [form for form in forms if form not in every.values()]
    reason = "no tile of it is legal for the layer"
    return [*entries, *(Entry(str(conv), conv.height, conv.batch, conv.layout, form, failed=reason) for form in missing)]
