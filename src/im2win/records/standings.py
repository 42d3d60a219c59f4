"""How a log's records stand against today's default tiles, layer by layer, and the part of a proof that lists it."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, get_args

from im2win.common.files import replace_text
from im2win.device.cpu import Machine
from im2win.device.gpu import KNOWN
from im2win.records.judge import Judge
from im2win.records.log import Log, best_first
from im2win.records.lookup import accepting, superseded
from im2win.records.merit import Standing
from im2win.records.proofs import FILE, Choices, Proof, current_proof, facts
from im2win.registry.backends import Device, backend_for
from im2win.registry.schedules import candidates
from im2win.registry.sources import choice_digest
from im2win.spec.accuracy import Accuracy
from im2win.spec.conv2d import Conv2d

ACCURACIES: tuple[Accuracy, ...] = get_args(Accuracy)
_REGISTERS = {16: ("avx512f", 32), 8: ("avx2", 16), 4: ("neon", 32)}  # by the lanes of the records' vectors
_CACHES = 48 << 10, 2 << 20, 32 << 20  # bytes of a CPU of which nobody has said them


@dataclasses.dataclass(frozen=True)
class Layer:
    """The standing of a layer's best record for an accuracy; `records` counts the layer's."""

    conv: Conv2d
    accuracy: Accuracy
    standing: Standing
    records: int


def device_of(log: Log, name: str) -> Device | None:
    """The device whose records a folder holds; None for an unknown GPU.

    A CPU that is not this machine's has the numbers that its proof states. Without one they are estimated: the look-up uses a list of
    standings only on a machine with the same numbers.
    """
    if name in KNOWN:
        return KNOWN[name]
    found = re.fullmatch(r"(.+)-([^-]+)-(\d+)t", name)
    records = [record for conv in log.convs(name) for record in log.read(conv, name)]
    if found is None or not records or records[0].target != "cpu":
        return None
    host = dataclasses.replace(Machine.host(), threads=int(found[3]))
    if host.name == name:
        return host
    stated = _proof(log, name)
    if stated is not None and stated.choices is not None:
        return Machine(brand=found[1], mcpu=found[2], isa="", **stated.choices.device)
    lanes = max(int(record.tile.get("lanes", 0)) for record in records)
    isa, registers = _REGISTERS.get(lanes, ("", 16))
    return Machine(found[1], found[2], isa, int(found[3]), lanes, registers, *_CACHES)


def _proof(log: Log, name: str) -> Proof | None:
    """The proof of a device, out of date or not."""
    try:
        return Proof.from_text((log.folder / name / FILE).read_text(encoding="utf-8"))
    except OSError:
        return None


def of_layer(log: Log, device: Device, conv: Conv2d, accuracy: Accuracy, *, anew: bool = False) -> Layer | None:
    """The standing of a layer's best record; None if no record applies. `anew`: as `Judge.standing`."""
    backend = backend_for(device, accuracy)
    try:
        names = [row.key for row in candidates("auto", conv, backend.target, accuracy)]
    except ValueError:
        return None
    records, accepts = log.read(conv, backend.name), accepting(device, names, [log], accuracy)
    here = [one for one in records if (one.target, one.threads) == (backend.target, backend.threads)]
    best = next((one for one in best_first(here) if not superseded(one, records) and accepts(one) is None), None)
    if best is None:
        return None
    found = Judge(device, accuracy, None, accepts).standing(best, records, log, anew=anew)
    return Layer(conv, accuracy, found, len(records))


def _anew(folder: Path, device: Device, what: tuple[Conv2d, Accuracy]) -> Layer | None:
    return of_layer(Log(folder), device, *what, anew=True)


def stamp(
    log: Log,
    name: str,
    *,
    accuracies: Sequence[Accuracy] = ACCURACIES,
    processes: int = 1,
    anew: bool = True,
    progress: Callable[[int, int], Any] = lambda done, of: None,
) -> list[Layer]:
    """Evaluates the standings of a device's layers and writes them into its proof. Kernels' part of the proof stays as it is.

    Every layer's space is ranked, which takes up to some seconds a layer and accuracy. Standings for other accuracies stay, if they are
    up to date.

    Args:
        anew: False believes the proof of layers that have as many records as it says, if it is up to date.

    Raises:
        ValueError: the device's kernels have no current proof, or its numbers are unknown.
        OSError: the proof cannot be written.
    """
    device, proof = device_of(log, name), current_proof(log.folder / name)
    if device is None or proof is None or not proof.current():
        what = "the device is an unknown GPU" if device is None else "its kernels have no current proof"
        raise ValueError(f"standings of `device` (={name}) cannot be listed: {what}.")
    before = proof.choices.layers if proof.choices is not None and proof.choices.about(device) else {}
    listed = {} if anew else before
    kept = {(conv, accuracy): _kept(conv, accuracy, listed, log, name) for conv in log.convs(name) for accuracy in accuracies}
    jobs = [what for what, one in kept.items() if one is None]
    work, found = functools.partial(_anew, log.folder, device), [one for one in kept.values() if one is not None]
    with ProcessPoolExecutor(processes) as pool:
        for done, one in enumerate(pool.map(work, jobs) if processes > 1 else map(work, jobs), 1):
            found += [one] if one else []
            progress(done, len(jobs))
    layers = {what: one for what, one in before.items() if what[1] not in accuracies}
    layers |= {(str(one.conv), one.accuracy): (*dataclasses.astuple(one.standing), one.records) for one in found}
    choices = Choices(choice_digest(proof.target), facts(device), layers)
    replace_text(log.folder / name / FILE, dataclasses.replace(proof, choices=choices).to_text())
    return found


def _kept(conv: Conv2d, accuracy: Accuracy, listed: Mapping[tuple[str, str], tuple[Any, ...]], log: Log, name: str) -> Layer | None:
    """A listed standing that is up to date; None if it is not."""
    *standing, count = listed.get((str(conv), accuracy), ("", "", None, -1))
    return Layer(conv, accuracy, Standing(*standing), count) if count == len(log.read(conv, name)) else None


def unmet(log: Log, name: str, accuracy: Accuracy = "float32") -> Iterator[Layer]:
    """The layers of a device whose records are but hints, by proof or else evaluated; none of an unknown GPU."""
    device = device_of(log, name)
    for conv in log.convs(name) if device is not None else ():
        found = of_layer(log, device, conv, accuracy) if device is not None else None
        if found is not None and found.standing.reason is not None:
            yield found
