"""Deliberately broken reconstructions: what the reconstructor made of a source, with one mistake each."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass

import fusable
import winograd_pair
from winograd_pair import Pair

from im2win.codegen import rewritten
from im2win.codegen.cuda import kernel_module
from im2win.device.gpu import H200
from im2win.reconstruct.fusion import llc, shmem
from im2win.reconstruct.parse.unit import Unit
from im2win.reconstruct.rules import barriers, copies, pipelines
from im2win.reconstruct.rules.races import race
from im2win.reconstruct.rulesets import rewrite
from im2win.reconstruct.trace.events import NotShown
from im2win.reconstruct.validate.validators import EmulatorValidator
from im2win.registry.schedules import schedule_of
from im2win.schedules.cuda.scheduled.passes import PIPELINE
from im2win.schedules.cuda.tiles.scheduled import ScheduledTile
from im2win.spec.conv2d import Conv2d
from im2win.spec.symbols import SYMBOL

PER_KIND = 3  # mistakes of one kind in one source
SHARED = 49152  # bytes of a block
ORDERS = range(12)  # seeds of the emulator
RESIDENT = (3, 12)  # blocks that run in turns


def scheduled(stages: int, key: str = "n1-c16x5x6-k32x3x3-p1") -> Unit:
    """A scheduled kernel as TVM generates it."""
    tile = ScheduledTile("fma", 32, 32, 8, 4, 4, "uvc", stages, 0, 4, "")
    kernels = schedule_of("direct/scheduled").on_gpu.kernels(Conv2d.parse(key), tile, H200)
    (function,) = rewritten.functions(kernel_module({SYMBOL: kernels[SYMBOL]}), H200, PIPELINE)
    return function.unit


# By name: the original, and the rule sets that rewrite it.
SOURCES: dict[str, tuple[Callable[[], Unit], tuple[str, ...]]] = {
    "pipeline of 2 stages": (lambda: scheduled(2), (pipelines.RULE, copies.RULE)),
    "pipeline of 3 stages": (lambda: scheduled(3), (pipelines.RULE, copies.RULE)),
    "pipeline of 4 stages": (lambda: scheduled(4, "n1-c16x6x5-k32x3x3-p1-NHWC"), (pipelines.RULE, copies.RULE)),
    "one barrier a step": (lambda: scheduled(2), (pipelines.RULE,)),
    "weakened barriers": (lambda: winograd_pair.unit(Pair(private=True)), (barriers.RULE,)),
    "fused in shared memory": (lambda: winograd_pair.unit(Pair()), (shmem.RULE,)),
    "fused in shared memory, warps alone": (lambda: winograd_pair.unit(Pair(private=True)), (shmem.RULE, barriers.RULE)),
    "fused through the cache": (lambda: winograd_pair.unit(Pair()), (llc.RULE,)),
    "a barrier of its own, in shared memory": (lambda: fusable.unit("a barrier, more threads"), (shmem.RULE,)),
    "a barrier of its own, through the cache": (lambda: fusable.unit("a barrier, more threads"), (llc.RULE,)),
    "two blocks for one, in shared memory": (lambda: fusable.unit("two blocks for one"), (shmem.RULE,)),
    "two blocks for one, through the cache": (lambda: fusable.unit("two blocks for one"), (llc.RULE,)),
}


def _one_more(match: re.Match[str]) -> str:
    return f"{match[1]}{int(match[2]) + 1}{match[3]}"


def _one_less(match: re.Match[str]) -> str:
    return f"{match[1]}{int(match[2]) - 1}{match[3]}"


# By name: what is replaced at one place, and what it becomes.
MISTAKES: dict[str, tuple[str, str | Callable[[re.Match[str]], str]]] = {
    "no barrier": (r"__syncthreads\(\);", ""),
    "no barrier of a warp": (r"__syncwarp\(\);", ""),
    "no wait for copies": (r"im2win::wait_copies<\d+>\(\);", ""),
    "waiting for one copy less": (r"(im2win::wait_copies<)(\d+)(>)", _one_more),
    "copies not committed": (r"im2win::commit_copies\(\);", ""),
    "no wait for a block": (r"im2win::await_done\(\([^;]*;", ""),
    "no signal of a block": (r"im2win::signal_done\(\([^;]*;", ""),
    "sums start at one": (r"= 0x0p\+0f", "= 0x1p+0f"),
    "a step lost": (r"(for \(int \w+ = 0; \w+ < )(\d+)(; \+\+)", _one_less),
    "stored beside its place": (r"(\w+_ptr\[|\w+_shared\w*\[)(?=[^;=]*\] = )", r"\g<1>1 + "),
    "copied beside its place": (r"(im2win::copy_async<\d+>\()", r"\g<1>4 + "),
    "read beside its place": (r"(= \([^;=]*?\w+_ptr\[)", r"\g<1>1 + "),
    "stale buffer": (r"\(\((\w+) \+ (\d+)\) (&|%) (\d+)\)", lambda match: f"(({match[1]} + {int(match[2]) - 1}) {match[3]} {match[4]})"),
    "another block": (r"\(\(int\)blockIdx\.(\w)\)", r"(((int)blockIdx.\1) ^ 1)"),
}


# Mistakes that change nothing, with the reason.
EQUIVALENT = {"fused in shared memory: no barrier 0": "another barrier stands before the first read"}


@dataclass(frozen=True)
class BrokenUnit:
    """A reconstruction of `SOURCES` with a mistake: its kind ("": none), and which of the places where a source can have it."""

    kernel: str
    mistake: str = ""
    place: int = 0

    def __str__(self) -> str:
        return f"{self.kernel}: {self.mistake} {self.place}"


@functools.cache
def units(name: str) -> tuple[Unit, Unit]:
    """The original and what the rules make of it."""
    make, rules = SOURCES[name]
    original = make()
    return original, rewrite(original, rules, must=True).unit


def _places(unit: Unit, mistake: str) -> list[re.Match[str]]:
    """Where the kernels' text can have a mistake that changes it."""
    found = re.compile(MISTAKES[mistake][0]).finditer(unit.source, unit.source.index("__global__"))
    return [match for match in found if not _unused(unit.source, match.start())]


def _unused(source: str, at: int) -> bool:
    """Whether a place is in the definition of a number that nothing uses."""
    line = source[source.rindex("\n", 0, at) + 1 : source.index("\n", at)]
    name = re.match(r" *int (cse_v\d+) = ", line)
    return name is not None and len(re.findall(rf"\b{name[1]}\b", source)) == 1


def broken(one: BrokenUnit) -> Unit:
    """The reconstruction with its mistake."""
    unit = units(one.kernel)[1]
    if not one.mistake:
        return unit
    new, match = MISTAKES[one.mistake][1], _places(unit, one.mistake)[one.place]
    text = match.expand(new) if isinstance(new, str) else new(match)
    return Unit(unit.source[: match.start()] + text + unit.source[match.end() :], unit.launches, unit.workspace)


def injected() -> list[BrokenUnit]:
    """All broken reconstructions: of each kind at most `PER_KIND` mistakes in a source, far apart from each other."""
    found: list[BrokenUnit] = []
    for name in SOURCES:
        for mistake in MISTAKES:
            count = len(_places(units(name)[1], mistake))
            found += [BrokenUnit(name, mistake, place) for place in sorted({i * count // PER_KIND for i in range(PER_KIND)}) if count]
    return found


@functools.cache
def _validators(name: str) -> list[EmulatorValidator]:
    return [EmulatorValidator(units(name)[0], seeds=ORDERS, resident=blocks) for blocks in RESIDENT]


def _race(unit: Unit) -> str:
    """Two accesses of shared memory that nothing orders; "" if there are none, or where that is not shown."""
    for name in unit.kernels:
        try:
            if (reason := race(unit, name)) is not None:
                return reason
        except NotShown:
            continue
    return ""


@functools.cache
def _free_of_races(name: str) -> bool:
    """Whether a reconstruction has none: TVM lets warps write the same values to the same places."""
    return not _race(units(name)[1])


def objection(one: BrokenUnit) -> str:
    """What verification says against a reconstruction: the emulator's runs beside the original's, or a race. "": nothing."""
    unit = broken(one)
    for validator in _validators(one.kernel):
        if (reason := validator.objection(unit)) is not None:
            return reason
    return _race(unit) if _free_of_races(one.kernel) else ""
