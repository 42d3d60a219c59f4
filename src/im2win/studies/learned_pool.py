"""Measured candidates of a layer, on which the study of the learned model replays searches (studies/learned_model.py).

A pool holds the first candidates of the whole space by the analytic estimate, some that are drawn uniformly from the whole space, the best
estimate of each algorithm and the default tile. They are built, checked and timed as a tuning session does it, and recorded in a log, so
that a run that was stopped goes on with those that it lacks. A file beside the log's holds the pool: `LOGS/DEVICE/CONV.pool.json`.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from im2win.bench.cpu import commit, versions
from im2win.bench.source import digests, stale
from im2win.common.files import replace_json
from im2win.device.cpu import Machine
from im2win.device.gpu import Gpu
from im2win.records.log import Log
from im2win.records.record import utc_now
from im2win.registry.backends import Device, backend_for
from im2win.registry.schedules import candidates, schedule_of
from im2win.spec.conv2d import Conv2d
from im2win.spec.suites import Layer
from im2win.studies.entries import LEARNED_MODEL, SCHEMA
from im2win.studies.gpu_study import head
from im2win.tuner.baseline import Baseline, measure_batch
from im2win.tuner.cost_model import Choice
from im2win.tuner.measurement import Measurement
from im2win.tuner.pool import Pool, Ranking
from im2win.tuner.proposer import Search
from im2win.tuner.session import Session, batch_size

DRAW = 0  # seed of the uniform part, of the inputs and of the records
Key = tuple[str, Any]


@dataclass(frozen=True)
class LayerPool:
    """The pool of one layer on one device.

    Attributes:
        facts: device, versions, commit, date and digests of the run that measured it, as studies hold them.
        top, uniform: candidates that were asked for by estimate and by drawing; a small space has fewer.
        space: candidates of all algorithms.
        choices: the pool's candidates, best estimate first. places: of each of them in the whole space by estimate, from 1.
        drawn: which of them (from 0) are the uniform part, in the order in which they were drawn. default: which one is the default tile.
        costs: `Record.cost` of each in seconds, infinity where it failed, None where it is not measured.
        batch, ahead: candidates of a session's batch on the machine that measured, and how many more sessions there build ahead.
        ranking_s: seconds that the ranking of the space took. measuring_s: seconds of builds, checks and timing, those of all runs.
        done: whether all candidates had their turn. Those without a cost by then could not be decided.
    """

    name: str
    conv: Conv2d
    facts: Mapping[str, Any]
    top: int
    uniform: int
    space: int
    choices: tuple[Choice, ...]
    places: tuple[int, ...]
    drawn: tuple[int, ...]
    default: int
    batch: int
    ahead: int
    ranking_s: float = 0.0
    measuring_s: float = 0.0
    costs: tuple[float | None, ...] = field(default=())
    done: bool = False

    @cached_property
    def measured(self) -> dict[Key, float]:
        """The costs of measured candidates by their identity."""
        return {choice.key: cost for choice, cost in zip(self.choices, self.costs, strict=True) if cost is not None}

    @property
    def best(self) -> tuple[int, float]:
        """Which candidate is the fastest one, and its cost.

        Raises:
            ValueError: no candidate is right.
        """
        good = [(cost, place) for place, cost in enumerate(self.costs) if cost is not None and math.isfinite(cost)]
        if not good:
            raise ValueError(f"no candidate of {self.name} ({self.conv}) computed a right result; see the log.")
        cost, place = min(good)
        return place, cost

    def with_costs(self, known: Mapping[Key, float]) -> LayerPool:
        """The pool with the costs of the candidates that are known."""
        return replace(self, costs=tuple(known.get(choice.key) for choice in self.choices))

    def to_json(self) -> dict[str, Any]:
        """The content of its file. The cost of a failed candidate is "failed": JSON has no infinity."""
        names = ("name", "facts", "top", "uniform", "space", "default", "batch", "ahead", "ranking_s", "measuring_s", "done")
        rows = [
            [choice.algorithm, choice.tile.as_dict(), choice.cycles, place, "failed" if cost == math.inf else cost]
            for choice, place, cost in zip(self.choices, self.places, self.costs, strict=True)
        ]
        return {"conv": str(self.conv), **{name: getattr(self, name) for name in names}, "drawn": list(self.drawn), "candidates": rows}

    @classmethod
    def from_json(cls, found: Mapping[str, Any], device: Device) -> LayerPool:
        """The pool of a file's content. `device`: of which it is."""
        backend = backend_for(device)
        rows = found["candidates"]
        names = ("name", "facts", "top", "uniform", "space", "default", "batch", "ahead", "ranking_s", "measuring_s", "done")
        return cls(
            conv=Conv2d.parse(found["conv"]), drawn=tuple(found["drawn"]),
            choices=tuple(Choice(name, backend.tile(schedule_of(name), tile), cycles) for name, tile, cycles, _, _ in rows),
            places=tuple(place for *_, place, _ in rows),
            costs=tuple(math.inf if cost == "failed" else cost for *_, cost in rows),
            **{name: found[name] for name in names},
        )  # fmt: skip


def facts(layers: Sequence[Layer], device: Device) -> dict[str, Any]:
    """What a study says of its run: name, device, threads, libraries, commit, date and digests of the source."""
    if isinstance(device, Gpu):
        return {**head(LEARNED_MODEL, layers, device), "threads": 1}
    assert isinstance(device, Machine)
    return {
        "study": LEARNED_MODEL, "schema": SCHEMA, "device": device.name, "brand": device.brand, "threads": device.threads,
        "versions": versions(), "commit": commit(), "date": utc_now(), "digests": digests("cpu"),
    }  # fmt: skip


def chosen(search: Search, default: Choice, top: int, uniform: int) -> tuple[list[Choice], list[int], list[int], int]:
    """The candidates of a pool: `choices`, `places`, `drawn` and `default` of `LayerPool`.

    The uniform part of a larger `uniform` begins with that of a smaller one.

    Args:
        search: of the whole space.
    """
    every = search.all
    drawn = [every[int(at)] for at in np.random.default_rng(DRAW).permutation(len(every))[:uniform]]
    wanted = {choice.key for choice in (*every[:top], *drawn, *search.firsts, default)}
    places = [at for at, choice in enumerate(every) if choice.key in wanted]
    choices = [every[at] for at in places]
    index = {choice.key: at for at, choice in enumerate(choices)}
    return choices, [at + 1 for at in places], [index[choice.key] for choice in drawn], index[default.key]


def file_of(folder: Path, device: str, conv: Conv2d) -> Path:
    """Where a layer's pool is, in a folder of records."""
    return folder / device / f"{conv}.pool.json"


def load(folder: Path, device: Device, conv: Conv2d) -> LayerPool | None:
    """A layer's pool as far as it is measured; None if there is none of today's source.

    Raises:
        ValueError: the file is broken; the message names it.
    """
    path = file_of(folder, device.name, conv)
    if not path.exists():
        return None
    try:
        pool = LayerPool.from_json(json.loads(path.read_text(encoding="utf-8")), device)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"`{path}` is no pool of candidates ({error!r}): remove it.") from error
    same = stale(pool.facts["digests"]) is None and pool.facts["threads"] == (1 if isinstance(device, Gpu) else device.threads)
    return pool if same else None


def done_before(layer: Layer, device: Device, folder: Path, top: int, uniform: int) -> LayerPool | None:
    """The pool of a layer if all of it is measured; else None. Raises ValueError: see `load`."""
    before = load(folder, device, layer.conv)
    return before if before is not None and before.done and (before.top, before.uniform) == (top, uniform) else None


def rankings(layers: Sequence[Layer], device: Device, workers: Pool) -> dict[Conv2d, tuple[Ranking, float]]:
    """The ranked tiles of all algorithms of each layer, and the seconds that they took, about.

    Raises:
        ValueError: no algorithm supports a layer.
    """
    target, begun = backend_for(device).target, time.monotonic()
    problems = [(layer.conv, [row.key for row in candidates("auto", layer.conv, target)]) for layer in layers]
    found = workers.ranked_together(problems, device, "float32")
    seconds = (time.monotonic() - begun) / max(len(layers), 1)
    return {conv: (ranking, seconds) for (conv, _), ranking in zip(problems, found, strict=True)}


def measure_layer(
    layer: Layer, device: Device, folder: Path, top: int, uniform: int, workers: Pool,
    report: Callable[[int, int], None] = lambda done, total: None, open_measurement: Callable[[Session, Pool], Measurement] = Measurement,
    ranked: tuple[Ranking, float] | None = None,
) -> LayerPool:  # fmt: skip
    """Measures what a layer's pool lacks, and returns it. A pool that is done is returned at once.

    Args:
        folder: of the records.
        top, uniform: candidates by estimate and drawn at random.
        workers: the processes that rank, build and measure.
        report: called with (measured candidates, all of the pool) after each trial. What is measured is kept if it raises.
        open_measurement: for tests.
        ranked: of `rankings`; None to rank the layer's tiles now.

    Raises:
        ValueError: no algorithm supports the layer, or no tile is legal. LogError: the log cannot be written.
        MachineError: nothing can be built or measured.
    """
    if (finished := done_before(layer, device, folder, top, uniform)) is not None:
        return finished
    before, backend, conv = load(folder, device, layer.conv), backend_for(device), layer.conv
    names = [row.key for row in candidates("auto", conv, backend.target)]
    ranking, ranking_s = ranked or rankings([layer], device, workers)[conv]
    session = Session(conv, names, device, Log(folder), top + uniform, DRAW, None, "float32", ranking)
    measurement = open_measurement(session, workers)
    choices, places, drawn, default = chosen(session.search, session.default, top, uniform)
    pool = LayerPool(
        layer.name, conv, facts([layer], device), top, uniform, session.search.size, tuple(choices), tuple(places), tuple(drawn), default,
        batch_size(backend), measurement.ahead, ranking_s if before is None else before.ranking_s,
    )  # fmt: skip
    spent = before.measuring_s if before is not None else 0.0
    begun = time.monotonic()

    def kept(done: bool) -> LayerPool:
        costs = {choice.key: cost for choice, cost in session.tried if choice.key in session.seconds}  # those that are decided
        costs |= {key: costs[first] for key, first in session.equals.items() if first in costs}
        now = replace(pool.with_costs(costs), measuring_s=spent + time.monotonic() - begun, done=done)
        replace_json(file_of(folder, device.name, conv), now.to_json())
        return now

    try:
        lacking = [choice for choice in choices if choice.key not in session.seconds]
        _measure(session, measurement, lacking, pool.batch, lambda: report(len(choices) - len(lacking), len(choices)), lambda: kept(False))
    finally:
        measurement.close()
    return kept(True)


def _measure(
    session: Session, measurement: Measurement, lacking: list[Choice], size: int, tried: Callable[[], None], kept: Callable[[], object]
) -> None:
    """Builds and measures candidates in batches, as a session does, but samples all of them fully."""
    baseline = Baseline(lambda choice: measurement.run([choice])[0])
    every = list(lacking)

    def one(choice: Choice) -> None:
        lacking.remove(choice)
        tried()

    for first in range(0, len(every), size):
        batch = every[first : first + size]
        measurement.start(every[first : first + size + measurement.ahead])
        measure_batch(session, measurement, baseline, batch, math.inf, built=lambda count: None, tried=one, disturbed=lambda: None)
        kept()
