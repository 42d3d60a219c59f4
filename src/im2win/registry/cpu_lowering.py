"""From a problem, an algorithm and a tile to a scheduled CPU kernel."""

from __future__ import annotations

from typing import Any

import tvm

from im2win.codegen.llvm import TileError
from im2win.device.cpu import Machine
from im2win.registry.schedules import Schedule
from im2win.spec.conv2d import Conv2d


def lower(conv: Conv2d, algorithm: Schedule, tile: Any, machine: Machine) -> tvm.IRModule:
    """The scheduled module, one function `conv2d` over the tensors of `conv.arguments`.

    Raises:
        TileError: the tile is not legal.
    """
    broken = algorithm.scheduler.violations(conv, tile, machine)
    if broken:
        raise TileError(f"{algorithm.key} on {conv}: " + "; ".join(broken) + ".")
    module: tvm.IRModule = algorithm.scheduler.module(conv, algorithm, tile)
    return module
