"""Runs a tuning session of a problem.

Proposed candidates are built in parallel, measured one at a time (`tuner.measurement`) and recorded at once.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Collection
from typing import Any

from im2win.records.log import Log
from im2win.records.record import Record
from im2win.registry.backends import device_for
from im2win.registry.schedules import candidates
from im2win.spec.accuracy import Accuracy, checked_accuracy
from im2win.spec.conv2d import Conv2d
from im2win.tuner.cost_model import Choice
from im2win.tuner.measurement import Measurement
from im2win.tuner.pool import Pool
from im2win.tuner.session import PATIENCE, Progress, Session

FINALISTS = 4  # candidates that are measured again with the default tile, in interleaved rounds, at the end
FINALS = 3  # most rounds of finals
HOPELESS = 1.5  # sampling stops early for a candidate that is this many times slower than the best


class TuneError(RuntimeError):
    """A session in which no candidate computed a correct result. The message lists the outcomes."""


def _finals(session: Session, measurement: Measurement) -> None:
    """Measures the best candidates and the default tile again in interleaved rounds: the least of many noisy times is often an outlier.

    A candidate that was timed in a quiet moment of the search may remain better than finalists that were timed in a busy one. Finals are
    therefore repeated until the best candidate was in one, `FINALS` times at most.
    """
    if len(session.tried) == session.resumed:
        return
    seen: set[Any] = set()
    for _ in range(FINALS):
        finalists = _finalists(session, seen)
        if len(finalists) < 2:
            return
        unbuilt = [choice for choice in finalists if choice.key not in measurement.libraries]
        failed = {choice.key for choice, outcome in measurement.each_built(unbuilt) if outcome is not None}
        finalists = [choice for choice in finalists if choice.key not in failed]
        for choice, outcome in zip(finalists, measurement.run(finalists, samples=15, seconds=0.3), strict=True):
            session.record(choice, outcome, measurement.kernels[choice.key], again=True)
        seen |= {choice.key for choice in finalists} | failed
        if session.best is None or session.best[0].key in seen:
            return


def _finalists(session: Session, seen: Collection[Any]) -> list[Choice]:
    """The candidates of the next finals: the best so far, the best of the finals before, and the default tile, where they are right."""
    good = sorted((item for item in session.tried if math.isfinite(item[1])), key=lambda item: item[1])
    before = [choice for choice, _ in good if choice.key in seen][:1]
    default = [choice for choice, _ in good if choice.key == session.default.key]
    best = [choice for choice, _ in good[:FINALISTS]]
    return list({choice.key: choice for choice in (*best, *before, *default)}.values())


def tune(
    conv: Conv2d | str,
    target: str = "cpu",
    *,
    algorithm: str = "auto",
    trials: int = 64,
    logs: str | os.PathLike[str] = "tuning_logs",
    seed: int = 0,
    threads: int | None = None,
    patience: int | None = PATIENCE,
    accuracy: Accuracy = "float32",
    progress: Callable[[Progress], None] | None = None,
    pool: Pool | None = None,
) -> Record:
    """Searches for the fastest correct kernel of a problem on this machine and records every trial.

    Candidates are compared by time and memory (`Record.cost`): of two kernels with about the same time, the one with the smaller workspace
    wins.

    The default tile of the layer is always measured, and again in the finals: what wins there is never slower than it. An algorithm that is
    asked for by name meets it too, but only candidates of this algorithm are returned.

    Trials in the log count and are not repeated, so an interrupted session can be resumed. The session ends early when the last `patience`
    trials gained less than 1 %.

    Args:
        conv: the problem, or its key.
        target: "cpu" or "cuda".
        algorithm: a name of the registry, or "auto" to share the trials among all that support the problem.
        trials: number of candidates to try, those in the log included.
        logs: folder of the records; it is created if needed.
        seed: of the inputs and of the search; the same seed and the same measurements give the same candidates.
        threads: CPUs to use; all that the process may use by default.
        patience: trials without a gain of 1 % after which the session ends; None disables the early end.
        accuracy: the rounding that kernels may use. "exact": sums of products in IEEE float32. "float32": also Winograd's algorithm, and on
            a GPU sums of TF32 products, where their errors stay within the tolerance of float32 sums. "tf32": also plain TF32, on a GPU.
            "winograd": also Winograd tiles transformed in float16 and int8 (docs/winograd.md states their errors).
        progress: called after every trial.
        pool: the worker pool to use, for several layers one after the other; a temporary one if None.

    Returns:
        The record of the best correct candidate.

    Raises:
        ValueError: a bad argument.
        LogError: the log cannot be written.
        TuneError: no candidate computed a correct result.
    """
    conv = Conv2d.parse(conv) if isinstance(conv, str) else conv
    device = device_for(target, threads)
    checked_accuracy(accuracy)
    for name, value, least in (("trials", trials, 1), ("seed", seed, 0), ("patience", patience, 1)):
        if name == "patience" and value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"`{name}` (={value!r}) must be an integer of at least {least}.")
    names = [row.key for row in candidates(algorithm, conv, target, accuracy)]
    log = Log(logs)
    with contextlib.ExitStack() as stack:
        pool = pool or stack.enter_context(Pool(device))
        every = [row.key for row in candidates("auto", conv, target, accuracy)]
        session = Session(conv, names, device, log, trials, seed, patience, accuracy, pool.ranked(conv, every, device, accuracy))
        measurement = Measurement(session, pool)
        stack.callback(measurement.close)
        while batch := session.next_batch():
            for choice, failed in measurement.each_built(batch):
                give_up_s = HOPELESS * session.best[1] if session.best else math.inf
                outcome = failed or measurement.run([choice], give_up_s=give_up_s)[0]
                session.record(choice, outcome, measurement.kernels[choice.key])
                if progress:
                    progress(session.progress(choice.algorithm))
        _finals(session, measurement)
    return _winner(session)


def _winner(session: Session) -> Record:
    """The latest correct record of the best candidate."""
    if session.best is None:
        counts = ", ".join(f"{count} {outcome}" for outcome, count in session.outcomes.items())
        raise TuneError(f"tuning {session.conv} found no right kernel in {len(session.tried)} trials ({counts}); see the log.")
    choice, _ = session.best
    records = session.log.read(session.conv, session.backend.name)
    return next(r for r in reversed(records) if (r.method, r.tile) == (choice.algorithm, choice.tile.as_dict()) and r.outcome == "ok")
