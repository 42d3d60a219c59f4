"""Chooses the fastest right plan of a library that offers many for one problem: every plan is built, checked and timed by itself.

Libraries rank their plans by a model and run the first one. Here each plan is timed, within a limit of seconds for a problem, in the order
in which the library ranks them, so that what the limit leaves out is what the library itself expects to be slow.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from im2win.common.messages import brief
from im2win.common.quantities import counted

FINALISTS = 8  # plans that are timed again
FIRST_SAMPLES, FINAL_SAMPLES = 3, 11

P = TypeVar("P")


class PlanError(RuntimeError):
    """No plan of a problem could be used. The message says how many there were, and why they could not."""


@dataclass
class Chosen(Generic[P]):
    """The fastest right plan.

    Attributes:
        name: of the plan, as its library prints it.
        seconds: median of its samples.
        timed: names and seconds of all plans that were timed, the fastest first.
        refused: names of the plans that the library would not build or run, with the reason.
        wrong: names of the plans whose output was wrong, with the reason.
        left: how many plans the limit of seconds left out.
    """

    plan: P
    name: str
    seconds: float
    timed: list[tuple[str, float]]
    refused: dict[str, str] = field(default_factory=dict)
    wrong: dict[str, str] = field(default_factory=dict)
    left: int = 0

    @property
    def said(self) -> str:
        """The plan's name, and how many others it was chosen from."""
        parts = [f"the fastest of {counted(len(self.timed), 'plan')}"]
        parts += [f"{len(names)} {what}" for names, what in ((self.refused, "not available"), (self.wrong, "wrong")) if names]
        parts += [f"{self.left} not tried for lack of time"] if self.left else []
        return f"{self.name} ({', '.join(parts)})"


def fastest(
    plans: Iterable[tuple[str, P]], build: Callable[[P], Callable[[], object]], check: Callable[[Callable[[], object]], str],
    sample: Callable[[Callable[[], object]], float], limit_s: float, clock: Callable[[], float] = time.monotonic,
) -> Chosen[P]:
    """Builds, checks and times every plan, and the fastest ones once more.

    Args:
        plans: names and plans, in the order in which they are to be tried. Plans of the same name are tried once.
        build: makes a plan ready; the result runs it once. An exception of it, or of a run, is a refusal.
        check: runs a ready plan once and says what is wrong with its output ("" if nothing is).
        sample: runs a ready plan and returns its seconds.
        limit_s: seconds after which no further plan is tried; the first one is tried in any case.
        clock: of these seconds.

    Raises:
        PlanError: no plan was right.
    """
    begun, unique = clock(), list(dict(plans).items())
    refused, wrong, ready = dict[str, str](), dict[str, str](), dict[str, tuple[P, Callable[[], object], float]]()
    left = 0
    for place, (name, plan) in enumerate(unique):
        if place and clock() - begun > limit_s:
            left = len(unique) - place
            break
        try:
            call = build(plan)
            if problem := check(call):
                wrong[name] = problem
                continue
            ready[name] = plan, call, min(sample(call) for _ in range(FIRST_SAMPLES))
        except Exception as error:
            refused[name] = brief(error, 200)
    if not ready:
        raise PlanError(_none_right(len(unique), refused, wrong, left))
    times = {name: seconds for name, (_, _, seconds) in ready.items()}
    finalists = sorted(times, key=lambda name: times[name])[:FINALISTS]
    samples: dict[str, list[float]] = {name: [] for name in finalists}
    for _ in range(FINAL_SAMPLES):
        for name in finalists:
            samples[name].append(sample(ready[name][1]))
    finals = {name: statistics.median(taken) for name, taken in samples.items()}
    best = min(finals, key=lambda name: finals[name])
    return Chosen(ready[best][0], best, finals[best], sorted({**times, **finals}.items(), key=lambda one: one[1]), refused, wrong, left)


def _none_right(count: int, refused: dict[str, str], wrong: dict[str, str], left: int) -> str:
    """Why no plan can be used."""
    if not count:
        return "there is no plan for this problem."
    kinds = ((refused, "not available"), (wrong, "wrong"))
    parts = [f"{len(names)} {what} ({next(iter(names.values()))})" for names, what in kinds if names]
    parts += [f"{left} not tried for lack of time"] if left else []
    return f"none of {counted(count, 'plan')} is right: {'; '.join(parts)}."
