"""A worker: it offers itself at a tracker and measures what one tuner at a time sends, each job in a process with a time limit."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import select
import socket
import time
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from im2win.common.temporary import TemporaryFolder
from im2win.common.worker_pool import Worker, WorkerError
from im2win.registry.backends import Device, backend_for, device_for
from im2win.tuner.fleet.messages import Facts, Limits, MessageError, answer_message, read_job
from im2win.tuner.fleet.secret import check_reach
from im2win.tuner.fleet.tracker import Tracker, TrackerError, checked_key
from im2win.tuner.fleet.wire import Channel, ChannelError, TooLargeError, new_match_key, welcome
from im2win.tuner.runners.cpu import Outcome, RunJob

_log = logging.getLogger("im2win")

BUSY_S = 2.0  # seconds between signs of life while a job runs
IDLE_S = 3600.0  # a tuner that asks for nothing so long is let go
PING_S = 2.0  # seconds between looks at the tracker
UNUSED_S = 6.0  # a match key that was handed out and not used for so long is replaced
AWAY_S = 5.0  # pause before a tracker that is away is tried again, and after a tuner that has no use for this worker
_KEEP_ALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}


class _End(Exception):
    """The tuner needs this worker no more; the text says why."""


def worker_key(key: str, device: Device) -> str:
    """The key of a worker at the tracker: the user's, and the device's model, so that no tuner gets two models."""
    return f"{checked_key(key)}/{backend_for(device).name}"


def keep_alive(sock: socket.socket) -> None:
    """Lets the system notice within a minute that the other machine is gone."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEP_ALIVE.items():
        if hasattr(socket, name):  # Linux
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def on_device(name: str, threads: int | None = None) -> tuple[Device, dict[str, str]]:
    """The device of a name ("cpu", "cuda" or "cuda:N"), and the environment of a process that measures on it and on no other.

    Call it before anything uses CUDA: this process, too, sees only that GPU from then on.

    Raises:
        ValueError: another name, or `threads` for a GPU. NoGpuError: there is no such GPU.
    """
    kind, _, number = name.partition(":")
    if kind not in ("cpu", "cuda") or (number and not number.isdecimal()) or (kind == "cpu" and ":" in name):
        raise ValueError(f"`device` (={name!r}) must be cpu, cuda or cuda:N.")
    if kind == "cuda":
        visible = [one for one in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if one]
        place = int(number or 0)
        if visible and place >= len(visible):
            raise ValueError(f"`device` (={name!r}) must be one of the {len(visible)} GPUs that CUDA_VISIBLE_DEVICES names.")
        os.environ["CUDA_VISIBLE_DEVICES"] = visible[place] if visible else str(place)
    device = device_for(kind, threads)
    environment = {"CUDA_VISIBLE_DEVICES": os.environ["CUDA_VISIBLE_DEVICES"]} if kind == "cuda" else {}
    return device, environment if kind == "cuda" else backend_for(device).measurement_slots()[0]


class Server:
    """A worker for one device.

    Args:
        device: what it measures on.
        key: of the workers that a tuner asks the tracker for.
        tracker: host and port of the tracker.
        host: the address to listen on.
        port: the port; 0 for any that is free.
        secret: what tuners must know; empty for none, on loopback only.
        limits: on what it takes and does.
        environment: of the process that measures, beside this one's; that of the device's first slot by default.
        runner: the module of that process; the device's own by default.

    Raises:
        SecretError: `host` lies beyond loopback and there is no secret.
        OSError: the address cannot be listened on.
    """

    def __init__(
        self, device: Device, key: str, tracker: tuple[str, int], *, host: str = "127.0.0.1", port: int = 0, secret: bytes = b"",
        limits: Limits | None = None, environment: dict[str, str] | None = None, runner: str | None = None,
    ) -> None:  # fmt: skip
        check_reach(host, secret, "`host`")
        backend = backend_for(device)
        self.key, self.tracker, self.secret, self.limits = worker_key(key, device), tracker, secret, limits or Limits()
        self._facts = Facts.of(device, self.limits)
        environment = backend.measurement_slots()[0] if environment is None else environment
        self._child = Worker(runner or backend.runner, environment, torch=backend.target == "cuda")
        self._folder = TemporaryFolder("worker")
        self._problem: tuple[Any, int] | None = None
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        self._listener = socket.socket(family, socket.SOCK_STREAM)
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._listener.bind((host, port))
        self._listener.listen(4)
        self.port = int(self._listener.getsockname()[1])
        self._announced = None if host in ("0.0.0.0", "::") else host  # None: the address that the tracker sees

    def close(self) -> None:
        """Ends the process that measures, and removes what was uploaded."""
        self._child.close()
        self._listener.close()
        self._folder.cleanup()

    def serve(self) -> None:
        """Serves tuners one after the other, for ever. A tracker that is away is waited for."""
        tracker: Tracker | None = None
        while True:
            try:
                if tracker is None:
                    tracker = Tracker(self.tracker)
                    tracker.announce(self.key, self._announced, self.port)
                channel = self._next_tuner(tracker)
            except TrackerError as error:
                _log.warning("%s Trying again.", error)
                if tracker is not None:
                    tracker.close()
                tracker = None
                time.sleep(AWAY_S)
                continue
            with contextlib.closing(channel):
                self._serve_tuner(channel)
            self._child.close()  # what one tuner sent may have changed the process that the next one's jobs would run in

    def _next_tuner(self, tracker: Tracker) -> Channel:
        """Offers this worker until a tuner that knows the secret has come.

        Raises:
            TrackerError: the tracker is gone.
        """
        match_key, handed_out = new_match_key(self.key), 0.0
        tracker.offer(self.key, self._announced, self.port, match_key)
        while True:
            if not select.select([self._listener], [], [], PING_S)[0]:
                handed_out = 0.0 if tracker.pending(match_key) else handed_out or time.monotonic()
                if handed_out and time.monotonic() - handed_out > UNUSED_S:
                    match_key, handed_out = new_match_key(self.key), 0.0
                    tracker.offer(self.key, self._announced, self.port, match_key)
                continue
            sock, peer = self._listener.accept()
            try:
                keep_alive(sock)
                return welcome(sock, self.key, match_key, self.secret, self.limits.upload_bytes)
            except (ChannelError, OSError) as error:
                sock.close()
                _log.warning("refused %s: %s.", peer[0], error)

    def _serve_tuner(self, channel: Channel) -> None:
        """Runs a tuner's jobs until it leaves."""
        _log.info("a tuner has come.")
        try:
            channel.send(dataclasses.asdict(self._facts))
            while True:
                self._serve_message(channel, *channel.receive(IDLE_S))
        except TooLargeError as error:
            with contextlib.suppress(ChannelError):
                channel.send({"refused": f"{error}"})
            _log.warning("let a tuner go: %s.", error)
        except ChannelError as error:
            _log.info("a tuner has gone: %s.", error)
        except _End as error:
            _log.info("a tuner has gone: %s.", str(error).rstrip(".") or "it is done")
            time.sleep(AWAY_S if str(error) else 0)

    def _serve_message(self, channel: Channel, head: dict[str, Any], blobs: list[bytes]) -> None:
        """Does what a message asks for, and answers."""
        if head.get("do") == "end":
            raise _End(str(head.get("why", ""))[:500])
        try:
            if head.get("do") != "measure":
                raise MessageError("`do` must be measure or end.")
            job, limit_s = read_job(head, blobs, Path(self._folder.name), self.limits)
        except MessageError as error:
            channel.send({"refused": str(error)})
            return
        try:
            outcomes = self._measured(channel, job, limit_s)
        except WorkerError as error:
            channel.send({"failed": error.kind, "message": str(error), "killed": error.killed})
            return
        finally:
            for candidate in job.candidates:
                candidate.path.unlink(missing_ok=True)
        channel.send(*answer_message(outcomes))

    def _measured(self, channel: Channel, job: RunJob, limit_s: float) -> list[Outcome]:
        """Runs a job; once more where its process was killed from outside."""
        self._forget(job)
        for last in (False, True):
            self._child.submit(job)
            try:
                return self._awaited(channel, limit_s)
            except WorkerError as error:
                if last or not error.killed:
                    raise
        raise AssertionError

    def _forget(self, job: RunJob) -> None:
        """Removes the expected output of another problem."""
        if self._problem not in (None, (job.conv, job.seed)):
            for path in Path(self._folder.name).glob("expected-*"):
                path.unlink(missing_ok=True)
        self._problem = job.conv, job.seed

    def _awaited(self, channel: Channel, limit_s: float) -> list[Outcome]:
        """The outcomes of the job that runs, with signs of life to the tuner meanwhile.

        Raises:
            WorkerError: its process died, or took longer than `limit_s` and was ended.
            ChannelError: the tuner is gone. The process was ended.
        """
        deadline = time.monotonic() + limit_s
        try:
            while True:
                left = deadline - time.monotonic()
                ready = wait([self._child.results, channel], min(BUSY_S, max(left, 0.0)))  # type: ignore[list-item]
                if self._child.results in ready:
                    outcomes: list[Outcome] = self._child.result(max(left, 1.0))
                    return outcomes
                if ready:
                    raise ChannelError("it left, or spoke, while its job ran")
                if left <= 0:
                    raise self._child.overdue(limit_s)
                channel.send({"busy": True})
        except ChannelError:
            self._child.close()
            raise
