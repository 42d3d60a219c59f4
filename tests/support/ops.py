"""Built operators that tests share: a build takes a fraction of a second, and many tests want the same one."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterable
from typing import Any

import pytest
from oracle import Array, Tensors

from im2win.builder.build import build_tile
from im2win.device.cpu import Machine
from im2win.numerics.winograd_matrices import transform
from im2win.registry.ranking import default_tile, ranked_tiles
from im2win.registry.schedules import SCHEDULES, schedule_of
from im2win.runtime.op import Op
from im2win.schedules.cpu.tile import Tile
from im2win.schedules.cpu_winograd.tile import WinogradTile
from im2win.spec.conv2d import Conv2d


@functools.cache
def host() -> Machine:
    """This machine, as the package sees it."""
    return Machine.host()


@functools.lru_cache(maxsize=64)
def tiled(conv: Conv2d, algorithm: str, tile: Tile | WinogradTile) -> Op:
    """An operator with exactly this tile."""
    return build_tile(conv, algorithm, tile, host())


def default(conv: Conv2d | str, algorithm: str = "direct/tiled") -> Op:
    """An operator with the tile that the model ranks first: of Winograd's among those that are exact on integers, if there are any."""
    problem = Conv2d.parse(conv) if isinstance(conv, str) else conv
    row = schedule_of(algorithm)
    if row.scheduler.exact:
        return tiled(problem, algorithm, default_tile(problem, algorithm, host())[1])
    ranked = [tile for _, tile in ranked_tiles(problem, row, host())]
    return tiled(problem, algorithm, next((tile for tile in ranked if exact(problem, tile)), ranked[0]))


def exact(conv: Conv2d, tile: Any) -> bool:
    """Whether a tile's kernel gives the integers that sums of small integers are."""
    return not isinstance(tile, WinogradTile) or all(transform(tile.outputs, taps).dyadic for taps in conv.kernel)


def run(op: Op, tensors: Tensors, out: Array | None = None) -> Any:
    """Calls an operator with tensors named as in `conv.arguments`."""
    return op(tensors["data"], tensors["filter"], tensors.get("bias"), tensors.get("residual"), out)


def supported(conv: Conv2d | str) -> list[str]:
    """Names of the algorithms that compute this problem."""
    problem = Conv2d.parse(conv) if isinstance(conv, str) else conv
    return [name for name, row in SCHEDULES.items() if row.supports(problem) is None]


def computing(conv: Conv2d | str) -> pytest.MarkDecorator:
    """Runs a test for every `algorithm` that computes this problem."""
    return pytest.mark.parametrize("algorithm", supported(conv))


def pairs(convs: Iterable[Conv2d]) -> pytest.MarkDecorator:
    """Runs a test for every `conv` with every `algorithm` that computes it."""
    return pytest.mark.parametrize(("conv", "algorithm"), [pytest.param(c, name, id=f"{c}-{name}") for c in convs for name in supported(c)])


def sampled_tiles(conv: Conv2d, algorithm: str, per_axis: int) -> list[Any]:
    """The default tile and tiles drawn from the space, `per_axis` of each axis that it has; the same ones every time."""
    ranked = [tile for _, tile in ranked_tiles(conv, schedule_of(algorithm), host())]
    draw = random.Random(f"{conv} {algorithm}")
    tiles = [ranked[0]]
    for windows in (False, True):  # what a vector holds
        of_axis = [tile for tile in ranked[1:] if bool(tile.features().get("windows")) == windows]
        tiles += draw.sample(of_axis, min(per_axis, len(of_axis)))
    return tiles
