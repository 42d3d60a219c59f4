"""Runs a tuning session of a problem.

Proposed candidates are built in parallel, for a GPU while others are measured, measured one at a time (`tuner.measurement`) and recorded
at once. What was measured while other work disturbed the machine is measured again (`tuner.baseline`).
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import Any

from im2win.common.quantities import counted
from im2win.records.folders import Logs, folder_to_write
from im2win.records.log import Log
from im2win.records.record import Record
from im2win.registry.backends import device_for
from im2win.registry.schedules import candidates
from im2win.spec import objective
from im2win.spec.accuracy import Accuracy, checked_accuracy
from im2win.spec.conv2d import Conv2d
from im2win.tuner.baseline import Baseline, measure_batch
from im2win.tuner.cost_model import Choice
from im2win.tuner.fleet.fleet import Fleet, gathered
from im2win.tuner.fleet.tracker import KEY
from im2win.tuner.measurement import Measurement
from im2win.tuner.pool import Pool
from im2win.tuner.runners.cpu import Outcome
from im2win.tuner.session import PATIENCE, Progress, Session, batches
from im2win.tuner.shared_queue import SharedQueue

FINALISTS = 4  # candidates that are measured again with the default tile, in interleaved rounds, at the end,
MOST_FINALISTS = 8  # and more, up to so many, that are not slower than the best by
CLOSE = 1.06  # what noise makes of equal kernels
DOUBTED = 2  # more candidates that are measured again: the analytic model ranks them above the best, and their times are above it by
DOUBTFUL = 1.3  # more than the model is mostly wrong
FINALS = 2  # most rounds of finals
REMATCHES = 4  # new processes, at most, in which a new best candidate meets the holder of the record: of two equal ones, one wins 1 in 70
CLEAR = 1.1  # times as fast as the holder, side by side: one process is enough
HOPELESS = 1.5  # sampling stops early for a candidate that is this many times slower than the best


class TuneError(RuntimeError):
    """A session in which no candidate computed a correct result. The message lists the outcomes."""


def _finals(session: Session, measurement: Measurement) -> None:
    """Measures the best candidates and the default tile again in interleaved rounds: the least of many noisy times is often an outlier.

    A candidate that was timed in a quiet moment of the search may remain better than finalists that were timed in a busy one. Finals are
    therefore repeated until the best candidate was in one, `FINALS` times at most. One that was timed in a busy moment may have been given
    up: those are among the finalists, too, from which the analytic model expects most.
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
        for choice, outcome in zip(finalists, measurement.run_finals(finalists, samples=12, seconds=0.25), strict=True):
            session.record(choice, outcome, measurement.kernels[choice.key], again=True)
        seen |= {choice.key for choice in finalists} | failed
        if session.best is None or session.best[0].key in seen:
            return


def _rematches(session: Session, measurement: Measurement) -> None:
    """Lets the new best candidate meet the holder: the one whose record a look-up used before. See `_meet`.

    If it does not beat the holder, another new candidate may be better than both: that one meets the holder, too.
    """
    holder, fastest = session.holder, None
    if holder is None or len(session.tried) == session.resumed:
        return
    met = {holder.key}
    while session.best is not None and session.best[0].key not in met:
        met.add(session.best[0].key)
        fastest = _meet(session, measurement, session.best[0], holder, fastest)
        if fastest is None:
            return


def _meet(
    session: Session, measurement: Measurement, challenger: Choice, holder: Choice, fastest: Outcome | None
) -> Outcome | None:
    """Measures two candidates side by side in several new processes, and records the slowest of the challenger, the holder's fastest.

    Where memory lies, say, differs between processes, and of two equal kernels one is faster in any of them. How far times of one candidate
    lie apart over the processes is the spread. The challenger becomes the best only if it wins by more than that: if it is faster in its
    slowest process than the holder in its fastest one. Since these two stay recorded, every reader of the log finds the same.

    Args:
        fastest: the holder's fastest outcome against other challengers.

    Returns:
        The holder's fastest outcome; None where nobody can meet it: the holder is wrong, or the machine fails.
    """
    pair = [challenger, holder]
    unbuilt = [choice for choice in pair if choice.key not in measurement.libraries]
    if any(outcome is not None for _, outcome in measurement.each_built(unbuilt)):
        return None

    def cost(choice: Choice, outcome: Outcome) -> float:
        if outcome.outcome != "ok":
            return math.inf
        kernel = measurement.kernels[choice.key]
        return objective.cost(session.conv, median(outcome.samples_s), kernel.extra_bytes if kernel else 0)

    slowest: Outcome | None = None
    for _ in range(REMATCHES):
        mine, its = measurement.run_anew(pair, samples=12, seconds=0.25)
        if mine.undecided or its.undecided:
            return None
        slowest = mine if slowest is None or cost(challenger, mine) > cost(challenger, slowest) else slowest
        fastest = its if fastest is None or its.outcome != "ok" or cost(holder, its) < cost(holder, fastest) else fastest
        clear = cost(challenger, mine) * CLEAR <= cost(holder, its)
        if clear or its.outcome != "ok" or cost(holder, fastest) <= cost(challenger, slowest):
            break
    assert slowest is not None and fastest is not None
    tried = {choice.key for choice, _ in session.tried}
    for choice, outcome in ((holder, fastest), (challenger, slowest)):  # of equal costs, the first line counts
        session.record(choice, outcome, measurement.kernels[choice.key], again=choice.key in tried)
    return fastest if fastest.outcome == "ok" else None


def _finalists(session: Session, seen: set[Any]) -> list[Choice]:
    """The candidates of the next finals, where they are right: the best so far, the best of the finals before, the default, the doubted.

    Candidates that met the best of the finals before need not meet it again.
    """
    good = sorted((item for item in session.tried if math.isfinite(item[1])), key=lambda item: item[1])
    before = [choice for choice, _ in good if choice.key in seen][:1]
    default = [choice for choice, _ in good if choice.key == session.default.key]
    top = [item for item in good if item[0].key not in seen][:MOST_FINALISTS]
    fewest = 0 if seen else FINALISTS
    best = [choice for place, (choice, cost) in enumerate(top) if place < fewest or cost <= CLOSE * good[0][1]]
    known = seen | {choice.key for choice in default}
    slow = [choice for choice, cost in good if cost > DOUBTFUL * good[0][1] and choice.key not in known]
    doubted = sorted((choice for choice in slow if choice.cycles < good[0][0].cycles), key=lambda choice: choice.cycles)[:DOUBTED]
    return list({choice.key: choice for choice in (*best, *before, *default, *doubted)}.values())


def tune(
    conv: Conv2d | str,
    target: str = "cpu",
    *,
    algorithm: str = "auto",
    trials: int = 64,
    logs: Logs = None,
    seed: int = 0,
    threads: int | None = None,
    patience: int | None = PATIENCE,
    accuracy: Accuracy = "float32",
    progress: Callable[[Progress], None] | None = None,
    pool: Pool | None = None,
    tracker: str | None = None,
    key: str = KEY,
    device: str | None = None,
    secret_file: str | os.PathLike[str] | None = None,
) -> Record:
    """Searches for the fastest correct kernel of a problem on this machine, or a fleet's, and records every trial.

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
        logs: folder of the records, the first of several; the user's own (`IM2WIN_LOGS`, else the platform's) if None. It is created if
            needed. Every look-up searches the user's own folder, and another one when it is told.
        seed: of the inputs and of the search; the same seed and the same measurements give the same candidates.
        threads: CPUs to use; all that the process may use by default.
        patience: trials without a gain of 1 % after which the session ends; None disables the early end.
        accuracy: the rounding that kernels may use. "exact": sums of products in IEEE float32. "float32": also Winograd's algorithm, and on
            a GPU sums of TF32 products, where their errors stay within the tolerance of float32 sums. "tf32": also plain TF32, on a GPU.
            "winograd": also Winograd tiles transformed in float16 and int8 (docs/winograd.md states their errors).
        progress: called after every trial, and when another phase has begun or come further (`Progress.phase`).
        pool: the worker pool to use, for several layers one after the other; a temporary one if None. Where it is a fleet's, `tracker` and
            what belongs to it are not looked at.
        tracker: "HOST:PORT" of TVM's RPC tracker, whose workers (`im2win worker`) measure, and for whose device kernels are built; None to
            measure here.
        key: what the workers registered with.
        device: the workers' device model, such as "nvidia-h200"; needed if there are several with this key.
        secret_file: file with the secret that the workers share; `IM2WIN_SECRET` if None. Beyond loopback there must be one.

    Returns:
        The record of the best correct candidate.

    Raises:
        ValueError: a bad argument.
        LogError: the log cannot be written.
        TuneError: no candidate computed a correct result.
        MachineError: nothing can be built or measured: no space is left, or the GPU is gone.
        TrackerError, FleetError, SecretError: there is no tracker; there are no workers (any more), or those of several device models; the
            secret is missing. The messages say what to do.
    """
    conv = Conv2d.parse(conv) if isinstance(conv, str) else conv
    with contextlib.ExitStack() as stack:
        fleet = pool.fleet if pool is not None else None
        if pool is None and tracker is not None:
            fleet = stack.enter_context(gathered(tracker, key, device, target, threads, secret_file))
        return _tuned(conv, target, algorithm, trials, logs, seed, threads, patience, accuracy, progress, pool, fleet)


def _tuned(
    conv: Conv2d, target: str, algorithm: str, trials: int, logs: Logs, seed: int, threads: int | None, patience: int | None,
    accuracy: Accuracy, progress: Callable[[Progress], None] | None, pool: Pool | None, fleet: Fleet | None,
) -> Record:  # fmt: skip
    """`tune`, with the fleet that measures, if one does."""
    device = device_for(target, threads) if fleet is None else fleet.device
    check_arguments(trials, seed, accuracy, patience)
    names = [row.key for row in candidates(algorithm, conv, target, accuracy)]
    log = Log(folder_to_write(logs))
    report = progress or (lambda state: None)
    before = partial(Progress, conv, "", 0, trials, None, None, 0.0, None)  # before there is a session
    with contextlib.ExitStack() as stack:
        pool = pool or stack.enter_context(Pool(device, fleet=fleet))
        every = [row.key for row in candidates("auto", conv, target, accuracy)]  # the default tile may be of another one
        ranking = pool.ranked(conv, every, device, accuracy, lambda count: report(before(f"ranking {count} of {len(every)} algorithms")))
        report(before("reading the records"))
        session = Session(conv, names, device, log, trials, seed, patience, accuracy, ranking)
        measurement = Measurement(session, pool)
        stack.callback(measurement.close)

        def tried(choice: Choice) -> None:
            report(session.progress(choice.algorithm))

        def disturbed() -> None:
            report(session.progress(phase="measuring again what was disturbed"))

        shared = SharedQueue(session, measurement, fleet, HOPELESS, tried, disturbed) if fleet is not None else None
        baseline = Baseline(lambda choice: measurement.run([choice])[0])
        for batch in _batches(session, measurement, shared):
            built = partial(_report_built, report, session, len(batch))
            if shared is not None:
                shared.measure_batch(batch, built)
            else:
                measure_batch(session, measurement, baseline, batch, HOPELESS, built, tried, disturbed)
        if shared is not None:
            shared.finish()
        report(session.progress(phase="measuring the best again"))
        _finals(session, measurement)
        _rematches(session, measurement)
    return _winner(session)


def _batches(session: Session, measurement: Measurement, shared: SharedQueue | None) -> Iterator[list[Choice]]:
    """The session's batches; those that are proposed ahead are being built. A session that gains nothing more drops them."""

    def propose(pending: list[Choice]) -> list[Choice]:
        batch = session.next_batch([*(shared.pending if shared is not None else ()), *pending])
        measurement.start(batch)
        return batch

    return batches(propose, measurement.ahead, lambda: session.stalled)


def check_arguments(trials: int, seed: int, accuracy: Accuracy, patience: int | None = None) -> None:
    """Raises ValueError for a value that `tune` does not take."""
    checked_accuracy(accuracy)
    for name, value, least in (("trials", trials, 1), ("seed", seed, 0), ("patience", patience, 1)):
        if name == "patience" and value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"`{name}` (={value!r}) must be an integer of at least {least}.")


def _report_built(report: Callable[[Progress], None], session: Session, total: int, count: int) -> None:
    if count < total:
        report(session.progress(phase=f"building {count + 1} of {total}"))


def _winner(session: Session) -> Record:
    """The latest correct record of the best candidate."""
    if session.best is None:
        counts = ", ".join(f"{count} {outcome}" for outcome, count in session.outcomes.items())
        raise TuneError(f"tuning {session.conv} found no right kernel in {counted(len(session.tried), 'trial')} ({counts}); see the log.")
    choice, _ = session.best
    records = session.log.read(session.conv, session.backend.name)
    return next(r for r in reversed(records) if (r.method, r.tile) == (choice.algorithm, choice.tile.as_dict()) and r.outcome == "ok")
