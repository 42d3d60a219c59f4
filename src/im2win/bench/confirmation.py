"""Whether a result file still says what today's source does: the same choices and the same kernels.

Any change of the generator makes a file's digests out of date, though most changes leave most kernels as they were. To confirm a file is to
look its layers up again, with the shipped records and for the file's device, to rank its default tiles again, and to emit their kernels.
Where algorithm, tile and kernel are equal for every row, the times are those of today's kernels, and the file gets today's digests as
`confirmed`. Nothing is measured, and the device is not needed. Where a layer's choice has become its default tile, which the same run timed
beside it, the row takes those times. Of other files see `im2win.studies.confirmation`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from tvm.target import Target, codegen

from im2win.bench.results import OURS, UNTUNED, Result, Row
from im2win.bench.source import RUNTIME, TARGET, digests, same_kernels, stale, timed
from im2win.builder.build import looked_up
from im2win.device.cpu import FEATURES, Machine
from im2win.device.gpu import H200, KNOWN
from im2win.records.emission import EmissionError, emitted
from im2win.records.folders import PACKAGED
from im2win.records.log import Log
from im2win.records.standings import device_of
from im2win.registry.backends import Device
from im2win.registry.ranking import default_tile
from im2win.spec.accuracy import Accuracy
from im2win.spec.conv2d import Conv2d

Choice = tuple[str, dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Checked:
    """A row with the fingerprints of its kernels, and why today's source would time others; "" if it would not."""

    row: Row
    reason: str = ""


def accuracy_of(result: Result) -> Accuracy:
    """The accuracy that a result's layers were built with, from the name of its suite."""
    return next((word for word in get_args(Accuracy) if word in result.accuracy), "float32")


def device_named(name: str) -> Device | None:
    """The device of a result; None if nothing shipped says what it is. A CPU has the instructions that its microarchitecture has."""
    device = device_of(Log(PACKAGED), name)
    if isinstance(device, Machine) and not device.features:  # its records do not state them
        return dataclasses.replace(device, features=_features(device.mcpu))
    return device


def _features(mcpu: str) -> tuple[str, ...]:
    """Instructions for narrow types that every CPU of a microarchitecture has, by LLVM's name of it."""
    known = {str(name) for name in codegen.llvm_get_cpu_features(Target({"kind": "llvm", "mcpu": mcpu}))}
    return tuple(name for name in FEATURES if name in known)


def checked(
    row: Row, device: Device, accuracy: Accuracy, made: Mapping[str, str], logs: Path | None = None, algorithm: str = "auto"
) -> Checked:
    """Compares a row with what today's source chooses and emits for its layer.

    Args:
        made: digests of the source that made the file, or that confirmed it last.
        logs: folder of tuning records; None for the packaged ones.
        algorithm: the algorithm that was asked for, or "auto".
    """
    if row.failed is not None or not row.tile:
        return Checked(row, f"{row.layer}: its kernel is not known")
    if made.get(RUNTIME) != digests(made[TARGET]).get(RUNTIME):
        return Checked(row, f"{row.layer}: other code ran its kernel's loops")
    conv = Conv2d.parse(row.conv)
    name, tile, tier = looked_up(conv, device, logs, algorithm, accuracy)
    row = _with_default(row, (name, tile.as_dict()), tier, device, Log(logs or PACKAGED))
    found = _compared(row.layer, conv, (row.algorithm, row.tile), (name, tile.as_dict()), row.fingerprint, device, made)
    if isinstance(found, str):
        return Checked(row, found)
    if tier != row.tier:
        return Checked(row, f"{row.layer}: its tile came from {row.tier or 'an unknown tier'}, today's from {tier}")
    row = dataclasses.replace(row, fingerprint=found[0])
    if row.untuned_ms is None:
        return Checked(row)
    name, tile = default_tile(conv, algorithm, device, accuracy)
    default = _compared(
        f"{row.layer}, default", conv, (row.untuned_algorithm, row.untuned_tile), (name, tile.as_dict()), row.untuned_fingerprint,
        device, made,
    )  # fmt: skip
    if isinstance(default, str):
        return Checked(row, default)
    return Checked(dataclasses.replace(row, untuned_fingerprint=default[0]))


def _with_default(row: Row, today: Choice, tier: str, device: Device, log: Log) -> Row:
    """A row whose choice of today is the default tile that was timed beside the one of before: with the default tile's times.

    Error and workspace are those of the default tile's record. Other rows, and those without such a record, are returned as they are.
    """
    default = row.untuned_algorithm, row.untuned_tile
    if row.untuned_ms is None or row.ours_ms is None or today == (row.algorithm, row.tile) or today != default or tier != "exact":
        return row
    records = [one for one in log.read(Conv2d.parse(row.conv), device.name) if (one.method, one.tile) == today and one.seconds]
    if not records:
        return row
    slower = row.untuned_ms / row.ours_ms
    return dataclasses.replace(
        row, algorithm=today[0], tile=today[1], tier=tier, fingerprint=row.untuned_fingerprint,
        ours_ms=row.untuned_ms, ratio=row.untuned_ratio,
        spread={**row.spread, OURS: row.spread[UNTUNED]} if UNTUNED in row.spread else row.spread, transform_ms=None,
        gflops=row.gflops and row.gflops / slower, roofline_fraction=row.roofline_fraction and row.roofline_fraction / slower,
        error=records[-1].error, extra_bytes=records[-1].extra_bytes,
    )  # fmt: skip


def _compared(
    what: str, conv: Conv2d, before: Choice, today: Choice, fingerprint: str, device: Device, made: Mapping[str, str]
) -> tuple[str] | str:
    """The fingerprint of a kernel that is chosen today as it was, or the reason why it is another.

    It is emitted only where its method's source has changed since, or where its fingerprint is not known.

    Args:
        before: what was timed.
        fingerprint: of the kernel that was timed; "" if the file does not say.
        made: digests of the source that made the file, or that confirmed it last.
    """
    if before != today:
        return f"{what}: {before[0]} was timed, today it is {today[0]}" if before[0] != today[0] else f"{what}: another tile of {today[0]}"
    same = same_kernels(made, today[0])
    if fingerprint and same:
        return (fingerprint,)
    if not fingerprint and not same:
        return f"{what}: the file does not say which kernel was timed, and the source that made it was another"
    try:
        now = emitted(conv, *today, made[TARGET], KNOWN.get(device.name, H200))
    except EmissionError as error:
        return f"{what}: {error}"
    return (now,) if fingerprint in ("", now) else f"{what}: its kernel has changed since"


def confirmed(result: Result, rows: list[Checked]) -> Result:
    """The result with its rows' fingerprints, and with today's digests if every row was found to be equal."""
    layers = [one.row for one in rows]
    today = digests(result.digests[TARGET])
    if stale(result.digests, timed(result.suite, map(vars, result.layers))) is None:
        return dataclasses.replace(result, layers=layers, confirmed={})
    if any(one.reason for one in rows):
        return dataclasses.replace(result, layers=layers)
    return dataclasses.replace(result, layers=layers, confirmed=today)
