"""Why a layer gets the kernel that it gets: where the choice is from, what binds it, how far its roof is, and what was passed over.

Nothing is built or timed. Times are those of tuning records of this device; without any there is the cost model's estimate, which ranks
tiles and, on a GPU only, is a time.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from im2win.bench.ceilings import Ceilings
from im2win.device.cpu import Machine
from im2win.device.gpu import Gpu
from im2win.records.folders import Logs
from im2win.records.lookup import accepting, open_logs, search, superseded
from im2win.records.record import Record
from im2win.records.tiers import OLDER, tier_for
from im2win.registry.backends import Device, backend_for
from im2win.registry.ranking import default_tile, ranked_tiles
from im2win.registry.schedules import SCHEDULES, candidates, schedule_of
from im2win.schedules.cuda.model.floor import product_cycles
from im2win.schedules.cuda.model.multistage import LAUNCH_S
from im2win.spec import methods
from im2win.spec.accuracy import Accuracy
from im2win.spec.conv2d import Conv2d

Candidate = tuple[str, tuple[tuple[str, Any], ...]]
"""Algorithm and schedule in one word, and a tile's values by name."""
DEFAULT = "default"  # the tier of the cost model's tile
TIERS = {
    "exact": "a tuning record of this layer on this device",
    "other epilogue": "a tuning record of this layer with another epilogue on this device",
    OLDER: "a tuning record of this layer on this device from before today's default tile, which is not expected to be better",
    "other type": "a tuning record of this layer in its twin type on this device",
    "nearest layer": "a tuning record of a similar layer on this device",
    "compatible device": "a tuning record of this layer on another device",
    DEFAULT: "the cost model: no tuning record applies",
}
CAUSES = {
    "compute": "the multiprocessors' instructions", "product": "the micro-kernel", "cache": "caches", "memory": "memory",
    "transform": "what is stored between kernels", "write_back": "the write-back", "stage": "staging of inputs", "launch": "the launch",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Contender:
    """A kernel for a layer.

    Attributes:
        measured_s: median seconds of a call in its record of this layer on this device; None if there is none.
        expected_s: seconds that the cost model of a GPU expects; None for a CPU, whose model only ranks.
    """

    algorithm: str
    tile: Mapping[str, Any]
    measured_s: float | None
    expected_s: float | None

    @property
    def seconds(self) -> float | None:
        """The best known time of a call."""
        return self.measured_s if self.measured_s is not None else self.expected_s


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What is known of a layer's kernel.

    Attributes:
        tier: of the look-up, a key of `TIERS`.
        date: when the record was made, of the tiers with one.
        default: the tile that the cost model ranks first.
        runner_up: the best kernel of another schedule: measured, or else as the model ranks them. None if no other computes the layer.
        causes: shares of the model's estimate for the chosen tile, by a key of `CAUSES`.
        roofs: least seconds by what would bind: "arithmetic", of direct convolution at the tile's kind of products, and "memory", each
            tensor moved once. Empty where unknown; Winograd, which takes fewer products, has no arithmetic roof.
        refused: reasons why records do not apply, with their number.
        unable: reasons why schedules cannot compute the layer, with their names.
    """

    conv: str
    device: str
    brand: str
    threads: int
    accuracy: Accuracy
    chosen: Contender
    tier: str
    date: str | None
    default: Contender
    runner_up: Contender | None
    causes: Mapping[str, float]
    roofs: Mapping[str, float]
    refused: Mapping[str, int]
    unable: Mapping[str, Sequence[str]]

    @property
    def bound(self) -> str | None:
        """Which roof is highest; None if none is known."""
        return max(self.roofs, key=lambda name: self.roofs[name], default=None)

    @property
    def share(self) -> float | None:
        """The highest roof's time over the kernel's; above 1 where tensors stay in a cache. None if either is unknown."""
        seconds = self.chosen.seconds
        return self.roofs[self.bound] / seconds if self.bound is not None and seconds else None

    def as_dict(self) -> dict[str, Any]:
        """As plain values, with `bound` and `share`."""
        return {**dataclasses.asdict(self), "bound": self.bound, "share": self.share}


def explain(
    conv: Conv2d, device: Device, logs: Logs = None, accuracy: Accuracy = "float32", ceilings: Ceilings | None = None
) -> Explanation:
    """Explains the choice of `im2win.build` for a problem on a device, which need not be this machine's.

    Args:
        ceilings: a CPU's, for its roofs; those of a GPU are known.

    Raises:
        ValueError: no algorithm supports the problem.
    """
    backend = backend_for(device, accuracy)
    rows = candidates("auto", conv, backend.target, accuracy)
    found = search(conv, device, [row.key for row in rows], logs, accuracy)
    default = default_tile(conv, "auto", device, accuracy)
    (name, tile), tier = default, DEFAULT
    if (record := found.record) is not None:
        name, tile = record.method, backend.tile(schedule_of(record.method), record.tile)
        tier = tier_for(conv, found.tier, record.conv2d)
    measured = _measured(conv, device, logs, accuracy)

    def contender(name: str, tile: Any) -> Contender:
        expected = backend.cost(conv, schedule_of(name), tile) if isinstance(device, Gpu) else None
        return Contender(name, tile.as_dict(), measured.get(_candidate(name, tile)), expected)

    chosen = contender(name, tile)
    return Explanation(
        conv=str(conv), device=backend.name, brand=device.brand, threads=backend.threads, accuracy=accuracy, chosen=chosen, tier=tier,
        date=record.date if record is not None else None, default=contender(*default),
        runner_up=_runner_up(conv, device, accuracy, name, measured, contender),
        causes=_causes(conv, device, name, tile), roofs=_roofs(conv, device, name, tile, ceilings),
        refused=dict(Counter(reason for _, reason in found.skipped).most_common()), unable=_unable(conv, backend.target, accuracy),
    )  # fmt: skip


def _candidate(name: str, tile: Any) -> Candidate:
    return name, tuple(sorted(tile.as_dict().items()))


def _measured(conv: Conv2d, device: Device, logs: Logs, accuracy: Accuracy) -> dict[Candidate, float]:
    """Median seconds of every candidate that was measured for this layer on this device and whose kernel is today's."""
    opened, backend = open_logs(logs), backend_for(device, accuracy)
    applies = accepting(device, None, opened, accuracy)
    found: dict[Candidate, float] = {}
    for log in reversed(opened):  # the first log's records are used before those of others
        records = log.read(conv, backend.name)
        for record in records:
            if _counts(record, device) and not superseded(record, records) and applies(record) is None:
                tile = backend.tile(schedule_of(record.method), record.tile)
                found[_candidate(record.method, tile)] = statistics.median(record.samples_s)
    return found


def _counts(record: Record, device: Device) -> bool:
    return bool(record.samples_s) and record.threads == (1 if isinstance(device, Gpu) else device.threads)


def _runner_up(
    conv: Conv2d,
    device: Device,
    accuracy: Accuracy,
    chosen: str,
    measured: Mapping[Candidate, float],
    contender: Callable[[str, Any], Contender],
) -> Contender | None:
    """The best kernel of another schedule than the chosen one's."""
    backend = backend_for(device, accuracy)
    others = {key: seconds for key, seconds in measured.items() if key[0] != chosen}
    if others:
        name, values = min(others, key=lambda key: others[key])
        return contender(name, backend.tile(schedule_of(name), dict(values)))
    firsts = []
    for row in candidates("auto", conv, backend.target, accuracy):
        if row.key != chosen:
            usable = [pair for pair in ranked_tiles(conv, row, device, accuracy) if backend.proven(conv, pair[1])]
            firsts += [(usable[0][0], row.key, usable[0][1])] if usable else []
    best = min(firsts, key=lambda first: first[0], default=None)
    return None if best is None else contender(best[1], best[2])


def _causes(conv: Conv2d, device: Device, name: str, tile: Any) -> dict[str, float]:
    """Shares of the cost model's estimate by cause, the largest first."""
    row = schedule_of(name)
    if isinstance(device, Gpu):
        one = row.on_gpu.estimate(conv, tile, device)
        parts = {"compute": one.compute, "cache": one.cache, "memory": one.memory, "transform": one.transform, "launch": LAUNCH_S}
    else:
        of_cpu = row.scheduler.estimate(conv, tile, device, row.transform_bytes(conv) // conv.itemsize)
        parts = {cause: getattr(of_cpu, cause) for cause in ("product", "write_back", "stage", "cache", "memory")}
    total = sum(parts.values())
    return {cause: part / total for cause, part in sorted(parts.items(), key=lambda item: -item[1]) if part}


def _roofs(conv: Conv2d, device: Device, name: str, tile: Any, ceilings: Ceilings | None) -> dict[str, float]:
    """Least seconds by what binds."""
    exact = schedule_of(name).algorithm.name != "winograd"
    if isinstance(device, Machine):
        if ceilings is None:
            return {}
        arithmetic, memory = conv.flops / ceilings.gflops(conv.dtype) / 1e9, conv.bytes_moved / ceilings.copy_gbs / 1e9
    else:
        arithmetic, memory = product_cycles(conv, device, tile.product) / device.clock_hz, conv.bytes_moved / device.dram_bytes_s
    return ({"arithmetic": arithmetic} if exact and arithmetic else {}) | {"memory": memory}


def _unable(conv: Conv2d, target: str, accuracy: Accuracy) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for row in SCHEDULES.values():
        if (reason := row.supports(conv, target, accuracy)) is not None:
            found.setdefault(reason, []).append(methods.shown(row.key))
    return found
