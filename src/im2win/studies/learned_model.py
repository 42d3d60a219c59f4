"""Whether the learned model helps the tuner: searches with it and without it, replayed on candidates that were measured once.

For each layer a pool of some hundred candidates is measured (studies/learned_pool.py). A replay then runs the tuner's own search
(`tuner.proposer.Search`) on the pool: it proposes candidates of the pool, and their times are known. So many arms and seeds cost no
measurement, and all of them see the same times. The arms:

- random: the uniform part of the pool in random order, which is a random sample of the whole space;
- analytic order: the default tile, then the best by the analytic estimate;
- search without a model: the tuner's search whose learned model predicts nothing. What it gains is due to its first candidates, one of each
  algorithm and register tile, and to those that it draws at random;
- learned from this layer: the search with a model that learns from the layer's own trials;
- learned from other layers too: the model also learns from the pools of the study's other layers.

All but random begin with the default tile, as the tuner does. No arm has hints of shipped records or ends early.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from itertools import accumulate, islice
from statistics import fmean
from typing import Any

import numpy as np

from im2win.bench.source import SOURCE, kernels_of, source_digest
from im2win.device.cpu import usable_cpus
from im2win.registry.backends import Device
from im2win.studies.entries import ANALYTIC, CHECKPOINTS, LEARNED_MODEL, NO_MODEL, OTHER_LAYERS, RANDOM, SCRATCH, SMALL_BATCHES
from im2win.studies.learned_pool import LayerPool
from im2win.tuner.cost_model import Choice, CostModel, Features, training_data
from im2win.tuner.proposer import BATCH, Search
from im2win.tuner.session import batches

SEEDS = 5

Curve = tuple[float | None, ...]
"""At each of `CHECKPOINTS` the best so far: the cost of the pool's best over it, 1 where that is found; None where the arm has run out."""


class Untrained(CostModel):
    """A model that predicts nothing: the search keeps the analytic order."""

    def rank(self, seen: Features, ratios: Features, candidates: Features, seed: int) -> Features:
        return np.zeros(len(candidates))


@dataclass(frozen=True)
class Arm:
    """One way to search.

    Attributes:
        name: of `im2win.studies.entries`.
        model: makes the model, from what other layers teach; None for an arm whose order is fixed.
        batch, ahead: candidates of a batch, and how many more are proposed before it is measured.
    """

    name: str
    model: Callable[[tuple[Features, Features] | None], CostModel] | None = None
    batch: int = BATCH
    ahead: int = 0


def arms(batch: int, ahead: int) -> list[Arm]:
    """All arms. Where the device's sessions have other batches than the least, the searches run with both."""
    models: dict[str, Callable[[tuple[Features, Features] | None], CostModel]] = {
        NO_MODEL: lambda others: Untrained(), SCRATCH: lambda others: CostModel(None), OTHER_LAYERS: CostModel,
    }  # fmt: skip
    found = [Arm(RANDOM), Arm(ANALYTIC), *(Arm(name, model, batch, ahead) for name, model in models.items())]
    if (batch, ahead) != (BATCH, 0):
        found += [Arm(name + SMALL_BATCHES, model) for name, model in models.items()]
    return found


def searched(pool: LayerPool, device: Device, model: CostModel, seed: int, trials: int, batch: int, ahead: int) -> Iterator[Choice]:
    """The candidates of a session restricted to the pool, in order: its batches are those of `tuner.tuning` and `Session.next_batch`."""
    ranked: dict[str, list[Choice]] = {}
    for choice in pool.choices:
        if choice.key in pool.measured:
            ranked.setdefault(choice.algorithm, []).append(choice)
    search = Search(pool.conv, device, ranked, seed, model)
    default = pool.choices[pool.default]
    tried: list[tuple[Choice, float]] = []

    def following(pending: Sequence[Choice]) -> list[Choice]:
        begun = [*tried, *((choice, math.inf) for choice in pending)]
        lacking = [] if begun or default.key not in pool.measured else [default]
        left = trials - len(begun) - len(lacking)
        if left <= 0:
            return lacking
        return [*lacking, *search.propose([*begun, *((choice, math.inf) for choice in lacking)], min(batch - len(lacking), left))]

    for now in batches(following, ahead):
        for choice in now:
            yield choice
            tried.append((choice, pool.measured[choice.key]))


def ordered(
    pool: LayerPool, arm: Arm, device: Device, seed: int, others: tuple[Features, Features] | None, trials: int
) -> Iterator[Choice]:
    """The candidates that an arm tries, in order."""
    if arm.model is not None:
        return searched(pool, device, arm.model(others), seed, trials, arm.batch, arm.ahead)
    if arm.name == RANDOM:
        drawn = [pool.choices[at] for at in pool.drawn]
        return (drawn[at] for at in np.random.default_rng(seed).permutation(len(drawn)))
    default = pool.choices[pool.default]
    return iter([default, *(choice for choice in pool.choices if choice.key != default.key)])


def curve(pool: LayerPool, arm: Arm, device: Device, seed: int, others: tuple[Features, Features] | None = None) -> Curve:
    """The best so far of an arm on a layer. The same seed gives the same curve.

    An arm that has tried the whole space keeps its last value; one that has run out of the pool's candidates has none.
    """
    tried = (pool.measured[one.key] for one in ordered(pool, arm, device, seed, others, CHECKPOINTS[-1]) if one.key in pool.measured)
    best = list(accumulate(islice(tried, CHECKPOINTS[-1]), min))
    exhausted = (len(pool.drawn) if arm.name == RANDOM else len(pool.choices)) == pool.space
    least = pool.best[1]
    return tuple(least / best[min(n, len(best)) - 1] if n <= len(best) or (exhausted and best) else None for n in CHECKPOINTS)


def run(
    pools: Sequence[LayerPool], device: Device, seeds: int = SEEDS, progress: Callable[[int, int], None] | None = None
) -> dict[str, Any]:
    """Replays every arm with every seed on every layer, on all CPUs that this process may use.

    Args:
        pools: of distinct layers, all done, of one device and one source.
        progress: called with (replays done, replays in all).

    Returns:
        The study, as it is written to JSON: facts of the latest pool, `seeds`, `batch` and `ahead` of the device's sessions, `replayed`
        (the digest of the source that replayed) and `layers`. Each of these holds sizes of its space and pool, seconds, its best candidate,
        and by arm the curves by seed and the mean CPU seconds in which a session of 256 trials proposes candidates (`proposing_s`).

    Raises:
        ValueError: pools that do not belong together, or a layer without a right candidate.
    """
    import xgboost

    _check(pools, seeds)
    every = arms(pools[0].batch, pools[0].ahead)
    shared = {pool.conv: _others(pool, pools, device) for pool in pools}
    found: dict[tuple[int, str, int], tuple[Curve, float]] = {}

    def one(place: int, arm: Arm, seed: int) -> None:
        begun = time.thread_time()
        made = curve(pools[place], arm, device, seed, shared[pools[place].conv])
        found[place, arm.name, seed] = made, time.thread_time() - begun

    with ThreadPoolExecutor(usable_cpus()) as threads:  # xgboost runs without Python's lock
        jobs = [threads.submit(one, place, arm, seed) for seed in range(seeds) for arm in every for place in range(len(pools))]
        for done, job in enumerate(as_completed(jobs), 1):
            job.result()
            if progress is not None:
                progress(done, len(jobs))
    layers = [
        _entry(pool) | {"arms": {arm.name: _of_arm([found[place, arm.name, seed] for seed in range(seeds)]) for arm in every}}
        for place, pool in enumerate(pools)
    ]
    head = max((pool.facts for pool in pools), key=lambda facts: str(facts["date"]))
    libraries = {**head["versions"], "xgboost": xgboost.__version__}
    settings = {"seeds": seeds, "batch": pools[0].batch, "ahead": pools[0].ahead, "checkpoints": list(CHECKPOINTS)}
    return {**head, "study": LEARNED_MODEL, "versions": libraries, **settings, "replayed": {SOURCE: source_digest()}, "layers": layers}


def _check(pools: Sequence[LayerPool], seeds: int) -> None:
    if not pools or seeds < 1:
        raise ValueError(f"`pools` must hold one layer at least, and `seeds` (={seeds}) must be at least 1.")
    if len({pool.conv for pool in pools}) < len(pools):
        raise ValueError("`pools` must be of distinct layers.")
    for pool in pools:
        if not pool.done:
            raise ValueError(f"the pool of {pool.name} ({pool.conv}) is measured in part only: measure the rest first.")
    places = {(p.facts["device"], p.facts["threads"], kernels_of(p.facts["digests"]), p.batch, p.ahead) for p in pools}
    if len(places) > 1:
        raise ValueError("`pools` must be of one device, with equal numbers of threads and CPUs, and measured with one source.")


def _others(pool: LayerPool, pools: Sequence[LayerPool], device: Device) -> tuple[Features, Features] | None:
    """What the pools of the other layers teach about this one."""
    rows = [
        (other.conv, choice, other.measured[choice.key])
        for other in pools if other.conv != pool.conv
        for choice in other.choices if math.isfinite(other.measured.get(choice.key, math.inf))
    ]  # fmt: skip
    return training_data(rows, device)


def _of_arm(replays: Sequence[tuple[Curve, float]]) -> dict[str, Any]:
    curves = [[None if value is None else round(value, 4) for value in made] for made, _ in replays]
    return {"curves": curves, "proposing_s": round(fmean(spent for _, spent in replays), 3)}


def _entry(pool: LayerPool) -> dict[str, Any]:
    """What a pool is, in numbers."""
    place, best = pool.best
    choice, default = pool.choices[place], pool.measured.get(pool.choices[pool.default].key, math.inf)
    return {
        "layer": pool.name, "conv": str(pool.conv), "space": pool.space, "top": pool.top, "uniform": pool.uniform,
        "measured": len(pool.measured), "failed": sum(map(math.isinf, pool.measured.values())),
        "undecided": len(pool.choices) - len(pool.measured),
        "ranking_s": round(pool.ranking_s, 2), "measuring_s": round(pool.measuring_s, 1),
        "best": {"algorithm": choice.algorithm, "tile": choice.tile.as_dict(), "place": pool.places[place], "ms": 1e3 * best},
        "default": None if math.isinf(default) else round(best / default, 4),
    }  # fmt: skip
