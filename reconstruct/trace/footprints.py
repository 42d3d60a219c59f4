"""Footprints of the epochs between barriers, and conflicts between threads.

Two threads conflict at a byte if both access it and at least one writes. A kernel has no data race if threads of different warps do not
conflict between two block barriers, and threads of one warp do not conflict between two barriers of any scope.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from im2win.reconstruct.trace.events import Access, BarrierReached, CommitGroup, Event, Fence, WaitGroup

Ints = npt.NDArray[np.int64]
_NOBODY = np.iinfo(np.int32).max


@dataclass
class Touched:
    """Accesses to one buffer in one epoch, by unit: whether it is written, and the lowest and highest thread that accesses it."""

    wrote: npt.NDArray[np.bool_]
    first: npt.NDArray[np.int32]
    last: npt.NDArray[np.int32]

    @classmethod
    def nothing(cls, size: int) -> Touched:
        return cls(np.zeros(size, np.bool_), np.full(size, _NOBODY, np.int32), np.full(size, -1, np.int32))

    def add(self, other: Touched) -> None:
        """Merges the accesses of another footprint of the same units."""
        self.wrote |= other.wrote
        np.minimum(self.first, other.first, out=self.first)
        np.maximum(self.last, other.last, out=self.last)

    def conflicts(self, per: int) -> npt.NDArray[np.bool_]:
        """Whether threads of different groups of `per` threads conflict, by unit."""
        return np.asarray(self.wrote & (self.first // per != self.last // per))


@dataclass
class Epoch:
    """The code between two barriers.

    accesses: of the epoch, and asynchronous copies that may still be pending.
    fence: the first synchronisation with other blocks, if any.
    ended: the barrier at the end, None at the end of the kernel.
    """

    accesses: list[Access] = field(default_factory=list)
    fence: Fence | None = None
    ended: BarrierReached | None = None
    touched: dict[str, Touched] = field(default_factory=dict)


def epochs(events: Iterable[Event]) -> list[Epoch]:
    """Splits events at barriers. An asynchronous copy belongs to every epoch until a `WaitGroup` completes it."""
    found, groups, uncommitted = [Epoch()], list[list[Access]](), list[Access]()
    for event in events:
        match event:
            case Access():
                found[-1].accesses.append(event)
                if event.pending:
                    uncommitted.append(event)
            case CommitGroup():
                groups.append(uncommitted)
                uncommitted = []
            case WaitGroup(left):
                del groups[: max(len(groups) - left, 0)]
            case Fence():
                found[-1].fence = found[-1].fence or event
            case BarrierReached():
                found[-1].ended = event
                found.append(Epoch([access for group in groups for access in group] + uncommitted))
    return found


class Ledger:
    """The epochs of one block with their footprints.

    Args:
        events: of the block.
        threads: of the block.
    """

    def __init__(self, events: Iterable[Event], threads: int) -> None:
        self.epochs, self.threads = epochs(events), threads
        self._units: dict[str, int] = {}
        self._places: dict[str, Ints] = {}
        by_buffer: dict[str, list[Access]] = {}
        for access in self._all():
            by_buffer.setdefault(access.buffer, []).append(access)
        for buffer, accesses in by_buffer.items():
            self._count(buffer, accesses)
        for epoch in self.epochs:
            for access in epoch.accesses:
                self._touch(epoch, access)

    def _all(self) -> list[Access]:
        return list({id(access): access for epoch in self.epochs for access in epoch.accesses}.values())

    def _count(self, buffer: str, accesses: Sequence[Access]) -> None:
        """Chooses the largest unit that divides all accesses of a buffer, and lists the units in use."""
        self._units[buffer] = int(np.gcd.reduce([np.gcd.reduce(np.append(access.start.ravel(), access.width)) for access in accesses]))
        self._places[buffer] = np.unique(np.concatenate([np.unique(self._touches(access)[0]) for access in accesses]))

    def _touches(self, access: Access) -> tuple[Ints, Ints]:
        """Parallel arrays of the accessed units and their threads, sorted by thread."""
        shape = np.broadcast_shapes(access.start.shape, () if access.mask is None else access.mask.shape, (self.threads,))
        starts = np.broadcast_to(access.start, shape)
        threads = np.broadcast_to(np.arange(self.threads), shape)
        if access.mask is not None:
            chosen = np.broadcast_to(access.mask, shape)
            starts, threads = starts[chosen], threads[chosen]
        order = np.argsort(threads, axis=None, kind="stable")
        starts, threads = starts.ravel()[order], threads.ravel()[order]
        unit = self._units[access.buffer]
        units = (starts[:, None] // unit + np.arange(access.width // unit)).ravel()
        return units, np.repeat(threads, access.width // unit)

    def _touch(self, epoch: Epoch, access: Access) -> None:
        units, threads = self._touches(access)
        at = np.searchsorted(self._places[access.buffer], units)
        touched = epoch.touched.setdefault(access.buffer, Touched.nothing(len(self._places[access.buffer])))
        first, last = (np.full(len(touched.first), nobody, np.int32) for nobody in (_NOBODY, -1))
        first[at[::-1]], last[at] = threads[::-1], threads  # the last of several stores to one index wins
        wrote = np.zeros(len(first), np.bool_)
        wrote[at] = access.write
        touched.add(Touched(wrote, first, last))

    def conflicts(self, group: Sequence[Epoch], per: int) -> Iterator[Conflict]:
        """One conflict a buffer between threads of different groups of `per`, at units that several of these epochs access."""
        for buffer in sorted({buffer for epoch in group for buffer in epoch.touched}):
            touched = Touched.nothing(len(self._places[buffer]))
            times = np.zeros(len(self._places[buffer]), np.int64)
            for part in (epoch.touched[buffer] for epoch in group if buffer in epoch.touched):
                touched.add(part)
                times += part.last >= 0
            conflicting = touched.conflicts(per) & (times > 1)
            if conflicting.any():
                yield self._conflict(group, per, buffer, int(np.argmax(conflicting)))

    def early(self, epoch: Epoch) -> str | None:
        """The buffer in which an epoch accesses what an asynchronous copy may still be writing; None if there is none.

        `conflicts` finds such accesses by other threads; this one also finds those of the thread that copies.
        """
        for buffer in sorted(epoch.touched):
            accesses = [access for access in epoch.accesses if access.buffer == buffer]
            copied, other = ([self._touches(one)[0] for one in accesses if one.pending == pending] for pending in (True, False))
            if copied and other and np.intersect1d(np.concatenate(copied), np.concatenate(other)).size:
                return buffer
        return None

    def _conflict(self, group: Sequence[Epoch], per: int, buffer: str, place: int) -> Conflict:
        """Two conflicting accesses of one unit by threads of different groups, in different epochs if possible."""
        unit, found = int(self._places[buffer][place]), list[tuple[int, Access, int]]()
        for number, epoch in enumerate(group):
            for access in (access for access in epoch.accesses if access.buffer == buffer):
                units, threads = self._touches(access)
                found += [(number, access, int(thread)) for thread in np.unique(threads[units == unit])]
        pairs = [
            (Conflict(buffer, unit * self._units[buffer], one, thread, other, another, epoch != later))
            for epoch, one, thread in found
            for later, other, another in found
            if one.write and thread // per != another // per
        ]
        return min(pairs, key=lambda pair: (not pair.separated, not pair.certain))

    def groups(self, separates: Callable[[BarrierReached], bool]) -> list[list[Epoch]]:
        """The epochs, grouped by the barriers for which `separates` holds."""
        runs: list[list[Epoch]] = [[]]
        for epoch in self.epochs:
            runs[-1].append(epoch)
            if epoch.ended is not None and separates(epoch.ended):
                runs.append([])
        return runs


@dataclass(frozen=True, eq=False)
class Conflict:
    """`thread` writes a byte of a buffer, `another` accesses it; `separated` says whether a barrier of the source stands between them."""

    buffer: str
    byte: int
    one: Access
    thread: int
    other: Access
    another: int
    separated: bool

    @property
    def certain(self) -> bool:
        """Whether both accesses are certain."""
        return self.one.certain and self.other.certain
