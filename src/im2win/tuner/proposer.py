"""Selects the next candidates: first the best of the analytic model, then the best of the learned model, and always a few at random."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from im2win.registry.backends import Device, backend_for
from im2win.registry.schedules import schedule_of
from im2win.spec.conv2d import Conv2d
from im2win.tuner.cost_model import Choice, CostModel, Features, features

BATCH = 8  # candidates built together
POOL = 3000  # candidates that the learned model ranks: one half the best by estimate, the other half random
EXPLORE = 2  # candidates of a batch that are drawn at random from the better half by estimate
HOPEFUL = 1.6  # an algorithm whose best estimate is this many times the best gets one trial, and more only if that surprises


class Search:
    """Proposes candidates of one problem. The same seed and the same measurements give the same sequence.

    Args:
        ranked: each algorithm's candidates, best estimate first.
        hints: the best candidates of records that earlier code made; they follow the default tile.
    """

    def __init__(
        self,
        conv: Conv2d,
        machine: Device,
        ranked: dict[str, list[Choice]],
        seed: int,
        model: CostModel,
        hints: Sequence[Choice] = (),
    ) -> None:
        self.conv, self.machine, self.seed, self.model, self.hints = conv, machine, seed, model, list(hints)
        self.all = sorted((c for choices in ranked.values() for c in choices), key=lambda c: c.cycles)
        self.firsts = sorted((choices[0] for choices in ranked.values() if choices), key=lambda c: c.cycles)
        self._features: dict[tuple[str, object], list[float]] = {}

    @property
    def size(self) -> int:
        """Number of candidates in the space."""
        return len(self.all)

    def propose(self, tried: Sequence[tuple[Choice, float]], count: int) -> list[Choice]:
        """The next `count` candidates; fewer when the space is exhausted.

        Args:
            tried: the candidates so far with their cost in seconds, infinity for those that failed.
        """
        done = {choice.key for choice, _ in tried}
        rng = np.random.default_rng([self.seed, len(tried)])
        fresh = [choice for choice in self.all if choice.key not in done]
        picked: list[Choice] = []

        def pick(choices: Sequence[Choice], most: int) -> None:
            for choice in choices:
                if len(picked) >= most:
                    return
                if choice.key not in done:
                    done.add(choice.key)
                    picked.append(choice)

        if not tried:
            pick(self.firsts[:1], 1)  # the first trial is always the default tile
        pick(self.hints, count)
        if len(tried) < BATCH:
            pick(self._openings(), count)
        elif fresh:
            pick(self._learned(tried, fresh, rng), max(count - EXPLORE, 1))
        better = fresh[: max(len(fresh) // 2, BATCH)]
        pick([better[i] for i in rng.permutation(len(better))], count)
        pick(fresh, count)
        return picked

    def _openings(self) -> list[Choice]:
        """The first population: each algorithm's best estimate, then the best estimates overall with distinct register tiles."""
        seen: set[tuple[object, ...]] = set()
        openings = list(self.firsts)
        for choice in self.all:
            shape = backend_for(self.machine).shape(schedule_of(choice.algorithm), choice.tile)
            if shape not in seen:
                seen.add(shape)
                openings.append(choice)
            if len(seen) == BATCH:
                break
        return openings

    def _learned(self, tried: Sequence[tuple[Choice, float]], fresh: list[Choice], rng: np.random.Generator) -> list[Choice]:
        """Untried candidates, best first by the learned model's prediction."""
        good = [(choice, seconds) for choice, seconds in tried if math.isfinite(seconds)]
        if not good:
            return fresh
        half = POOL // 2
        rest = fresh[half:]
        pool = fresh[:half] + [rest[i] for i in rng.permutation(len(rest))[:half]]
        ratios = np.array([math.log2(seconds / choice.cycles) for choice, seconds in good])
        predicted = self.model.rank(self._rows([c for c, _ in good]), ratios, self._rows(pool), self.seed)
        score = predicted + np.log2([choice.cycles for choice in pool])
        return [pool[i] for i in np.argsort(score, kind="stable")]

    def _rows(self, choices: Sequence[Choice]) -> Features:
        """The features [n, f] of candidates."""
        for choice in choices:
            if choice.key not in self._features:
                self._features[choice.key] = features(self.conv, choice, self.machine)
        return np.array([self._features[choice.key] for choice in choices])
