"""Times two ways to compute the same thing against each other, until it is clear which is faster.

Rounds alternate, A B, B A, and each gives one ratio of two samples taken one after the other. The median of the ratios decides. Its noise
is twice its standard error, estimated from the median absolute deviation, so that a few disturbed samples count for little. Rounds go on
while the median is within the noise of 1, for a limited time, and end early where it is far from 1. One rule serves everywhere: a way is
faster only by more than the noise.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

SECONDS = 0.04  # of sampling, unless the caller says otherwise
LEAST_ROUNDS, ENOUGH_ROUNDS = 5, 60
_CLEAR_ROUNDS, _CLEAR = 8, 0.15  # so many rounds are enough where the median is so far from 1, and five times the noise
_PATIENCE = 4  # an unclear comparison may take this many times its seconds
_SAMPLE_S = 5e-4  # a sample lasts at least this long: shorter calls are repeated within it
_WARM_UP_S = 0.01
_LEAST_NOISE = 0.005  # of the median; clocks and caches differ by as much between two equal subjects
_DISTURBED = 0.08  # noise above which a result says more of other work on the machine than of the subjects


@dataclass(frozen=True)
class Comparison:
    """Result of `compare`: medians in seconds per call.

    Attributes:
        ratio: median of ours / theirs over the rounds; below 1 ours is faster.
        noise: how far off the ratio may be.
        rounds: number of pairs of samples.
    """

    ours_s: float
    theirs_s: float
    ratio: float
    noise: float
    rounds: int

    @property
    def faster(self) -> bool:
        """Whether ours is faster by more than the noise."""
        return self.ratio < 1 - self.noise

    @property
    def slower(self) -> bool:
        """Whether ours is slower by more than the noise."""
        return self.ratio > 1 + self.noise

    @property
    def disturbed(self) -> bool:
        """Whether the samples scatter so much that the result should not be kept for later."""
        return self.noise > _DISTURBED


def compare(
    ours: Callable[[], object],
    theirs: Callable[[], object],
    *,
    seconds: float = SECONDS,
    synchronize: Callable[[], object] | None = None,
) -> Comparison:
    """Times two calls in alternating rounds. Both are called once before, which builds and packs what they need.

    It takes about `seconds`, and at most a few times as long where the result stays unclear. Calls that are slower than that are sampled
    three times each.

    Args:
        synchronize: waits for the calls' work, where they return before it is done; it is called at the end of each sample.
    """

    def sample(call: Callable[[], object], count: int) -> float:
        started = time.perf_counter()
        for _ in range(count):
            call()
        if synchronize is not None:
            synchronize()
        return (time.perf_counter() - started) / count

    for call in (ours, theirs):
        sample(call, 1)
    once = min(sample(ours, 1), sample(theirs, 1))
    warm = time.perf_counter() + min(_WARM_UP_S, seconds)
    while time.perf_counter() < warm:
        once = min(once, sample(ours, 1), sample(theirs, 1))
    count = max(1, math.ceil(_SAMPLE_S / max(once, 1e-7)))
    started, pairs = time.perf_counter(), list[tuple[float, float]]()
    while True:
        if len(pairs) % 2:
            behind = sample(theirs, count)
            pairs.append((sample(ours, count), behind))
        else:
            pairs.append((sample(ours, count), sample(theirs, count)))
        if len(pairs) >= 3 and _ends(pairs, time.perf_counter() - started, seconds):
            ratio, noise = judged(pairs)
            ours_s, theirs_s = (statistics.median(side) for side in zip(*pairs, strict=True))
            return Comparison(ours_s, theirs_s, ratio, noise, len(pairs))


def _ends(pairs: list[tuple[float, float]], elapsed: float, seconds: float) -> bool:
    if elapsed > _PATIENCE * seconds or (elapsed < seconds and len(pairs) >= ENOUGH_ROUNDS):
        return True
    ratio, noise = judged(pairs)
    if elapsed < seconds:
        return len(pairs) >= _CLEAR_ROUNDS and abs(ratio - 1) > max(_CLEAR, 5 * noise)
    return len(pairs) >= LEAST_ROUNDS and abs(ratio - 1) > noise


def judged(pairs: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """Median of the ratios of pairs of samples, ours first, and its noise."""
    ratios = [ours / theirs for ours, theirs in pairs]
    median = statistics.median(ratios)
    deviation = 1.4826 * statistics.median(abs(ratio - median) for ratio in ratios)
    return median, max(2 * 1.2533 * deviation / math.sqrt(len(ratios)), _LEAST_NOISE)
