"""The study of what each of the reconstructor's rules gains on TVM's schedules: alone, and beside all others; and whether threads race.

For each problem the tile that the model ranks first is built with each form of the rules: none, each alone, all, all but one. A form whose
source equals that of one before is not timed again. Every kernel is checked against the float64 reference before it is timed. Then
racecheck of NVIDIA's compute-sanitizer runs kernels of small problems with all rules, and one from which a barrier was taken, in which it
must find a hazard.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from im2win.bench.cpu import spreads
from im2win.bench.cuda_builds import Builders, Library, TileRecipe
from im2win.bench.cuda_harness import interleaved, prepared
from im2win.codegen.cuda import SOURCE, kernel_module
from im2win.codegen.rewritten import functions
from im2win.device.gpu import Gpu, device_gpu
from im2win.numerics.tolerance import tolerance
from im2win.reconstruct.parse.unit import Edit, Unit
from im2win.reconstruct.rulesets import rewrite
from im2win.reconstruct.text_rules import ReconstructError
from im2win.reconstruct.validate.validators import RacecheckValidator
from im2win.registry import cuda_lowering
from im2win.registry.backends import backend_for
from im2win.registry.schedules import schedule_of
from im2win.runtime.manifest import Manifest
from im2win.spec.conv2d import Conv2d
from im2win.spec.suites import Layer, suite
from im2win.spec.symbols import SYMBOL
from im2win.studies.entries import ALL_RULES, FIRST_SCHEDULED, RULE_FORMS, RULES_IN_ORDER
from im2win.studies.entries import RULE_GAINS as STUDY
from im2win.studies.gpu_study import head, kernel_subject, same, timed
from im2win.tuner.runners.cuda import Bench

SEED = 0
STORED = ("im2win/scheduled", "im2col/scheduled")  # algorithms that store a tensor of windows
OF_STORED, OF_NARROW = ("conv5", "conv9", "conv12"), ("conv5", "conv8", "conv9", "conv12")  # layers of papers12
POINTWISE = ("c64x56x56-k256x1x1", "c512x28x28-k128x1x1", "c1024x14x14-k256x1x1")  # of ResNet-50
SMALL = {  # problems for racecheck, which takes a hundred times as long as the kernel alone, and their algorithms
    "n2-c16x14x14-k64x3x3-p1": FIRST_SCHEDULED, "n2-c16x12x12-k64x3x3": "im2win/scheduled", "n1-c16x12x12-k64x3x3-p1": "im2col/scheduled",
    "n2-c256x8x8-k64x1x1": FIRST_SCHEDULED, "n1-c32x12x12-k64x3x3-p1-float16": FIRST_SCHEDULED,
    "n1-c64x12x12-k64x3x3-p1-NHWC-float16": FIRST_SCHEDULED, "n1-c64x12x12-k64x3x3-p1-int8": FIRST_SCHEDULED,
}  # fmt: skip
BROKEN = next(iter(SMALL))  # the problem whose kernel is also run without a barrier
Problem = tuple[Layer, str]
"""A layer, and the algorithm and schedule that computes it."""


@dataclass(frozen=True)
class Entry:
    """A kernel of one problem with one form of the rules: milliseconds per call, or the reason why there is no time.

    Attributes:
        rules: names of rule sets with "+" between them. same_as: the rules of an entry of the problem with the same source, None without
            one: its time counts.
        error: against the reference, relative to the largest output.
    """

    layer: str
    conv: str
    algorithm: str
    rules: str
    ms: float | None = None
    p10_ms: float | None = None
    p90_ms: float | None = None
    samples: int = 0
    error: float | None = None
    tile: Mapping[str, Any] | None = None
    same_as: str | None = None
    failed: str | None = None


@dataclass(frozen=True)
class Race:
    """What racecheck says of a kernel of a small problem.

    Attributes:
        barriers_removed: barriers that were taken from it, of which racecheck must notice one.
        changes: that the rules made. hazard: the first one, None if there is none.
        failed: why racecheck did not run, None if it did.
    """

    conv: str
    algorithm: str
    rules: str
    barriers_removed: int
    changes: int
    hazard: str | None = None
    failed: str | None = None


@dataclass(frozen=True)
class RuleRecipe(TileRecipe):
    """A tile's kernel, whose source is kept beside the library."""

    def compile(self, path: Path) -> Manifest:
        """Compiles into the library `path`, and writes the source to the same name with the suffix ".cu"."""
        module = cuda_lowering.emit(self.conv, schedule_of(self.algorithm), self.tile, self.gpu)
        path.with_suffix(".cu").write_text(str(module.attrs[SOURCE]))
        return super().compile(path)


def problems(batch: int = 128) -> list[Problem]:
    """What is timed: float32 of the papers, with windows from the input and stored; tensor cores in both layouts; 1x1 layers."""
    layers = {layer.name: layer for layer in suite("papers12", batch)}
    found = [(layer, FIRST_SCHEDULED) for layer in layers.values()]
    found += [(layers[name], key) for key in STORED for name in OF_STORED]
    for dtype, layout in (("float16", "NCHW"), ("float16", "NHWC"), ("int8", "NCHW")):
        found += [(_with(layers[name], dtype=dtype, layout=layout), FIRST_SCHEDULED) for name in OF_NARROW]
    found += [(Layer(key, Conv2d.parse(f"n{batch}-{key}"), 1), FIRST_SCHEDULED) for key in POINTWISE]
    return found


def _with(layer: Layer, **changes: Any) -> Layer:
    return replace(layer, conv=layer.conv.with_(**changes))


def first_tile(conv: Conv2d, algorithm: str, gpu: Gpu) -> Any:
    """The pipelined tile that the model ranks first; rules are those of the space.

    Raises:
        ValueError: no tile of the algorithm is a pipeline.
    """
    for _, tile in backend_for(gpu, "exact").ranked(conv, schedule_of(algorithm)):
        if tile.stages > 1:
            return tile
    raise ValueError(f"{algorithm} has no pipelined tile for {conv}.")


def forms(conv: Conv2d, algorithm: str, gpu: Gpu) -> dict[str, RuleRecipe]:
    """What is built of a problem, by its rules."""
    tile = first_tile(conv, algorithm, gpu)
    return {rules: RuleRecipe(conv, algorithm, gpu, "exact", tile=replace(tile, rules=rules), overlap=False) for rules in RULE_FORMS}


def run(
    chosen: Sequence[Problem], *, rounds: int = 9, seconds: float = 0.1, limit_s: float = 240.0, before: Mapping[str, Any] | None = None,
    keep: Callable[[Mapping[str, Any]], None] = lambda study: None, note: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:  # fmt: skip
    """Times every form of every problem on the first GPU, then runs racecheck.

    Args:
        rounds, seconds: most samples, and most seconds of timed calls, of a kernel.
        limit_s: seconds after which no problem is begun.
        before: the study so far, whose problems are not timed again if it is of the same device, libraries and kernels.
        keep: called with the study after each problem, and at the end. note: called with a line for each problem.

    Returns:
        The study, as it is written to JSON.

    Raises:
        ValueError: no problems, or `rounds` below 1.
        NoGpuError: there is no GPU. ToolchainError: there is no CUDA compiler.
    """
    if not chosen or rounds < 1:
        raise ValueError(f"`chosen` must name one problem at least, and `rounds` (={rounds}) must be at least 1.")
    begun, gpu = time.monotonic(), device_gpu()
    backend_for(gpu).check_tools()
    study: dict[str, Any] = {**head(STUDY, [layer for layer, _ in chosen], gpu), "entries": [], "races": []}
    if before is not None and same(before, study):
        study["entries"], study["races"] = list(before["entries"]), list(before["races"])
    with tempfile.TemporaryDirectory(prefix="im2win-rules-") as folder, Builders() as builders:
        for number, (layer, algorithm) in enumerate(chosen):
            if any((one["conv"], one["algorithm"]) == (str(layer.conv), algorithm) for one in study["entries"]):
                continue
            if time.monotonic() - begun > limit_s:
                note(f"{limit_s:.0f} s are over; the next run goes on with {layer.name} {layer.conv}")
                return study
            (place := Path(folder) / str(number)).mkdir()
            built = builders.build_all(forms(layer.conv, algorithm, gpu), place)
            found = time_problem(layer, algorithm, built, rounds, seconds)
            study["entries"] += [asdict(entry) for entry in found]
            keep(study)
            note(_line(number + 1, len(chosen), found))
    if not study["races"]:
        study["races"] = [asdict(race) for race in races(gpu)]
        keep(study)
        for race in study["races"]:
            note(f"racecheck {race['conv']} {race['algorithm']}: {race['failed'] or race['hazard'] or 'no hazard'}")
    return study


def _line(number: int, total: int, found: Sequence[Entry]) -> str:
    times = ", ".join(f"{entry.rules or 'none'} {entry.ms:.4f}" for entry in found if entry.ms is not None)
    failed = "".join(f"\n  {entry.rules or 'none'}: {entry.failed}" for entry in found if entry.failed)
    return f"{number}/{total} {found[0].layer} {found[0].conv} {found[0].algorithm}, ms: {times}{failed}"


def time_problem(layer: Layer, algorithm: str, built: Mapping[str, Library | str], rounds: int, seconds: float) -> list[Entry]:
    """Checks and times the forms of a problem whose sources differ."""
    equal = equal_sources({rules: one.path.with_suffix(".cu").read_text() for rules, one in built.items() if isinstance(one, Library)})
    bench = Bench(layer.conv, SEED)
    ours = [(rules, partial(kernel_subject, bench, one, tolerance(layer.conv))) for rules, one in built.items() if rules not in equal]
    ready, failed = prepared(ours)
    spread = spreads(interleaved(bench, ready, rounds, seconds)) if ready else {}
    entries = []
    for rules in built:
        entry = Entry(layer.name, str(layer.conv), algorithm, rules)
        if rules in equal:
            entries.append(replace(entry, same_as=equal[rules]))
            continue
        subject = ready.get(rules)
        entry = timed(entry, spread.get(rules), subject, failed.get(rules))
        entries.append(replace(entry, tile=dict(subject.tile)) if subject is not None and entry.ms is not None else entry)
    return entries


def equal_sources(sources: Mapping[str, str]) -> dict[str, str]:
    """Forms whose source equals that of one before, and that one."""
    first: dict[str, str] = {}
    found = {rules: first.setdefault(source, rules) for rules, source in sources.items()}
    return {rules: other for rules, other in found.items() if other != rules}


# --- races


def rewritten_unit(conv: Conv2d, algorithm: str, gpu: Gpu, rules: Sequence[str] = RULES_IN_ORDER) -> tuple[Unit, int]:
    """A problem's kernels after reconstruction, and the number of changes."""
    schedule = schedule_of(algorithm).on_gpu
    tile = replace(first_tile(conv, algorithm, gpu), rules="")
    reconstruction, made = schedule.reconstruction(tile), schedule.kernels(conv, tile, gpu)
    assert reconstruction is not None, f"{algorithm} has kernels that are final"
    (function,) = functions(kernel_module({SYMBOL: made[SYMBOL]}), gpu, reconstruction.pipeline)
    applied = rewrite(function.unit, rules)
    return applied.unit, len(applied.matches)


def without_barrier(unit: Unit) -> Unit:
    """The unit without the first barrier of a loop."""
    for kernel in unit.kernels.values():
        for loop in kernel.loops:
            for barrier in kernel.barriers:
                if loop.span[0] <= barrier.span[0] < loop.span[1]:
                    return unit.edited([Edit(barrier.span, "", "broken", "racecheck must notice")])[0]
    raise ValueError("no kernel has a barrier in a loop.")


def races(gpu: Gpu) -> list[Race]:
    """What racecheck says of each small problem with all rules, and of one without a barrier."""
    jobs = []
    for key, algorithm in SMALL.items():
        unit, changes = rewritten_unit(Conv2d.parse(key), algorithm, gpu)
        jobs.append((Race(key, algorithm, ALL_RULES, 0, changes), unit))
        if key == BROKEN:
            jobs.append((Race(key, algorithm, ALL_RULES, 1, changes), without_barrier(unit)))
    missing = RacecheckValidator.missing()
    if missing is not None:
        return [replace(race, failed=missing) for race, _ in jobs]
    with ThreadPoolExecutor(4) as threads:
        return list(threads.map(partial(_checked, RacecheckValidator(gpu.arch)), *zip(*jobs, strict=True)))


def _checked(validator: RacecheckValidator, race: Race, unit: Unit) -> Race:
    try:
        return replace(race, hazard=validator.objection(unit))
    except ReconstructError as error:
        return replace(race, failed=str(error))
