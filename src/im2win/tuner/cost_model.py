"""The learned cost model: gradient-boosted trees over the features that the analytic model computes for a tile.

The target is log2(measured time / analytic estimate). An untrained model therefore equals the analytic one, and a trained one corrects it.
Records of other layers on the same device are training data too, so the model is useful before the layer itself has dozens of trials.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from im2win.registry.backends import Device, backend_for
from im2win.registry.interface import Tile
from im2win.registry.schedules import schedule_of
from im2win.spec.conv2d import Conv2d

Features = npt.NDArray[np.float64]

LEAST = 8  # measurements of this layer below which the model is not fitted
ROUNDS = 120  # trees
KEPT = 1 << 16  # entries of the caches of estimates and features: every layer of a suite learns from the records of all others
OTHERS_WEIGHT = 0.25  # sample weight of another layer's record; this layer's records weigh 1


@dataclass(frozen=True)
class Choice:
    """A candidate: an algorithm, its tile, and the analytic estimate, in cycles on a CPU and in seconds on a GPU."""

    algorithm: str
    tile: Tile
    cycles: float

    @property
    def key(self) -> tuple[str, Tile]:
        """The candidate's identity: algorithm and tile, without the estimate."""
        return self.algorithm, self.tile


@functools.lru_cache(maxsize=KEPT)
def features(conv: Conv2d, choice: Choice, device: Device) -> list[float]:
    """Features of a candidate for the learned model; each backend defines its own."""
    return backend_for(device).features(conv, schedule_of(choice.algorithm), choice.tile, choice.cycles)


class CostModel:
    """Predicts log2(time / estimate) for candidates of one problem.

    Args:
        others: (features, log2 ratio) of measurements of other layers on this device, each layer's ratios centred on its median.
    """

    def __init__(self, others: tuple[Features, Features] | None = None) -> None:
        self._others = others

    def rank(self, seen: Features, ratios: Features, candidates: Features, seed: int) -> Features:
        """Fits the model to the measurements and predicts the log2 ratios of candidates; zeros while there are too few measurements.

        Shapes: seen [n, f], ratios [n], candidates [m, f] -> [m].
        """
        import xgboost

        if len(seen) < LEAST:
            return np.zeros(len(candidates))
        x, y, weight = seen, ratios - np.median(ratios), np.ones(len(seen))
        if self._others is not None and len(self._others[0]):
            x, y = np.vstack([x, self._others[0]]), np.concatenate([y, self._others[1]])
            weight = np.concatenate([weight, np.full(len(self._others[0]), OTHERS_WEIGHT)])
        parameters = {"max_depth": 5, "eta": 0.12, "subsample": 0.9, "colsample_bytree": 0.7, "seed": seed, "nthread": 1, "verbosity": 0}
        model = xgboost.train(parameters, xgboost.DMatrix(x, label=y, weight=weight), num_boost_round=ROUNDS)
        return np.asarray(model.predict(xgboost.DMatrix(candidates)), dtype=np.float64)


def training_data(measured: Sequence[tuple[Conv2d, Choice, float]], device: Device) -> tuple[Features, Features] | None:
    """Features and centred log2 ratios from measurements (conv, candidate, seconds) of other layers; None without measurements."""
    layers: dict[Conv2d, list[tuple[list[float], float]]] = {}
    for conv, choice, seconds in measured:
        layers.setdefault(conv, []).append((features(conv, choice, device), math.log2(seconds / choice.cycles)))
    rows: list[list[float]] = []
    ratios: list[float] = []
    for points in layers.values():
        middle = float(np.median([ratio for _, ratio in points]))
        rows += [row for row, _ in points]
        ratios += [ratio - middle for _, ratio in points]
    return (np.array(rows), np.array(ratios)) if rows else None


@functools.lru_cache(maxsize=KEPT)
def with_cycles(conv: Conv2d, algorithm: str, tile: Tile, device: Device) -> Choice:
    """A candidate with its analytic estimate."""
    choice = Choice(algorithm, tile, 0.0)
    return dataclasses.replace(choice, cycles=backend_for(device).cost(conv, schedule_of(algorithm), tile))
