"""The tuner's side of a fleet: it takes every free worker of its device model from the tracker, and shares one queue of jobs among them.

A worker that dies, falls silent, breaks the protocol or gives outputs that the reference contradicts is let go, and its job goes back to
the queue. It may come back through the tracker, and is refused after `MOST_FAULTS` faults. A verdict against a candidate counts when a
second worker agrees, if there is one. Workers may join at any time. Without any worker for `wait_s` seconds the run ends; what was measured
until then is in the log.

A job that workers are lost with may be what they are lost by. It goes behind the others, and is given up, undecided, once `MOST_FAULTS`
workers were lost with it. Workers that were lost with jobs which others then finished were lost by chance: as many as the fleet has lost so
since the job's first one are allowed on top, so that a fleet whose machines are taken away at random seldom gives a job up.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import socket
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from im2win.common.quantities import counted
from im2win.common.worker_pool import WorkerError
from im2win.registry.backends import Device, backend_for, check_target
from im2win.tuner.fleet import probe
from im2win.tuner.fleet.link import FaultError, LieError, Link, UnfitError
from im2win.tuner.fleet.messages import Facts, MessageError
from im2win.tuner.fleet.secret import SecretError, check_reach, read_secret
from im2win.tuner.fleet.server import keep_alive
from im2win.tuner.fleet.task import Answer, Task
from im2win.tuner.fleet.tracker import Tracker, TrackerError, address, checked_key
from im2win.tuner.fleet.wire import GREETING_S, Channel, ChannelError, greet
from im2win.tuner.runners.cpu import Outcome, RunJob

_log = logging.getLogger("im2win.fleet")

WAIT_S = 60.0  # seconds without any worker until a run ends
SILENCE_S = 15.0  # a worker that gives no sign of life for so long while its job runs is given up
ANSWER_BYTES = 64 << 20
MOST_FAULTS = 3  # after so many a worker is refused, and a job that so many workers were lost with, not by chance, is given up
_POLL_S = 0.2


class FleetError(RuntimeError):
    """A fleet without workers, or with workers of several device models. The message says what to do."""


class Fleet:
    """The workers of one device model, as one that measures.

    Args:
        tracker: "HOST:PORT" of the tracker.
        key: what the workers registered with.
        device: the device model; None if the workers of the key are all of one.
        secret: what workers must know; empty for none, on loopback only.
        wait_s: seconds to wait for a worker, at the start and when all are gone.

    Raises:
        ValueError: a bad argument. TrackerError: there is no tracker. FleetError: no worker, or several device models.
        SecretError: the tracker or a worker lies beyond loopback and there is no secret.
    """

    def __init__(
        self, tracker: str, key: str, *, device: str | None = None, secret: bytes = b"", wait_s: float = WAIT_S,
        silence_s: float = SILENCE_S,
    ) -> None:  # fmt: skip
        self.where, self.secret, self.wait_s, self.silence_s = address(tracker), secret, wait_s, silence_s
        check_reach(self.where[0], secret, "`tracker`")
        self._lock = threading.Condition()
        self._tasks: list[Task] = []
        self._links: dict[str, Link] = {}
        self._running: dict[Link, Task] = {}
        self._probing, self._probes = threading.Lock(), dict[Any, probe.Probe]()
        self._closing = False
        self._failure: Exception | None = None
        self._lonely = time.monotonic()
        self._device: Device | None = None
        self.faults: Counter[str] = Counter()
        self.refused: dict[str, str] = {}  # by worker, why it cannot be used now
        self.dropped: dict[str, str] = {}  # by worker, why it is not used any more
        self.by_chance = 0  # workers that were lost with jobs which others then finished
        self.done: Counter[str] = Counter()  # jobs of each worker
        self.busy_s: dict[str, float] = defaultdict(float)  # seconds in which each worker had a job
        self._key = self._chosen(checked_key(key), device)
        self._threads = [threading.Thread(target=self._recruit, name="im2win-fleet", daemon=True)]
        self._threads[0].start()
        try:
            with self._lock:
                while self._device is None and self._failure is None:
                    self._lock.wait(_POLL_S)
            if self._failure is not None:
                raise self._failure
        except BaseException:
            self.close()
            raise

    def _chosen(self, key: str, device: str | None) -> str:
        """The key at the tracker of the workers of one device model."""
        deadline = time.monotonic() + self.wait_s
        while True:
            with contextlib.closing(Tracker(self.where)) as tracker:
                models = sorted(set(tracker.models(key)))
            if device is not None:
                return f"{key}/{device}"
            if len(models) == 1:
                return f"{key}/{models[0]}"
            if models:
                raise FleetError(
                    f"the workers of key {key!r} are of several device models ({', '.join(models)}), whose times cannot be compared: name "
                    "one with --device, or give each model a key of its own."
                )
            if time.monotonic() > deadline:
                raise FleetError(self._nobody(key))
            time.sleep(_POLL_S)

    def _nobody(self, key: str) -> str:
        refused = "".join(f" {name} was refused: {why}." for name, why in self.refused.items())
        return (
            f"there was no worker with key {key!r} at the tracker {self.where[0]}:{self.where[1]} for {self.wait_s:g} s: start one with "
            f"`im2win worker --tracker {self.where[0]}:{self.where[1]} --key {key.split('/')[0]}`.{refused}"
        )

    @property
    def device(self) -> Device:
        """The workers' device."""
        assert self._device is not None
        return self._device

    @property
    def workers(self) -> list[str]:
        """The workers that are connected."""
        with self._lock:
            return list(self._links)

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *reason: object) -> None:
        self.close()

    def close(self) -> None:
        """Lets all workers go. Jobs that wait fail."""
        with self._lock:
            self._closing = True
            self._fail(FleetError("the fleet was closed."))
            for link in self._links.values():
                if link not in self._running:
                    with contextlib.suppress(ChannelError):
                        link.channel.send({"do": "end"})
                link.channel.close()
            self._lock.notify_all()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(GREETING_S)

    # --- jobs ----------------------------------------------------------------------------------------------------

    def submit(self, job: RunJob, limit_s: float, *, only: str | None = None, avoid: Sequence[str] = ()) -> Future[Answer]:
        """Queues a job.

        Args:
            limit_s: seconds after which a worker ends the job's process.
            only: the one worker that may run it; its answer is taken as it is.
            avoid: workers that leave it to others, if there are any.
        """
        task = Task(replace(job, probe=probe.draw(job.conv)), limit_s, only, avoid=set(avoid))
        with self._lock:
            if self._closing or self._failure is not None:
                task.future.set_exception(self._failure or FleetError("the fleet was closed."))
            else:
                self._tasks.append(task)
                self._review()
                self._lock.notify_all()
        return task.future

    def call(self, job: RunJob, limit_s: float) -> list[Outcome]:
        """The outcomes of a job.

        Raises:
            WorkerError: the job's process failed. FleetError: there is no worker any more.
        """
        return self.submit(job, limit_s).result().outcomes()

    def _may(self, name: str, task: Task) -> bool:
        return task.only == name if task.only is not None else name not in task.avoid

    def _review(self) -> None:
        """Settles tasks that no connected worker may run. Called with the lock held whenever tasks or workers have changed."""
        for task in list(self._tasks):
            if any(self._may(name, task) for name in self._links):
                continue
            if task.only is not None:
                self._tasks.remove(task)
                task.future.set_exception(FleetError(f"the worker {task.only} is gone."))
            elif task.verdict is not None:
                self._tasks.remove(task)
                task.future.set_result(task.verdict)
            elif self._links:
                task.avoid.clear()

    def _fail(self, error: Exception) -> None:
        """Fails all that waits. Called with the lock held."""
        self._failure = self._failure or error
        for task in (*self._tasks, *self._running.values()):
            if not task.future.done():
                task.future.set_exception(error)
        self._tasks.clear()

    # --- workers -------------------------------------------------------------------------------------------------

    def _recruit(self) -> None:
        """Takes free workers from the tracker for as long as the fleet is open."""
        tracker: Tracker | None = None
        try:
            while not self._closing:
                try:
                    if tracker is None:
                        tracker = Tracker(self.where)
                        tracker.request(self._key)
                    found = tracker.granted(_POLL_S)
                    if found is not None:
                        tracker.request(self._key)
                        self._connect(*found)
                except TrackerError as error:
                    _log.warning("%s Connected workers go on.", error)
                    if tracker is not None:
                        tracker.close()
                    tracker = None
                    time.sleep(1.0)
                self._watch()
        except Exception as error:
            with self._lock:
                self._fail(error)
                self._lock.notify_all()
        finally:
            if tracker is not None:
                tracker.close()

    def _watch(self) -> None:
        """Ends the run if there has been no worker for too long."""
        with self._lock:
            if self._links:
                self._lonely = time.monotonic()
            elif time.monotonic() - self._lonely > self.wait_s:
                self._fail(FleetError(self._nobody(self._key)))
                self._lock.notify_all()

    def _connect(self, host: str, port: int, match_key: str) -> None:
        """Takes a worker in, or refuses it."""
        name = f"{host}:{port}"
        try:
            check_reach(host, self.secret, f"the worker {name}")
            sock = socket.create_connection((host, port), GREETING_S)
        except (OSError, SecretError) as error:
            self._refuse(name, str(error))
            return
        keep_alive(sock)
        try:
            channel = greet(sock, self._key, match_key, self.secret, ANSWER_BYTES)
        except ChannelError as error:
            sock.close()
            self._refuse(name, str(error))
            return
        try:
            head, _ = channel.receive(GREETING_S)
            device, limits = Facts.read(head)
            self._check_device(name, device)
        except (ChannelError, MessageError) as error:
            self._refuse(name, str(error), channel)
            return
        with self._lock:
            if self._closing:
                channel.close()
                return
            self._device = self._device or device
            link = self._links[name] = Link(name, channel, device, limits)
            self.refused.pop(name, None)
            self._review()
            self._lock.notify_all()
        _log.info("worker %s joins.", name)
        thread = threading.Thread(target=self._serve, args=(link,), name=f"im2win-fleet-{name}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _check_device(self, name: str, device: Device) -> None:
        """Raises MessageError for a worker that the fleet has no use for."""
        model = backend_for(device).name
        if self._key.partition("/")[2] != model:
            raise MessageError(f"its device is {model}, and this run's is {self._key.partition('/')[2]}: times of both cannot be compared")
        if self._device is not None and device != self._device:
            here, there = dataclasses.asdict(self._device), dataclasses.asdict(device)
            other = ", ".join(f"{name} {value}, not {here.get(name)}" for name, value in there.items() if value != here.get(name))
            raise MessageError(f"its {model} has other properties than that of this run's first worker ({other})")
        if name in self.dropped:
            raise MessageError(self.dropped[name])

    def _refuse(self, name: str, why: str, channel: Channel | None = None) -> None:
        if channel is not None:
            with contextlib.suppress(ChannelError):
                channel.send({"do": "end", "why": why[:500]})
            channel.close()
        if self.refused.get(name) != why:
            _log.warning("worker %s is refused: %s.", name, why.rstrip("."))
        self.refused[name] = why.rstrip(".")

    def _serve(self, link: Link) -> None:
        """Gives a worker jobs until it fails or the fleet closes."""
        try:
            while (task := self._next(link)) is not None:
                began = time.monotonic()
                try:
                    answer = self._tried(link, task)
                except FaultError as error:
                    self._lost(link, task, error)
                    return
                self.busy_s[link.name] += time.monotonic() - began
                self._settle(link, task, answer)
        except Exception as error:  # a defect of this side, or a library that went away
            with self._lock:
                self._fail(error)
        finally:
            link.channel.close()
            with self._lock:
                self._gone(link)

    def _gone(self, link: Link) -> None:
        """Forgets a connection. Called with the lock held."""
        self._running.pop(link, None)
        if self._links.get(link.name) is link:  # the worker may be back already
            del self._links[link.name]
        self._review()
        self._lock.notify_all()

    def _next(self, link: Link) -> Task | None:
        """The next task for a worker; None if there will be none for it."""
        with self._lock:
            while not self._closing and self._failure is None and link.name not in self.dropped:
                for task in self._tasks:
                    if self._may(link.name, task):
                        self._tasks.remove(task)
                        self._running[link] = task
                        return task
                self._lock.wait()
        return None

    def _tried(self, link: Link, task: Task) -> Answer:
        """A worker's answer to a task, whose outputs were checked here.

        Raises:
            FaultError: the worker failed, or lied.
        """
        try:
            outcomes = link.measure(task.job, task.limit_s, self.silence_s)
        except WorkerError as error:
            if error.killed:
                raise FaultError(f"its process was killed from outside ({error})") from None
            return Answer(error, link.name)
        checked = self._probe(task.job)
        for candidate, outcome in zip(task.job.candidates, outcomes, strict=True):
            if outcome.outcome == "ok" and (wrong := checked.wrong(task.job.probe, outcome.probed, candidate.accuracy)) is not None:
                raise LieError(f"it calls a candidate right, and {wrong}")
        return Answer(outcomes, link.name)

    def _probe(self, job: RunJob) -> probe.Probe:
        """What outputs of a job's problem are checked with: of one problem at a time, since its tensors are large."""
        key = job.conv, job.seed
        with self._probing:
            if key not in self._probes:
                self._probes.clear()
                self._probes[key] = probe.Probe(job.conv, job.seed, backend_for(self.device).target)
            return self._probes[key]

    def _lost(self, link: Link, task: Task, error: FaultError) -> None:
        """Puts the job of a worker that failed back into the queue: behind the others, if it may be what the worker was lost by."""
        with self._lock:
            if self._closing:
                return
            if isinstance(error, UnfitError):
                self.dropped[link.name] = self.refused[link.name] = str(error).rstrip(".")
                _log.warning("worker %s is dropped: %s.", link.name, self.dropped[link.name])
            else:
                if not isinstance(error, LieError):
                    task.by_chance = task.by_chance if task.deaths else self.by_chance
                    task.deaths.add(link.name)
                self._fault(link.name, str(error).rstrip("."))
            if not task.future.done() and len(task.deaths) >= MOST_FAULTS + self.by_chance - task.by_chance:
                why = f"{counted(len(task.deaths), 'worker')} failed with it, the last one since {error}"
                task.future.set_result(Answer(WorkerError("crashed", why, killed=True), link.name))
            elif not task.future.done():
                task.avoid.add(link.name)
                self._tasks.insert(len(self._tasks) if task.deaths else 0, task)
            self._gone(link)

    def _fault(self, name: str, why: str) -> None:
        self.faults[name] += 1
        dropped = ""
        if self.faults[name] >= MOST_FAULTS:
            self.dropped[name] = f"it was dropped after {counted(self.faults[name], 'fault')}, the last one: {why}"
            dropped = " It is dropped."
        _log.warning("worker %s failed (%d of %d): %s; its job goes to another one.%s", name, self.faults[name], MOST_FAULTS, why, dropped)

    def _settle(self, link: Link, task: Task, answer: Answer) -> None:
        """Takes an answer, or has a second worker confirm what speaks against a candidate."""
        with self._lock:
            self._running.pop(link, None)
            self.done[link.name] += 1
            if task.future.done():
                return
            if answer.verdict and task.only is None and task.verdict is None:
                task.verdict = answer
                task.avoid.add(link.name)
                self._tasks.insert(0, task)
                self._review()
                self._lock.notify_all()
                return
            if task.verdict is not None and not answer.verdict:
                self._fault(task.verdict.worker, f"it says {task.verdict.why}, and another worker finds nothing")
                self._lock.notify_all()
            self.by_chance += 0 if answer.verdict else len(task.deaths)
            task.future.set_result(answer)


def gathered(
    tracker: str, key: str, device: str | None, target: str, threads: int | None, secret_file: str | os.PathLike[str] | None
) -> Fleet:
    """The fleet for a run's arguments, which `im2win.tune` describes.

    Raises:
        ValueError: `threads` is given, or the workers' device is not of `target`. Others as `Fleet` and `read_secret`.
    """
    if threads is not None:
        raise ValueError(f"`threads` (={threads!r}) is what each worker is started with (`im2win worker --threads`), not the tuner.")
    check_target(target)
    fleet = Fleet(tracker, key, device=device, secret=read_secret(secret_file))
    if (found := backend_for(fleet.device).target) != target:
        fleet.close()
        raise ValueError(f"`target` (={target!r}) must be {found!r}, which the workers of key {key!r} are for.")
    return fleet
