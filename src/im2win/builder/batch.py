"""Operators for many layers at once: which algorithm and tile each gets, and compiling those that the cache lacks, by all CPUs."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from im2win.builder.cache import Artefacts, artefact_name
from im2win.common.messages import brief
from im2win.common.worker_pool import Worker, in_order, serve
from im2win.device.cpu import usable_cpus
from im2win.device.gpu import Gpu
from im2win.records.tiers import NO_RECORD, TUNED, Untuned, rung_for
from im2win.spec.accuracy import Accuracy
from im2win.spec.conv2d import Conv2d

if TYPE_CHECKING:
    from im2win.registry.backends import Device

_log = logging.getLogger("im2win")
DEFAULT = "default tile"  # what no rung of the look-up ladder gives
LEAST = 4  # operators that are worth processes, which take seconds to begin
_BUILD_S = 300.0


@dataclass(frozen=True)
class Choice:
    """What a layer gets.

    algorithm: "" where it gets nothing, for the reason in `rung`.
    rung: of the look-up ladder.
    """

    algorithm: str
    tile: Any
    rung: str


@dataclass(frozen=True)
class Chooser:
    """How layers are looked up; a plain value that another process can be handed.

    Args:
        folder: of artefacts.
        logs, accuracy: as for `im2win.build`.
        untuned: what layers get that no record of this device is about.
    """

    folder: Path
    logs: Any = None
    accuracy: Accuracy = "float32"
    untuned: Untuned = "default"

    def choose(self, conv: Conv2d, device: Device) -> Choice:
        """Algorithm and tile for a layer.

        Raises:
            ValueError: no algorithm supports it, or none has a legal tile for it.
        """
        known = self._known(conv, device)
        return known or Choice(*Artefacts(self.folder).default_choice(conv, device, self.accuracy), DEFAULT)

    def _known(self, conv: Conv2d, device: Device) -> Choice | None:
        """The same as far as it takes no time; None where the model must rank tiles first."""
        from im2win.records.lookup import search
        from im2win.registry.backends import backend_for
        from im2win.registry.schedules import candidates, schedule_of

        backend = backend_for(device, self.accuracy)
        names = [row.key for row in candidates("auto", conv, backend.target, self.accuracy)]
        found = search(conv, device, names, self.logs, self.accuracy)
        record = found.record
        rung = rung_for(conv, found.rung, record.conv2d if record else None)
        if self.untuned == "keep" and rung not in TUNED:
            return Choice("", None, NO_RECORD)
        if record is not None:
            return Choice(record.method, backend.tile(schedule_of(record.method), record.tile), rung)
        kept = Artefacts(self.folder).kept_default(conv, device, self.accuracy)
        return None if kept is None else Choice(*kept, DEFAULT)

    def lacks(self, conv: Conv2d, device: Device) -> bool:
        """Whether an operator must be compiled for a layer."""
        try:
            known = self._known(conv, device)
        except ValueError:  # there is none for it
            return False
        if known is None or not known.algorithm:
            return known is None
        name = artefact_name(conv, known.algorithm, known.tile.as_dict(), device)
        return not Artefacts(self.folder).path(name, device).exists()


@dataclass(frozen=True)
class Job:
    """Have the operator of a layer in the cache."""

    chooser: Chooser
    conv: Conv2d
    device: Device


def build(job: Job) -> int | str:
    """How many operators were compiled for it, or why none could be."""
    try:
        choice, cache = job.chooser.choose(job.conv, job.device), Artefacts(job.chooser.folder)
        if choice.algorithm:
            cache.get(job.conv, choice.algorithm, choice.tile, job.device, tuned=choice.rung == "exact")
        return cache.built
    except Exception as error:
        return brief(error)


def main(job_fd: int, result_fd: int) -> None:
    """Entry of the worker process."""
    serve(build, job_fd, result_fd)


def build_ahead(chooser: Chooser, layers: Sequence[tuple[Conv2d, Device]], processes: int | None = None) -> int:
    """Compiles what layers get, many at a time, so that they are found in the cache afterwards; how many were compiled.

    What fails here fails again, with its reason, where the operator is asked for.

    Args:
        processes: at a time; None: as many as CPUs may be used.
    """
    if len(layers) < LEAST or not _keeps(chooser.folder):
        return 0
    wanted = [Job(chooser, conv, device) for conv, device in dict.fromkeys(layers) if chooser.lacks(conv, device)]
    if len(wanted) < LEAST:
        return 0
    count = min(len(wanted), processes or usable_cpus())
    torch = any(isinstance(job.device, Gpu) for job in wanted)
    workers = [Worker(__name__, {"OMP_NUM_THREADS": "1"}, torch=torch) for _ in range(count)]
    try:
        built = 0
        for job, answer in zip(wanted, in_order(workers, wanted, _BUILD_S), strict=True):
            if isinstance(answer, int):
                built += answer
            else:
                _log.info("%s: %s", job.conv, answer)
        return built
    finally:
        for worker in workers:
            worker.close()


def _keeps(folder: Path) -> bool:
    """Whether what another process builds is found in the folder."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK)
