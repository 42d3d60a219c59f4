"""The study of the learned model: arms replayed on a made-up pool, pools that are measured once, and its report."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scripts import script
from sessions import SMALL

from im2win.bench.source import digests
from im2win.device.cpu import Machine
from im2win.records.log import Log
from im2win.registry.backends import backend_for
from im2win.registry.interface import Tile
from im2win.registry.schedules import schedule_of
from im2win.reports import learned_model as report
from im2win.reports.tables import fill
from im2win.spec.conv2d import Conv2d
from im2win.spec.suites import Layer
from im2win.studies import learned_model as study
from im2win.studies import learned_pool
from im2win.studies.entries import ANALYTIC, CHECKPOINTS, NO_MODEL, OTHER_LAYERS, RANDOM, SCRATCH, SMALL_BATCHES
from im2win.studies.learned_pool import LayerPool
from im2win.tuner import cost_model
from im2win.tuner.cost_model import Choice, CostModel, features
from im2win.tuner.proposer import Search
from im2win.tuner.runners.cpu import Outcome
from im2win.tuner.session import Session, batches

MACHINE = Machine("Some CPU", "znver4", "avx512f", 2, 16, 32, 32 << 10, 1 << 20, 32 << 20)
OTHER = Conv2d(1, 16, 12, 12, 32, 3)
ALGORITHMS = ("direct/tiled", "im2win/fused")
FACTS = {"device": MACHINE.name, "brand": MACHINE.brand, "threads": 2, "versions": {}, "date": "2026-01-01", "digests": digests("cpu")}


def space(conv: Conv2d) -> dict[str, list[Choice]]:
    ranked = {name: backend_for(MACHINE).ranked(conv, schedule_of(name)) for name in ALGORITHMS}
    return {name: [Choice(name, tile, cycles) for cycles, tile in tiles] for name, tiles in ranked.items()}


def misled(conv: Conv2d, choice: Choice) -> float:
    """Seconds that the estimate misjudges by a factor that two features of the model tell exactly."""
    row = features(conv, choice, MACHINE)
    return choice.cycles * 1e-9 * 2.0 ** (3 * math.sin(3 * row[0]) + 2 * math.cos(2 * row[1]))


def pool(conv: Conv2d, top: int = 150, uniform: int = 300) -> LayerPool:
    search = Search(conv, MACHINE, space(conv), 0, study.Untrained())
    choices, places, drawn, default = learned_pool.chosen(search, search.all[0], top, uniform)
    made = LayerPool(
        "layer", conv, FACTS, top, uniform, search.size, tuple(choices), tuple(places), tuple(drawn), default, 8, False, 1.0, 2.0
    )
    return replace(made.with_costs({choice.key: misled(conv, choice) for choice in choices}), done=True)


@pytest.fixture(scope="module")
def pools() -> list[LayerPool]:
    return [pool(SMALL), pool(OTHER)]


@pytest.fixture(scope="module", autouse=True)
def _small_models() -> Iterator[None]:
    """Fewer trees than the tuner's: the times of these pools are easy to learn."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cost_model, "ROUNDS", 30)
        yield


@pytest.fixture(scope="module")
def made(pools: list[LayerPool]) -> dict[str, Any]:
    return study.run(pools, MACHINE, 2)


def arm(name: str) -> study.Arm:
    return next(one for one in study.arms(8, False) if one.name == name)


def test_a_pool_holds_the_first_by_estimate_and_the_drawn(pools: list[LayerPool]) -> None:
    one = pools[0]
    assert list(one.places[:150]) == list(range(1, 151)) and sorted(one.places) == list(one.places) and one.places[-1] <= one.space
    assert len(set(one.drawn)) == 300 and one.default == 0
    smaller = pool(SMALL, 10, 20)
    assert [smaller.choices[at] for at in smaller.drawn] == [one.choices[at] for at in one.drawn][:20]


def test_a_pool_is_what_its_file_says(pools: list[LayerPool]) -> None:
    failed = pools[0].with_costs({choice.key: math.inf if at % 3 else 1e-3 for at, choice in enumerate(pools[0].choices[:-1])})
    read = LayerPool.from_json(failed.to_json(), MACHINE)
    assert read == failed and read.costs[-2:] == (failed.costs[-2], None)


def test_arms_try_each_candidate_once_and_begin_with_the_default_tile(pools: list[LayerPool]) -> None:
    one = pools[0]
    for name in (ANALYTIC, NO_MODEL, SCRATCH):
        tried = [choice.key for choice in study.ordered(one, arm(name), MACHINE, 0, None, 64)][:64]
        assert len(set(tried)) == len(tried) == 64 and tried[0] == one.choices[one.default].key
    order = [choice.key for choice in study.ordered(one, arm(RANDOM), MACHINE, 0, None, 64)]
    assert set(order) == {one.choices[at].key for at in one.drawn}


def test_the_search_is_that_of_a_session(pools: list[LayerPool], tmp_path: Path) -> None:
    """A session without hints and with the same times tries the same candidates, whether it proposes ahead or not."""
    one = pools[0]
    ranking: dict[str, list[tuple[float, Tile]]] = {name: [] for name in ALGORITHMS}
    for choice in one.choices:
        ranking[choice.algorithm].append((choice.cycles, choice.tile))
    for ahead in (0, 8, 20):
        session = Session(SMALL, list(ranking), MACHINE, Log(tmp_path / str(ahead)), 40, 5, None, "float32", ranking)
        session.search.hints, session.hints = [], []
        for batch in batches(session.next_batch, ahead):
            session.tried += [(choice, one.measured[choice.key]) for choice in batch]
        default = one.choices.index(session.default)
        replayed = study.searched(replace(one, default=default), MACHINE, CostModel(None), 5, 40, 8, ahead)
        assert [choice.key for choice in replayed] == [choice.key for choice, _ in session.tried]


def test_seeds_are_reproducible(pools: list[LayerPool], made: dict[str, Any]) -> None:
    found = {name: one["curves"] for name, one in made["layers"][0]["arms"].items()}
    for name, curves in found.items():
        if name != OTHER_LAYERS:
            again = study.curve(pools[0], arm(name), MACHINE, 1)
            assert [None if value is None else round(value, 4) for value in again] == curves[1]
    assert found[RANDOM][0] != found[RANDOM][1]


def test_curves_rise_to_the_best_of_the_pool(made: dict[str, Any]) -> None:
    for layer in made["layers"]:
        for one in layer["arms"].values():
            for curve in one["curves"]:
                assert curve == sorted(curve) and curve[0] > 0 and curve[-1] <= 1
        first, second = layer["arms"][ANALYTIC]["curves"]
        assert first == second


def test_a_model_that_can_know_the_times_beats_the_arms_without(made: dict[str, Any]) -> None:
    at = CHECKPOINTS.index(64)
    found = {name: np.median(report.means(made, name)[at] or [0]) for name in report.names(made)}
    assert min(found[SCRATCH], found[OTHER_LAYERS]) > max(found[RANDOM], found[ANALYTIC], found[NO_MODEL]), found


def test_random_converges_where_it_sees_the_whole_space() -> None:
    """It ends with the best, and stays there; an arm that ran out of a part of the space has no value."""
    whole = pool(SMALL, 1, 10**6)
    few = replace(whole, choices=whole.choices[:20], places=tuple(range(1, 21)), costs=whole.costs[:20], space=20, drawn=tuple(range(20)))
    assert study.curve(few, arm(RANDOM), MACHINE, 0)[CHECKPOINTS.index(32) :] == (1.0,) * 4
    assert study.curve(replace(few, space=21), arm(RANDOM), MACHINE, 0)[CHECKPOINTS.index(32) :] == (None,) * 4


def test_failed_candidates_are_trials_without_a_gain(pools: list[LayerPool]) -> None:
    one = pools[0]
    broken = replace(one, costs=(*[math.inf] * 100, *one.costs[100:]))
    curve = study.curve(broken, arm(ANALYTIC), MACHINE, 0)
    assert curve[: CHECKPOINTS.index(64) + 1] == (0.0,) * 7 and curve[-1]


def test_small_batches_are_arms_of_their_own_on_a_gpu() -> None:
    assert [one.name for one in study.arms(31, True)][-1] == OTHER_LAYERS + SMALL_BATCHES
    assert len(study.arms(31, True)) == 8 and len(study.arms(8, False)) == 5


def test_bad_pools_are_refused(pools: list[LayerPool]) -> None:
    with pytest.raises(ValueError, match=r"`seeds` \(=0\)"):
        study.run(pools, MACHINE, 0)
    with pytest.raises(ValueError, match="distinct"):
        study.run([pools[0], pools[0]], MACHINE)
    with pytest.raises(ValueError, match="measured in part only"):
        study.run([replace(pools[0], done=False)], MACHINE)
    with pytest.raises(ValueError, match="one device"):
        study.run([pools[0], replace(pools[1], batch=16)], MACHINE)
    with pytest.raises(ValueError, match="no candidate of layer"):
        study.run([pools[0].with_costs({choice.key: math.inf for choice in pools[0].choices})], MACHINE)


class _Ranked:
    """A worker pool that only ranks."""

    def ranked_together(self, problems: Any, device: Any, accuracy: str) -> list[dict[str, list[tuple[float, Tile]]]]:
        return [
            {name: [(choice.cycles, choice.tile) for choice in choices] for name, choices in space(conv).items()}
            | {name: [] for name in names if name not in ALGORITHMS}
            for conv, names in problems
        ]


class _Counted:
    """A measurement that counts what it runs, and is interrupted when it has run so many."""

    ahead = 0

    def __init__(self, session: Session, until: float, seen: list[Any]) -> None:
        self.session, self.until, self.seen = session, until, seen
        self.kernels: dict[Any, None] = {choice.key: None for choice in session.search.all}

    def start(self, batch: list[Choice]) -> None: ...

    def close(self) -> None: ...

    def each_built(self, batch: list[Choice], built: Any) -> Iterator[tuple[Choice, Outcome | None]]:
        for choice in batch:
            yield choice, None

    def run(self, choices: list[Choice], **how: Any) -> list[Outcome]:
        [choice] = choices
        self.seen.append(choice.key)
        if len(self.seen) > self.until:
            raise KeyboardInterrupt
        return [Outcome("ok", samples_s=[1e-3], error=0.0)]


def test_a_resumed_pool_measures_nothing_twice(tmp_path: Path) -> None:
    layer, workers = Layer("small", SMALL, 1), _Ranked()
    seen: list[Any] = []

    def measured(until: float) -> LayerPool:
        seen.clear()
        return learned_pool.measure_layer(
            layer, MACHINE, tmp_path, 20, 20, workers, open_measurement=lambda session, _: _Counted(session, until, seen)  # type: ignore[arg-type,return-value]
        )

    with pytest.raises(KeyboardInterrupt):
        measured(22)
    first = set(seen[:-1])
    before = learned_pool.load(tmp_path, MACHINE, SMALL)
    assert before is not None and not before.done and before.measuring_s > 0
    one = measured(math.inf)
    assert not first & set(seen) and first | set(seen) == {choice.key for choice in one.choices}
    assert one.done and set(one.costs) == {1e-3} and one.measuring_s > before.measuring_s and one.ranking_s == before.ranking_s
    assert measured(math.inf) == one and not seen
    assert learned_pool.load(tmp_path, MACHINE, SMALL) == one
    learned_pool.file_of(tmp_path, MACHINE.name, SMALL).write_text("{}", encoding="utf-8")
    with pytest.raises(ValueError, match="is no pool of candidates"):
        learned_pool.load(tmp_path, MACHINE, SMALL)


def test_a_run_with_a_limit_ends_with_the_layers_that_are_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rankings are made for some layers at once, and for none that is done. A layer that is measured in part goes on in the next run."""
    layers = [Layer(name, SMALL.with_(batch=batch)) for batch, name in enumerate(("first", "second", "third"), 1)]
    module, clock, asked = script("benchmarks/learned_model.py"), [0.0], list[Any]()

    @contextlib.contextmanager
    def pools(device: Any, most: int) -> Iterator[list[Any]]:
        yield ["a pool"]

    def measure(layer: Layer, device: Any, folder: Path, top: int, uniform: int, workers: Any, report: Any, *, ranked: Any) -> LayerPool:
        assert ranked is not None or layer.name == "first"
        for done in range(1, 4):
            clock[0] += 1
            report(done, 3)
        return replace(pool(SMALL, 4, 4), name=layer.name, conv=layer.conv)

    def rank(some: Any, device: Any, workers: Any) -> dict[Conv2d, Any]:
        asked.append([layer.name for layer in some])
        return {layer.conv: ({}, 1.0) for layer in some}

    monkeypatch.setattr(module, "pools", pools)
    monkeypatch.setattr(module, "measure_layer", measure)
    monkeypatch.setattr(module, "rankings", rank)
    monkeypatch.setattr(module, "done_before", lambda layer, *how: "a pool" if layer.name == "first" else None)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    found = module.measured(layers, MACHINE, tmp_path, 4, 4, 4.5)
    assert [one.name for one in found] == ["first"] and asked == [["second", "third"]]
    assert "second: 2 of 3 candidates; the next run goes on" in capsys.readouterr().out
    clock[0] = 0.0
    assert [one.name for one in module.measured(layers, MACHINE, tmp_path, 4, 4, math.inf)] == ["first", "second", "third"]


def test_the_report_shows_arms_layers_and_curves(made: dict[str, Any], tmp_path: Path) -> None:
    text = fill("<!-- table?:learned-model -->\n<!-- /table -->\n", {}, [made])
    for name in (RANDOM, ANALYTIC, NO_MODEL, SCRATCH, OTHER_LAYERS):
        assert f"| {name} | " in text
    at = CHECKPOINTS.index(64)
    ratios = report.against(made, SCRATCH, at) or []
    assert len(ratios) == 4 and f"{math.exp(np.mean(np.log(ratios))):.3f} (+" in text
    assert "256 trials" in text and f"{MACHINE.brand} (`{MACHINE.name}`)" in text and "the first 150 by estimate and 300 drawn" in text
    pytest.importorskip("matplotlib")
    assert report.plot(made, tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
