"""The analytic model applied to the registry: rankings, and the tile of an untuned layer."""

from __future__ import annotations

from typing import Any

from im2win.device.cpu import Machine
from im2win.registry.backends import Backend, Device, backend_for
from im2win.registry.schedules import Schedule, candidates
from im2win.spec.accuracy import Accuracy
from im2win.spec.conv2d import Conv2d


def ranked_tiles(conv: Conv2d, row: Schedule, device: Device, accuracy: Accuracy = "float32") -> list[tuple[float, Any]]:
    """An algorithm's space for a problem with the model's estimates, best first; ties keep the space's order."""
    return backend_for(device, accuracy).ranked(conv, row)


def _usable(conv: Conv2d, ranked: list[tuple[float, Any]], backend: Backend, named: bool) -> list[tuple[float, Any]]:
    """The proven tiles; if there are none, all of them for an algorithm that the user named."""
    proven = [pair for pair in ranked if backend.proven(conv, pair[1])]
    return proven or (ranked if named else [])


def default_tile(
    conv: Conv2d, algorithm: str = "auto", machine: Device | None = None, accuracy: Accuracy = "float32"
) -> tuple[str, Any]:
    """(algorithm, tile) that the model ranks first; between equals, the earlier row of the registry.

    Args:
        machine: the device; this machine's CPU if None.

    Raises:
        ValueError: unknown algorithm, none supports the problem, or none has a legal tile for it.
    """
    backend = backend_for(machine or Machine.host(), accuracy)
    rows = candidates(algorithm, conv, backend.target, accuracy)
    spaces = [(row, _usable(conv, backend.ranked(conv, row), backend, algorithm != "auto")) for row in rows]
    best = [(*ranked[0], row.key) for row, ranked in spaces if ranked]
    if not best:
        raise ValueError(f"no tile of `algorithm` (={algorithm}) is legal for {conv} on {backend.name}.")
    _, tile, name = min(best, key=lambda item: item[0])
    return name, tile
