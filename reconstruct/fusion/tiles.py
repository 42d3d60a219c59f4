"""Which producer blocks write what a consumer block reads: enumerated for all blocks, then expressed as a formula of the block index."""

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
PAIRS = 1 << 28  # largest number of (consumer block, producer block) pairs
ELEMENTS = 1 << 27  # largest size of a tensor


class NotFused(ReconstructError):
    """Two kernels cannot be fused; the message says why."""


@dataclass(frozen=True)
class Along:
    """The producer blocks along one axis that a consumer block needs: `count` blocks from ``block / every % period * step``.

    axis: axis of the consumer's grid that gives `block`; "" if every consumer block needs all producer blocks along the axis.
    period: 0 for a formula without the remainder.
    """

    axis: str
    every: int
    period: int
    step: int
    count: int

    def first(self, block: Ints) -> Ints:
        """The first producer block, for consumer blocks with these indices along `axis`."""
        index = block // self.every
        return (index % self.period if self.period else index) * self.step

    def text(self, block: str) -> str:
        """The formula of `first` as C source."""
        if not self.axis:
            return "0"
        word = block if self.every == 1 else f"({block} / {self.every})"
        word = f"({word} % {self.period})" if self.period else word
        return word if self.step == 1 else f"({word} * {self.step})"


@dataclass(frozen=True)
class Tiling:
    """The mapping from consumer blocks to producer blocks and elements.

    along: for the producer's axes x, y and z.
    origin: the first element of producer block (0, 0, 0), and the elements that one block along x, y and z adds.
    layout: of the elements that one consumer block needs, relative to the first.
    element: bytes of an element.
    owner: linear index of the producer block that writes each element, -1 for none.
    """

    along: tuple[Along, Along, Along]
    origin: tuple[int, int, int, int]
    layout: Layout
    element: int
    owner: Ints

    @property
    def counts(self) -> tuple[int, int, int]:
        """Producer blocks that a consumer block needs, along x, y and z."""
        x, y, z = (along.count for along in self.along)
        return x, y, z

    def start(self, blocks: tuple[Ints, Ints, Ints]) -> Ints:
        """The first element that each consumer block needs; `blocks`: their indices along x, y and z."""
        start, *steps = self.origin
        found = np.full(blocks[0].shape, start)
        for along, step in zip(self.along, steps, strict=True):
            if along.axis:
                found = found + along.first(blocks[AXES.index(along.axis)]) * step
        return found


def elements(access: Access, element: int, blocks: Ints) -> tuple[Ints, Ints]:
    """The elements of an access, and the linear index of the block that accesses each.

    Raises:
        NotFused: the width of the access is not a multiple of the element size.
    """
    if access.width % element:
        raise NotFused(f"an access of {access.width} bytes in a tensor of elements of {element}")
    by_block = blocks.reshape(-1, 1)
    mask = np.ones((1, 1), np.bool_) if access.mask is None else access.mask
    start, owner, chosen = np.broadcast_arrays(access.start, by_block, mask)
    lanes = np.arange(access.width // element)
    return (start[chosen][:, None] // element + lanes).ravel(), np.repeat(owner[chosen], len(lanes))


def owners(kernel: Kernel, name: str, size: int) -> Ints:
    """Linear index of the block of `kernel` that writes each of the `size` elements of a tensor, -1 for none.

    Raises:
        NotFused: two blocks write one element, a block reads what it does not write, or an access is out of bounds.
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
    """Whether each block of the kernel reads what each producer block writes, shape [kernel blocks, producer blocks].

    Raises:
        NotFused: the kernel writes the tensor or reads elements that no block writes, or there are too many pairs of blocks.
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
    """Bytes of the pointee of a parameter.

    Raises:
        NotFused: the size of the type is not known.
    """
    parameter = next(parameter for parameter in kernel.parameters if parameter.name == name)
    size = size_of(parameter.element)
    if size is None:
        raise NotFused(f"parameter {name} of {kernel.name} points to {parameter.element}, whose size is not known")
    return size


def tiling(producer: Kernel, written: str, consumer: Kernel, read: str, size: int) -> Tiling:
    """The tiling of a producer and a consumer.

    Args:
        producer: the kernel that writes the tensor, with its launch.
        written: the tensor's parameter in the producer.
        consumer: the kernel that reads the tensor, with its launch.
        read: the tensor's parameter in the consumer.
        size: elements of the tensor.

    Raises:
        NotFused: the tensor is too large to enumerate, or no formula describes the mapping.
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
    """The formula of a mask with shape [consumer blocks, producer blocks along one axis]."""
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
    """The formula ``block / every % period * step`` with these values; None if the first value is not 0 or all values are equal."""
    changes = np.flatnonzero(first != first[0])
    if first[0] != 0 or not len(changes):
        return None
    every, step = int(changes[0]), int(first[changes[0]])
    again = np.flatnonzero(first[every:] == 0)
    period = (every + int(again[0])) // every if len(again) else 0
    return Along(axis, every, period, step, count)


def _origin(owner: Ints, grid: tuple[int, int, int]) -> tuple[int, int, int, int]:
    """The first element of the first block, and the elements that one block along x, y and z adds."""
    least = np.full(math.prod(grid), np.iinfo(np.int64).max)
    np.minimum.at(least, owner[owner >= 0], np.flatnonzero(owner >= 0))
    x, y, _ = grid
    steps = [int(least[number] - least[0]) if extent > 1 else 0 for number, extent in zip((1, x, x * y), grid, strict=True)]
    return int(least[0]), steps[0], steps[1], steps[2]


def _layout(owner: Ints, grid: tuple[int, int, int], origin: tuple[int, int, int, int], along: tuple[Along, Along, Along]) -> Layout:
    """Layout of the elements that the producer blocks of one consumer block write, relative to the first.

    Every producer block must write the same pattern, or a part of it, relative to its own first element.
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
