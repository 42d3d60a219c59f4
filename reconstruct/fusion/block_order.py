"""Assignment of work to blocks by the order in which they start, so that consumer blocks can wait for producer blocks without deadlock.

A block draws a ticket when it starts. Producer blocks get smaller tickets than the consumer blocks that wait for them, wave by wave. A
consumer waits only for blocks that have already started, and producers never wait. `order` checks this for every ticket.
"""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import dataclass

import numpy as np

from im2win.reconstruct.fusion.splice import indented
from im2win.reconstruct.fusion.tiles import Along, Ints, NotFused, Tiling
from im2win.reconstruct.parse.expressions import parse
from im2win.reconstruct.parse.unit import AXES
from im2win.reconstruct.trace.values import evaluate

Grid = tuple[int, int, int]


@dataclass(frozen=True)
class Order:
    """The work of a ticket, as C source.

    blocks: number of tickets.
    head: (variable, value) declarations, computed from `ticket`.
    makes: condition that the ticket is a producer block.
    producer, consumer: its block index along x, y and z in either kernel.
    """

    blocks: int
    head: tuple[tuple[str, str], ...]
    makes: str
    producer: dict[str, str]
    consumer: dict[str, str]

    @property
    def declarations(self) -> str:
        """The head as C source."""
        return "".join(f"int {name} = {value};\n" for name, value in self.head)


def _spread(number: str, grid: Grid, left_out: int | None = None) -> dict[str, str]:
    """The block index along each axis from a linear index, x fastest, without the axis `left_out`."""
    found, before = dict[str, str](), 1
    axes = [axis for axis in range(3) if axis != left_out]
    for axis in axes:
        word = number if before == 1 else f"({number} / {before})"
        last = axis == axes[-1]
        found[AXES[axis]] = "0" if grid[axis] == 1 else word if last else f"({word} % {grid[axis]})"
        before *= grid[axis]
    return found


def order(producer: Grid, consumer: Grid, tiles: Tiling, wave: int) -> Order:
    """The order of a fused launch; see `llc.fuse` for `wave`.

    Raises:
        NotFused: `wave` is negative, or the kernels share no axis along which each consumer block needs producer blocks of its own.
    """
    makers, readers = math.prod(producer), math.prod(consumer)
    if wave < 0:
        raise NotFused(f"`wave` (={wave}) must be at least 0")
    if wave:
        found = _waves(producer, consumer, tiles, wave)
    else:
        head = (("maker", "ticket"), ("reader", f"(ticket - {makers})"))
        found = Order(makers + readers, head, f"ticket < {makers}", _spread("maker", producer), _spread("reader", consumer))
    _check(found, producer, consumer, tiles)
    return found


def _waves(producer: Grid, consumer: Grid, tiles: Tiling, wave: int) -> Order:
    tied = [(axis, along) for axis, along in enumerate(tiles.along) if along.axis]
    if len(tied) != 1 or tied[0][1].every != 1 or tied[0][1].period or tied[0][1].count > tied[0][1].step:
        raise NotFused("waves need one axis along which every block that reads lies over blocks of its own that make")
    axis, along = tied[0]
    other = AXES.index(along.axis)
    span, rows, columns = wave * along.step, math.prod(producer) // producer[axis], math.prod(consumer) // consumer[other]
    full, last = span * rows + wave * columns, -(-consumer[other] // wave) - 1
    head = (
        ("wave", f"min((ticket / {full}), {last})"),
        ("turn", f"(ticket - (wave * {full}))"),
        ("makers", f"((wave < {last} ? {span} : ({producer[axis]} - (wave * {span}))) * {rows})"),
        ("maker", f"(turn % {rows})"),
        ("reader", f"((turn - makers) % {columns})"),
    )
    first, second = _spread("maker", producer, axis), _spread("reader", consumer, other)
    first[AXES[axis]] = f"((wave * {span}) + (turn / {rows}))"
    second[AXES[other]] = f"((wave * {wave}) + ((turn - makers) / {columns}))"
    return Order(math.prod(producer) + math.prod(consumer), head, "turn < makers", first, second)


def _check(found: Order, producer: Grid, consumer: Grid, tiles: Tiling) -> None:
    """Checks that every block has exactly one ticket, and that consumers wait only for smaller tickets.

    Raises:
        NotFused: the order violates one of both.
    """
    scope: dict[str, Ints | None] = {"ticket": np.arange(found.blocks)}
    for name, value in found.head:
        scope[name] = evaluate(parse(value), scope)
    makes = np.broadcast_to(evaluate(parse(found.makes), scope), (found.blocks,)) != 0  # type: ignore[arg-type]
    tickets = [np.flatnonzero(makes), np.flatnonzero(~makes)]
    numbers = []
    for chosen, blocks, grid in zip(tickets, (found.producer, found.consumer), (producer, consumer), strict=True):
        x, y, z = (np.broadcast_to(evaluate(parse(blocks[axis]), scope), (found.blocks,))[chosen] for axis in AXES)  # type: ignore[arg-type]
        inside = all(np.all((index >= 0) & (index < extent)) for index, extent in zip((x, y, z), grid, strict=True))
        numbers.append(x + grid[0] * (y + grid[1] * z))
        if not inside or not np.array_equal(np.sort(numbers[-1]), np.arange(math.prod(grid))):
            raise NotFused("an order of blocks that leaves some out")
    when = np.zeros(math.prod(producer), np.int64)
    when[numbers[0]] = tickets[0]
    if np.any(_latest(when.reshape(producer[::-1]).transpose(), tiles, consumer, numbers[1]) > tickets[1]):
        raise NotFused("an order of blocks in which one waits for a later one")


def _latest(when: Ints, tiles: Tiling, consumer: Grid, readers: Ints) -> Ints:
    """The largest ticket that each consumer block waits for; `when`: tickets of the producer blocks, shape [x, y, z]."""
    x, y, _ = consumer
    index = {"x": readers % x, "y": readers // x % y, "z": readers // (x * y)}
    boxes = list[tuple[Ints, int]]()
    for axis, along in enumerate(tiles.along):
        if not along.axis:
            when = when.max(axis=axis, keepdims=True)
        boxes.append((along.first(index[along.axis]), along.count) if along.axis else (np.zeros_like(readers), 1))
    found = np.zeros_like(readers)
    for place in itertools.product(*(range(count) for _, count in boxes)):
        i, j, k = (np.minimum(first + at, extent - 1) for (first, _), at, extent in zip(boxes, place, when.shape, strict=True))
        found = np.maximum(found, when[i, j, k])
    return found


@dataclass(frozen=True)
class Flags:
    """Counters in global memory: one for tickets, then one for each producer index along the shared axes.

    count: number of counters.
    signal: index of the counter that a producer block increments, as C source.
    expected: final value of such a counter.
    waits: C source that waits for all counters that a consumer block needs.
    """

    count: int
    signal: str
    expected: int
    waits: str


def flags(found: Order, producer: Grid, tiles: Tiling, name: str) -> Flags:
    """The counters of a fused launch; `name` is the name of their parameter."""
    tied: list[tuple[str, Along, int]] = [(AXES[axis], along, producer[axis]) for axis, along in enumerate(tiles.along) if along.axis]
    signal, index, many, depth = "1", "1", 1, 1
    lines = "if (thread == 0) {\n"
    for axis, along, extent in tied:
        first = re.sub(r"\bblock\b", found.consumer[along.axis], along.text("block"))
        lines += indented(f"for (int wait_{axis} = 0; wait_{axis} < {along.count}; ++wait_{axis}) {{\n", 2 * depth)
        lines += indented(f"if (({first} + wait_{axis}) < {extent}) {{\n", 2 * depth + 2)
        signal, index = f"({signal} + ({found.producer[axis]} * {many}))", f"({index} + (({first} + wait_{axis}) * {many}))"
        many, depth = many * extent, depth + 2
    expected = math.prod(producer) // many
    lines += indented(f"im2win::await_done(({name} + {index}), {expected}u);\n", 2 * depth)
    lines += "".join("  " * level + "}\n" for level in reversed(range(depth)))
    return Flags(1 + many, signal, expected, lines)
