"""Batch build: selects algorithm and tile for many layers, and compiles the operators that the cache lacks, on all CPUs.

Worker processes do both. The process that asks reads what they selected, and needs TVM's compiler only where they fail.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from im2win.builder.cache import Artefacts, artefact_name
from im2win.builder.selections import Question, Selection, Selections
from im2win.common.locking import LogError
from im2win.common.messages import brief
from im2win.common.progress import Reporter
from im2win.common.temporary import TemporaryFolder, temporaries_in
from im2win.common.worker_pool import Worker, WorkerError, as_ready, compiles_only, serve
from im2win.device.cpu import Machine, usable_cpus
from im2win.device.gpu import Gpu
from im2win.records.tiers import NO_RECORD, TUNED, Untuned, tier_for
from im2win.spec.accuracy import Accuracy
from im2win.spec.conv2d import Conv2d

if TYPE_CHECKING:
    from im2win.records.judge import DefaultOf
    from im2win.registry.backends import Device

_log = logging.getLogger("im2win")
DEFAULT = "default tile"  # the choice where no tier of the look-up has a record
LEAST = 4  # fewer operators are not worth worker processes, which take seconds to start
_BUILD_S = 300.0
_NEEDED = ("im2win.builder.build", "im2win.records.lookup", "im2win.registry.ranking")  # by a worker process, which import TVM's compiler


class _UnrankedError(Exception):
    """A default tile that must be ranked first, which a worker process does."""


@dataclass(frozen=True)
class Choice:
    """The selection for a layer.

    Attributes:
        algorithm: algorithm and schedule in one word; "" if the layer gets no operator, for the reason in `tier`.
        tile: the schedule's tile.
        tier: tier of the look-up, or `DEFAULT`.
    """

    algorithm: str
    tile: Any
    tier: str


@dataclass(frozen=True)
class Chooser:
    """Arguments of the look-up of layers, as a plain value that can be sent to another process.

    Args:
        folder: of the artefact cache.
        logs, accuracy: as for `im2win.build`.
        untuned: what layers get without a tuning record of this device: "default", the default tile, or "keep", no operator.
    """

    folder: Path
    logs: Any = None
    accuracy: Accuracy = "float32"
    untuned: Untuned = "default"

    def choose(self, conv: Conv2d, device: Device) -> Choice:
        """Algorithm and tile for a layer.

        Raises:
            ValueError: no algorithm supports the layer, or none has a legal tile for it.
        """
        default = Artefacts(self.folder).default_choice
        return self._known(conv, device, default) or Choice(*default(conv, device, self.accuracy), DEFAULT)

    def select(self, conv: Conv2d, device: Device) -> Selection:
        """The selection for a layer, kept from before or else made and kept."""
        kept, question = self.selections(device), self.question(conv)
        found = kept.find(question)
        if found is None:
            found = self.selected(conv, device)
            kept.keep({question: found})
        return found

    def selected(self, conv: Conv2d, device: Device) -> Selection:
        """The selection for a layer, made anew. A layer that no algorithm supports gets no operator, for that reason."""
        try:
            choice = self.choose(conv, device)
        except LogError:
            raise
        except ValueError as error:
            return Selection("", {}, str(error), "")
        if not choice.algorithm:
            return Selection("", {}, choice.tier, "")
        tile = choice.tile.as_dict()
        return Selection(choice.algorithm, tile, choice.tier, artefact_name(conv, choice.algorithm, tile, device))

    def selections(self, device: Device) -> Selections:
        """The kept selections of a device."""
        return Selections(self.folder, device, self.logs)

    def question(self, conv: Conv2d) -> Question:
        """What is asked for a layer."""
        return Question(conv, self.accuracy, self.untuned)

    def _cached_default(self, conv: Conv2d, device: Device, accuracy: Accuracy) -> tuple[str, Any]:
        """The cached default tile of a layer; _UnrankedError if there is none."""
        kept = Artefacts(self.folder).kept_default(conv, device, accuracy)
        if kept is None:
            raise _UnrankedError(str(conv))
        return kept

    def _known(self, conv: Conv2d, device: Device, default: DefaultOf) -> Choice | None:
        """The choice if a record or a cached default gives it; None where the analytic model must rank tiles first, which takes time.

        Args:
            default: the default tile of a layer whose records do not say how they stand against it.
        """
        from im2win.records.lookup import search
        from im2win.registry.backends import backend_for
        from im2win.registry.schedules import candidates, schedule_of

        backend = backend_for(device, self.accuracy)
        names = [row.key for row in candidates("auto", conv, backend.target, self.accuracy)]
        found = search(conv, device, names, self.logs, self.accuracy, default)
        record = found.record
        tier = tier_for(conv, found.tier, record.conv2d if record else None)
        if self.untuned == "keep" and tier not in TUNED:
            return Choice("", None, NO_RECORD)
        if record is not None:
            return Choice(record.method, backend.tile(schedule_of(record.method), record.tile), tier)
        kept = Artefacts(self.folder).kept_default(conv, device, self.accuracy)
        return None if kept is None else Choice(*kept, DEFAULT)

    def untuned_layer(self, conv: Conv2d, device: Device) -> bool:
        """Whether a layer that im2win computes has no record of its own on the device."""
        try:
            known = self._known(conv, device, self._cached_default)
        except _UnrankedError:  # its records, if any, do not say how they stand against today's default tile
            return True
        except ValueError:  # no operator supports the layer
            return False
        return known is None or known.tier not in TUNED

    def lacks(self, conv: Conv2d, device: Device, kept: Selections | None = None) -> bool:
        """Whether a worker process has something to do for a layer: to select its operator, or to compile it.

        Args:
            kept: the kept selections of the device, where the caller has read them.
        """
        found = (kept or self.selections(device)).find(self.question(conv))
        if found is None:
            return True
        return bool(found.algorithm) and not Artefacts(self.folder).path(found.name, device).exists()


@dataclass(frozen=True)
class Job:
    """Put the operator of a layer into the cache."""

    chooser: Chooser
    conv: Conv2d
    device: Device


def build(job: Job) -> tuple[int, Selection] | str:
    """The number of operators that were compiled for a job, and the selection; or the reason why the build failed."""
    try:
        selection, cache = job.chooser.selected(job.conv, job.device), Artefacts(job.chooser.folder)
        if selection.algorithm:
            with TemporaryFolder("build") as folder, temporaries_in(folder):
                cache.selected(selection, job.conv, job.device)
        return cache.built, selection
    except Exception as error:
        return brief(error)


def _answer(job: Job | None) -> tuple[int, Selection] | str | Machine:
    """What a worker process answers: to None, what it knows of the CPU."""
    return Machine.host() if job is None else build(job)


def main(job_fd: int, result_fd: int) -> None:
    """Entry point of the worker process, which imports what it needs before it is asked."""
    for name in _NEEDED:
        importlib.import_module(name)
    compiles_only()
    serve(_answer, job_fd, result_fd)


class Builders:
    """Worker processes for `build_ahead`. They start when first needed.

    Args:
        processes: how many at most; None: as many as CPUs may be used.
    """

    def __init__(self, processes: int | None = None) -> None:
        self._most = processes or usable_cpus()
        self._workers: list[Worker] = []
        self._torch = False

    def __enter__(self) -> Builders:
        return self

    def __exit__(self, *reason: object) -> None:
        self.close()

    def workers(self, count: int, *, torch: bool = False) -> list[Worker]:
        """At most `count` processes; `torch` as for `Worker`."""
        if torch and not self._torch:
            self.close()
            self._torch = True
        while len(self._workers) < min(count, self._most):
            self._workers.append(Worker(__name__, {"OMP_NUM_THREADS": "1"}, torch=self._torch))
        return self._workers[:count]

    def host(self) -> Machine:
        """`Machine.host`, asked by one of the processes while all of them start."""
        workers = self.workers(self._most)
        for worker in workers:
            worker.start()
        try:
            machine: Machine = workers[0].call(None, _BUILD_S)
        except WorkerError:
            return Machine.host()  # which says what is wrong
        return machine

    def close(self) -> None:
        """Ends the processes."""
        for worker in self._workers:
            worker.close()
        self._workers.clear()


def build_ahead(
    chooser: Chooser, layers: Sequence[tuple[Conv2d, Device]], builders: Builders | None = None, reporter: Reporter | None = None
) -> int:
    """Compiles the operators of layers in parallel, so that later builds find them in the cache. Returns how many were compiled.

    A layer whose build fails here fails again, with its reason, where its operator is requested.

    Args:
        layers: layers with their devices.
        builders: whose processes build; they are ended.
        reporter: shows which operators are ready.
    """
    with builders or Builders() as builders:
        if len(layers) < LEAST or not _keeps(chooser.folder):
            return 0
        kept = {device: chooser.selections(device) for _, device in layers}
        wanted = [Job(chooser, conv, device) for conv, device in dict.fromkeys(layers) if chooser.lacks(conv, device, kept[device])]
        if len(wanted) < LEAST:
            return 0
        workers = builders.workers(len(wanted), torch=any(isinstance(job.device, Gpu) for job in wanted))
        made: dict[Device, dict[Question, Selection]] = {device: {} for device in kept}
        built = 0
        try:
            for done, (place, answer) in enumerate(as_ready(workers, wanted, _BUILD_S), 1):
                job = wanted[place]
                if reporter is not None:
                    reporter.step(note=f"building, {done} of {len(wanted)} operators are ready")
                if isinstance(answer, tuple):
                    built += answer[0]
                    made[job.device][chooser.question(job.conv)] = answer[1]
                else:
                    _log.info("%s: %s", job.conv, answer)
            return built
        finally:
            for device, selections in kept.items():
                selections.keep(made[device])


def _keeps(folder: Path) -> bool:
    """Whether other processes can write operators to the folder."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK)
