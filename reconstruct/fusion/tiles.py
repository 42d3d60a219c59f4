"""Which blocks of one kernel make what a block of another reads: by enumeration of both, then as a formula of the block index."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from im2win.reconstruct.fusion.layout import Layout
from im2win.reconstruct.parse.expressions import size_of
from im2win.reconstruct.parse.unit import AXES, Kernel
from im2win.reconstruct.text_rules import ReconstructError
from im2win.reconstruct.trace.events import Access
from im2win.reconstruct.trace.trace import Trace, grid_blocks

Ints = npt.NDArray[np.int64]
PAIRS = 1 << 28  # of blocks, at most
ELEMENTS = 1 << 27  # of a tensor, at most


class NotFused(ReconstructError):
    """Two kernels that cannot be fused; the message says why. The unfused ones are used then."""


@dataclass(frozen=True)
class Along:
    """The blocks along one axis of the producer that a block of the consumer needs: `count` from ``block / every % period * step`` on.

    axis: of the consumer's grid; "" for all blocks of the producer, whatever the consumer's block. period 0: without the remainder.
    """

    axis: str
    every: int
    period: int
    step: int
    count: int

    def first(self, block: Ints) -> Ints:
        """The first of them, for blocks of the consumer along `axis`."""
        index = block // self.every
        return (index % self.period if self.period else index) * self.step

    def text(self, block: str) -> str:
        """The same as C."""
        if not self.axis:
            return "0"
        word = block if self.every == 1 else f"({block} / {self.every})"
        word = f"({word} % {self.period})" if self.period else word
        return word if self.step == 1 else f"({word} * {self.step})"


@dataclass(frozen=True)
class Tiling:
    """How a consumer's blocks lie over a producer's.

    along: of the producer's axes x, y, z. origin: the first element of block (0, 0, 0), and what each axis of the producer adds. layout: of
    the elements that one block of the consumer needs, counted from the first. element: bytes of one. owner: of every element, the number
    of the producer's block that writes it, or -1.
    """

    along: tuple[Along, Along, Along]
    origin: tuple[int, int, int, int]
    layout: Layout
    element: int
    owner: Ints

    @property
    def counts(self) -> tuple[int, int, int]:
        """Blocks of the producer along each axis that a block of the consumer needs."""
        x, y, z = (along.count for along in self.along)
        return x, y, z

    def start(self, blocks: tuple[Ints, Ints, Ints]) -> Ints:
        """The first element that blocks of the consumer need."""
        start, *steps = self.origin
        found = np.full(blocks[0].shape, start)
        for along, step in zip(self.along, steps, strict=True):
            if along.axis:
                found = found + along.first(blocks[AXES.index(along.axis)]) * step
        return found


def elements(access: Access, element: int, blocks: Ints) -> tuple[Ints, Ints]:
    """The elements of an access, and the number of the block that touches each.

    Raises:
        NotFused: an access that is no whole number of elements.
    """
    if access.width % element:
        raise NotFused(f"an access of {access.width} bytes in a tensor of elements of {element}")
    by_block = blocks.reshape(-1, 1)
    mask = np.ones((1, 1), np.bool_) if access.mask is None else access.mask
    start, owner, chosen = np.broadcast_arrays(access.start, by_block, mask)
    lanes = np.arange(access.width // element)
    return (start[chosen][:, None] // element + lanes).ravel(), np.repeat(owner[chosen], len(lanes))


def owners(kernel: Kernel, name: str, size: int) -> Ints:
    """Of every element of a tensor, the number of the block of `kernel` that writes it, -1 for none.

    Raises:
        NotFused: two blocks write one element, or a block reads what another writes.
    """
    element, owner = element_size(kernel, name), np.full(size, -1, np.int64)
    reads: list[tuple[Ints, Ints]] = []
    for number, blocks in grid_blocks(kernel):
        for event in Trace(kernel, {name}, blocks):
            if isinstance(event, Access):
                place, block = elements(event, element, number)
                if place.size and (place.min() < 0 or place.max() >= size):
                    raise NotFused(f"kernel {kernel.name} reaches outside its {size} elements of {name}")
                if event.write:
                    before = owner[place]
                    owner[place] = block
                    if np.any((before >= 0) & (before != block)) or np.any(owner[place] != block):
                        raise NotFused(f"two blocks of {kernel.name} write one element of {name}")
                else:
                    reads.append((place, block))
    if any(np.any(owner[place] != block) for place, block in reads):
        raise NotFused(f"a block of {kernel.name} reads of {name} what it does not write")
    return owner


def needs(kernel: Kernel, name: str, owner: Ints, makers: int) -> npt.NDArray[np.bool_]:
    """[blocks of the kernel, blocks of the maker]: whether one reads of a tensor what the other writes.

    Raises:
        NotFused: it reads what nobody writes, or writes.
    """
    element, count = element_size(kernel, name), math.prod(kernel.launch.grid)
    if count * makers > PAIRS:
        raise NotFused(f"{count} and {makers} blocks are too many pairs to look at")
    found = np.zeros((count, makers), np.bool_)
    for number, blocks in grid_blocks(kernel):
        for event in Trace(kernel, {name}, blocks):
            if isinstance(event, Access):
                place, block = elements(event, element, number)
                if event.write:
                    raise NotFused(f"kernel {kernel.name} writes {name}, which it is to read")
                if place.size and (place.min() < 0 or place.max() >= len(owner) or np.any(owner[place] < 0)):
                    raise NotFused(f"kernel {kernel.name} reads of {name} what nobody writes")
                found[block, owner[place]] = True
    return found


def element_size(kernel: Kernel, name: str) -> int:
    """Bytes of what a parameter points to."""
    parameter = next(parameter for parameter in kernel.parameters if parameter.name == name)
    size = size_of(parameter.element)
    if size is None:
        raise NotFused(f"parameter {name} of {kernel.name} points to {parameter.element}, whose size is not known")
    return size


def tiling(producer: Kernel, written: str, consumer: Kernel, read: str, size: int) -> Tiling:
    """How the consumer's blocks lie over the producer's.

    Args:
        written, read: the parameter that is the tensor between them, in each kernel. size: its elements.

    Raises:
        NotFused: there is no formula for it.
    """
    if size > ELEMENTS:
        raise NotFused(f"{size} elements are too many to look at, and no few blocks stand for all")
    owner = owners(producer, written, size)
    grid = producer.launch.grid
    needed = needs(consumer, read, owner, math.prod(grid))
    if not needed.any(axis=1).all():
        raise NotFused(f"a block of {consumer.name} reads nothing of {read}")
    boxes = needed.reshape(len(needed), grid[2], grid[1], grid[0])
    along = tuple(_along(np.asarray(boxes.any(axis=tuple({1, 2, 3} - {3 - axis}))), consumer, AXES[axis]) for axis in range(3))
    origin = _origin(owner, grid)
    x, y, z = along
    return Tiling((x, y, z), origin, _layout(owner, grid, origin, (x, y, z)), element_size(producer, written), owner)


def _along(needed: npt.NDArray[np.bool_], consumer: Kernel, axis: str) -> Along:
    """The formula behind [blocks of the consumer, indices along one axis of the producer]."""
    extent = needed.shape[1]
    first, last = needed.argmax(axis=1), extent - 1 - needed[:, ::-1].argmax(axis=1)
    count = int((last - first).max()) + 1
    if count == extent:
        return Along("", 1, 0, 1, extent)
    number = np.arange(len(needed))
    x, y, z = consumer.launch.grid
    for name, index, blocks in zip(AXES, (number % x, number // x % y, number // (x * y)), (x, y, z), strict=True):
        by_block = first[[int(np.argmax(index == block)) for block in range(blocks)]]
        found = _formula(by_block, name, count)
        if found is not None and np.array_equal(found.first(index), first):
            return found
    raise NotFused(f"which blocks of the producer along {axis} a block of {consumer.name} needs is no formula of its index")


def _formula(first: Ints, axis: str, count: int) -> Along | None:
    """``block / every % period * step`` that gives these values; None if it does not."""
    changes = np.flatnonzero(first != first[0])
    if first[0] != 0 or not len(changes):
        return None
    every, step = int(changes[0]), int(first[changes[0]])
    again = np.flatnonzero(first[every:] == 0)
    period = (every + int(again[0])) // every if len(again) else 0
    return Along(axis, every, period, step, count)


def _origin(owner: Ints, grid: tuple[int, int, int]) -> tuple[int, int, int, int]:
    """The first element of the first block, and what one block along each axis adds to it."""
    least = np.full(math.prod(grid), np.iinfo(np.int64).max)
    np.minimum.at(least, owner[owner >= 0], np.flatnonzero(owner >= 0))
    x, y, _ = grid
    steps = [int(least[number] - least[0]) if extent > 1 else 0 for number, extent in zip((1, x, x * y), grid, strict=True)]
    return int(least[0]), steps[0], steps[1], steps[2]


def _layout(owner: Ints, grid: tuple[int, int, int], origin: tuple[int, int, int, int], along: tuple[Along, Along, Along]) -> Layout:
    """Of what the blocks of a box write, counted from the box's first element.

    Every block must write the same pattern, or part of it, from its own first element on.
    """
    place = np.flatnonzero(owner >= 0)
    block = owner[place]
    x, y, _ = grid
    pattern = np.unique(place - origin[0] - block % x * origin[1] - block // x % y * origin[2] - block // (x * y) * origin[3])
    counts = [part.count for part in along]
    shifts = np.array([sum(i * step for i, step in zip(tile, origin[1:], strict=True)) for tile in itertools.product(*map(range, counts))])
    everything = np.unique((pattern[:, None] + shifts).ravel())
    layout = Layout.of(everything) if len(everything) == len(pattern) * len(shifts) else None
    if layout is None:
        raise NotFused("what a block needs of the tensor between the kernels has no regular place in it")
    return layout
