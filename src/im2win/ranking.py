"""The analytic model applied to the registry: estimates, rankings, and the tile of an untuned layer."""

from __future__ import annotations

from im2win.algorithms import Algorithm, candidates
from im2win.machine import Machine
from im2win.problem import Conv2d
from im2win.schedules.model import Estimate, estimate
from im2win.schedules.space import space
from im2win.schedules.tile import Tile


def estimate_for(conv: Conv2d, row: Algorithm, tile: Tile, machine: Machine) -> Estimate:
    """The model's estimate of an algorithm with a legal tile."""
    plan = row.plan(conv)
    staged = row.transform_bytes(conv) // conv.itemsize if plan.where == "root" else row.strip_elements(conv, tile.strip)
    return estimate(conv, tile, machine, matrix=plan.matrix, where=plan.where, staged=staged, step=plan.step)


def ranked_tiles(conv: Conv2d, row: Algorithm, machine: Machine) -> list[tuple[float, Tile]]:
    """An algorithm's space for a problem with the model's estimates (`Estimate.cost`), best first; ties keep the space's order."""
    tiles = space(conv, machine, matrix=row.plan(conv).matrix)
    return sorted(((estimate_for(conv, row, tile, machine).cost, tile) for tile in tiles), key=lambda pair: pair[0])


def default_tile(conv: Conv2d, algorithm: str = "auto", machine: Machine | None = None) -> tuple[str, Tile]:
    """(algorithm, tile) that the model ranks first; between equals, the earlier row of the registry.

    Raises:
        ValueError: unknown algorithm, none supports the problem, or none has a legal tile for it.
    """
    machine = machine or Machine.host()
    best = [(*ranked[0], row.name) for row in candidates(algorithm, conv) if (ranked := ranked_tiles(conv, row, machine))]
    if not best:
        raise ValueError(f"no tile of `algorithm` (={algorithm}) is legal for {conv} on {machine.name}.")
    _, tile, name = min(best, key=lambda item: item[0])
    return name, tile

