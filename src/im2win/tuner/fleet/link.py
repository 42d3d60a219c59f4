"""A worker that is connected to a tuner: it is sent jobs one at a time, and its answers are read by rules."""

from __future__ import annotations

import time

from im2win.common.worker_pool import WorkerError
from im2win.registry.backends import Device
from im2win.tuner.fleet.messages import Limits, MessageError, job_message, read_answer
from im2win.tuner.fleet.wire import Channel, ChannelError
from im2win.tuner.runners.cpu import Outcome, RunJob

GRACE_S = 10.0  # seconds beyond a job's limit; the worker itself ends the job's process at the limit


class FaultError(RuntimeError):
    """What a worker did wrong; its job's result does not count."""


class LieError(FaultError):
    """An answer that is not true, or none."""


class UnfitError(FaultError):
    """A worker whose limits are too low for the job."""


class Link:
    """A connected worker."""

    def __init__(self, name: str, channel: Channel, device: Device, limits: Limits) -> None:
        self.name, self.channel, self.device, self.limits = name, channel, device, limits

    def measure(self, job: RunJob, limit_s: float, silence_s: float) -> list[Outcome]:
        """The outcomes of a job.

        Raises:
            WorkerError: the job's process failed there.
            FaultError: the worker is gone, silent, too slow, or breaks the protocol.
        """
        libraries = [one.path.read_bytes() for one in job.candidates]
        if (size := sum(map(len, libraries))) > self.limits.upload_bytes:
            raise UnfitError(f"it takes {self.limits.upload_bytes} bytes at once, and the job has {size}: give it a higher --upload-limit")
        deadline = time.monotonic() + min(limit_s, self.limits.job_s) + GRACE_S
        try:
            self.channel.send(job_message(job, libraries, limit_s), libraries)
            while True:
                head, blobs = self.channel.receive(min(silence_s, max(deadline - time.monotonic(), 0.0)))
                if "busy" not in head:
                    break
        except ChannelError as error:
            raise FaultError(str(error)) from None
        if "failed" in head:
            kind, message = head["failed"], head.get("message")
            if kind not in ("crashed", "timeout") or not isinstance(message, str):
                raise FaultError("it says that a job failed, and not how")
            raise WorkerError(kind, "".join(one if one.isprintable() else " " for one in message[:500]), killed=head.get("killed") is True)
        if "refused" in head:
            raise UnfitError(f"it refuses the job: {str(head['refused'])[:300]}")
        try:
            return read_answer(head, blobs, job)
        except MessageError as error:
            raise LieError(f"its answer breaks a rule: {error}") from None
