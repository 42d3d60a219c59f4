"""The analytic model applied to the registry: rankings, and the tile of an untuned layer."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from im2win.device.cpu import Machine
from im2win.registry.backends import Device, backend_for
from im2win.registry.interface import Backend
from im2win.registry.schedules import Schedule, candidates, schedule_of
from im2win.spec.accuracy import Accuracy
from im2win.spec.conv2d import Conv2d


def ranked_tiles(conv: Conv2d, row: Schedule, device: Device, accuracy: Accuracy = "float32") -> list[tuple[float, Any]]:
    """An algorithm's space for a problem with the model's estimates, best first; ties keep the space's order."""
    return backend_for(device, accuracy).ranked(conv, row)


def _usable(conv: Conv2d, ranked: list[tuple[float, Any]], backend: Backend, named: bool) -> list[tuple[float, Any]]:
    """The proven tiles; if there are none, all of them for an algorithm that the user named."""
    proven = [pair for pair in ranked if backend.proven(conv, pair[1])]
    return proven or (ranked if named else [])


def first_of(
    conv: Conv2d, spaces: Mapping[str, list[tuple[float, Any]]], backend: Backend, *, named: bool = False
) -> tuple[float, str, Any] | None:
    """(estimate, algorithm, tile) that the model ranks first; between equals, the earlier algorithm. None without a usable tile.

    Args:
        spaces: by algorithm, its tiles with the model's estimates, best first.
        named: whether the user named the algorithms; if so, tiles that are not proven may be taken.
    """
    usable = ((name, _usable(conv, ranked, backend, named)) for name, ranked in spaces.items())
    best = [(ranked[0][0], name, ranked[0][1]) for name, ranked in usable if ranked]
    return min(best, key=lambda item: item[0], default=None)


@functools.lru_cache(maxsize=4096)
def _first(conv: Conv2d, names: tuple[str, ...], device: Device, accuracy: Accuracy, named: bool) -> tuple[float, str, Any] | None:
    """`first_of` all spaces, without ranking those that cannot hold the best tile: their floor is above the best so far."""
    backend = backend_for(device, accuracy)
    floors = {name: backend.floor(conv, schedule_of(name)) for name in names}
    best: dict[str, tuple[float, str, Any]] = {}
    for name in sorted(names, key=lambda name: floors[name]):
        if best and floors[name] > min(best.values(), key=lambda found: found[0])[0]:
            break
        found = first_of(conv, {name: backend.ranked(conv, schedule_of(name))}, backend, named=named)
        best |= {} if found is None else {name: found}
    return min((best[name] for name in names if name in best), key=lambda found: found[0], default=None)


def default_of(
    conv: Conv2d, names: Sequence[str], device: Device, accuracy: Accuracy = "float32", *, named: bool = False
) -> tuple[str, Any] | None:
    """(algorithm, tile) that the model ranks first among some algorithms' tiles; None if none is usable. The result is cached."""
    found = _first(conv, tuple(names), device, accuracy, named)
    return None if found is None else found[1:]


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
    names = [row.key for row in candidates(algorithm, conv, backend.target, accuracy)]
    found = default_of(conv, names, machine or Machine.host(), accuracy, named=algorithm != "auto")
    if found is None:
        raise ValueError(f"no tile of `algorithm` (={algorithm}) is legal for {conv} on {backend.name}.")
    return found
