"""A tuning session of a problem: what is proposed is built in parallel and measured alone (`tuner.measurement`), and recorded at once."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable

from im2win.records.log import Log
from im2win.records.record import Record
from im2win.registry.backends import device_for
from im2win.registry.schedules import candidates
from im2win.spec.accuracy import Accuracy, checked_accuracy
from im2win.spec.conv2d import Conv2d
from im2win.tuner.measurement import Measurement
from im2win.tuner.pool import Crew
from im2win.tuner.session import PATIENCE, Progress, Session

FINALISTS = 4  # measured again, in interleaved rounds, before one of them wins
HOPELESS = 1.5  # a candidate this many times slower than the best is not sampled to the end


class TuneError(RuntimeError):
    """A session in which no candidate gave a right answer; the message holds the outcomes."""


def _finals(session: Session, measurement: Measurement) -> None:
    """Measures the best candidates again, against each other: the best of many noisy times is too often a lucky one."""
    good = sorted((item for item in session.tried if math.isfinite(item[1])), key=lambda item: item[1])
    finalists = [choice for choice, _ in good[:FINALISTS]]
    if len(finalists) < 2 or len(session.tried) == session.resumed:
        return
    unbuilt = [choice for choice in finalists if choice.key not in measurement.libraries]
    failed = {choice.key for choice, outcome in measurement.each_built(unbuilt) if outcome is not None}
    finalists = [choice for choice in finalists if choice.key not in failed]
    for choice, outcome in zip(finalists, measurement.run(finalists, samples=15, seconds=0.3), strict=True):
        session.record(choice, outcome, measurement.kernels[choice.key], again=True)


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
    crew: Crew | None = None,
) -> Record:
    """Searches for the fastest correct kernel of a problem on this machine and records every trial.

    Memory counts, too: of two kernels about as fast, the one that holds less beside its tensors is chosen (`Record.cost`).

    Trials that the log already holds count and are not repeated, so a session that was stopped goes on where it was. It ends early when
    the last two dozen trials gained nothing.

    Args:
        conv: the problem, or its key.
        algorithm: a name of the registry, or "auto" to share the trials among all that support the problem.
        trials: candidates to try in all.
        logs: folder of the records; created if needed.
        seed: of the inputs and of the search; the same seed and the same measurements give the same candidates.
        threads: CPUs to use; all that the process may use by default.
        patience: trials without a gain of 1 % after which the session ends; None lets it use all its trials.
        accuracy: what kernels may round: "exact" is IEEE float32 sums of products; "float32" allows Winograd's form, and on a GPU sums of
            TF32 products, where they keep the tolerance of such sums; "tf32" TF32 itself, on a GPU; "winograd" tiles transformed in
            float16 and int8, too (docs/winograd.md says what that costs).
        progress: called after every trial.
        crew: worker processes to use, for several layers one after the other; of their own if None.

    Returns:
        The record of the best right candidate.

    Raises:
        ValueError: a bad argument. LogError: the log cannot be written. TuneError: no candidate gave a right answer.
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
        crew = crew or stack.enter_context(Crew(device))
        session = Session(conv, names, device, log, trials, seed, patience, accuracy, crew.ranked(conv, names, device, accuracy))
        measurement = Measurement(session, crew)
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
    if session.best is None:
        counts = ", ".join(f"{count} {outcome}" for outcome, count in session.outcomes.items())
        raise TuneError(f"tuning {session.conv} found no right kernel in {len(session.tried)} trials ({counts}); see the log.")
    choice, _ = session.best
    records = session.log.read(session.conv, session.backend.name)
    return next(r for r in reversed(records) if (r.method, r.tile) == (choice.algorithm, choice.tile.as_dict()) and r.outcome == "ok")
