"""Which layers of an earlier run need not be timed again: those of the same kernels against the same peers on the same device.

Ratios hold inside a row, whose subjects are timed in interleaved rounds, so rows of several runs make one result. A row that is kept says
when it was measured, and by which source.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from im2win.bench.confirmation import checked
from im2win.bench.results import Result, ResultError, Row, slower_choices
from im2win.bench.source import SOURCE
from im2win.registry.backends import Device
from im2win.spec.accuracy import Accuracy
from im2win.spec.suites import Layer

OF_THE_HOST = ("im2win", "python", "system")  # versions that a row's ratios do not depend on


def kept(
    before: Result, run: Result, layers: Sequence[Layer], device: Device, *,
    accuracy: Accuracy, peers: Collection[str], untuned: bool, logs: Path | None = None, algorithm: str = "auto",
) -> dict[int, Row]:
    """The rows of an earlier run that this one need not measure, by position in `layers`.

    A layer is measured again where another kernel is chosen or generated today, or another default tile; where im2win failed, a peer is
    missing or the default tile was not timed and now is; and where the choice was slower than the default tile.

    Args:
        run: the result of this run, still without rows.
        peers: names of the peers that this run times. A peer that failed counts as timed.
        untuned: whether this run times the default tile.
        logs, algorithm: as in `im2win.bench.cpu.run`.

    Raises:
        ResultError: the earlier run was of other layers, on another device, or with other versions of the libraries.
    """
    _check_same(before, run)
    known = {(row.layer, row.conv): row for row in before.layers}
    made = before.confirmed or before.digests
    found: dict[int, Row] = {}
    for place, layer in enumerate(layers):
        row = known.get((layer.name, str(layer.conv)))
        if row is None or not made or not _complete(row, peers, untuned):
            continue
        one = checked(row, device, accuracy, made, logs, algorithm)
        if not one.reason and not slower_choices([one.row]):
            date, source = row.date or before.date, row.source or before.digests[SOURCE]
            found[place] = dataclasses.replace(one.row, date=date, source=source)
    return found


def highest_ceilings(before: Result, run: Result) -> dict[str, float]:
    """The higher of both runs' ceilings: measuring an upper bound may fall short of it, and no row of either run is to be above it."""
    return {name: max(value, before.ceilings.get(name, value)) for name, value in run.ceilings.items()}


def in_order(rows: Mapping[int, Row]) -> list[Row]:
    """Rows by position, the kept ones among the measured ones."""
    return [rows[place] for place in sorted(rows)]


def _complete(row: Row, peers: Collection[str], untuned: bool) -> bool:
    timed = row.failed is None and row.ours_ms is not None and (row.untuned_ms is not None or not untuned)
    return timed and set(peers) <= {*row.peers, *row.peers_failed}


def _check_same(before: Result, run: Result) -> None:
    facts = {name: (getattr(before, name), getattr(run, name)) for name in ("suite", "dtype", "batch", "device", "threads")}
    libraries = sorted({*before.versions, *run.versions} - set(OF_THE_HOST))
    facts |= {f"versions[{name}]": (before.versions.get(name), run.versions.get(name)) for name in libraries}
    for name, (then, now) in facts.items():
        if then != now:
            raise ResultError(f"the file to resume was measured with {name} (={then!r}), this run has {now!r}; leave out --resume.")
