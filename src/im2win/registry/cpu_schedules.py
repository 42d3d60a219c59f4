"""How a row of the registry is scheduled on CPUs: its tiles, which are legal and worth a trial, what they cost, and their kernels.

A row names one of these beside its definition; whoever ranks, tunes, builds or looks up asks the row's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from im2win.codegen.llvm import any_alignment, kernel_module
from im2win.device.cpu import Machine
from im2win.schedules.cpu import legality, model
from im2win.schedules.cpu import space as windows_space
from im2win.schedules.cpu.kernel import Plan, schedule
from im2win.schedules.cpu.padding import padding_changes
from im2win.schedules.cpu.products import change_loops
from im2win.schedules.cpu.reload import fence, with_fence
from im2win.schedules.cpu.tile import Tile
from im2win.schedules.cpu_depthwise import kernel as depthwise_cpu
from im2win.schedules.cpu_depthwise import legality as depthwise_legality
from im2win.schedules.cpu_depthwise import model as depthwise_model
from im2win.schedules.cpu_depthwise import space as depthwise_space
from im2win.schedules.cpu_depthwise.tile import DepthwiseTile
from im2win.schedules.cpu_dot import kernel as dot_cpu
from im2win.schedules.cpu_dot import legality as dot_legality
from im2win.schedules.cpu_dot import model as dot_model
from im2win.schedules.cpu_dot import space as dot_space
from im2win.schedules.cpu_dot.tile import DotTile
from im2win.schedules.cpu_winograd import kernel as winograd_cpu
from im2win.schedules.cpu_winograd import legality as winograd_legality
from im2win.schedules.cpu_winograd import model as winograd_model
from im2win.schedules.cpu_winograd import space as winograd_space
from im2win.schedules.cpu_winograd.tile import WinogradTile
from im2win.schedules.plain import PlainTile
from im2win.spec.conv2d import Conv2d
from im2win.spec.symbols import SYMBOL

FLOAT32 = ("float32",)


class Scheduler(Protocol):
    """A kind of CPU schedule.

    family: its name; algorithms of one family are scheduled by the same code.
    exact: whether outputs round as sums of products do, no more.
    dtypes: element types of the problems that it computes.

    Tiles are values of the family's own type; all have `as_dict`, `pack` and the properties of `schedules.tile.Tile` that tell tiles apart.
    """

    @property
    def family(self) -> str: ...
    @property
    def exact(self) -> bool: ...
    @property
    def dtypes(self) -> tuple[str, ...]: ...
    def unsupported_reason(self, conv: Conv2d) -> str | None: ...
    def tile(self, values: Mapping[str, Any]) -> Any: ...
    def space(self, conv: Conv2d, machine: Machine) -> list[Any]: ...
    def violations(self, conv: Conv2d, tile: Any, machine: Machine) -> list[str]: ...
    def estimate(self, conv: Conv2d, tile: Any, machine: Machine, stored: int) -> Any: ...
    def module(self, conv: Conv2d, row: Any, tile: Any) -> Any: ...
    def held_bytes(self, conv: Conv2d, tile: Any) -> int: ...


@dataclass(frozen=True)
class Windows:
    """Windows times filters: schedules/cpu/kernel.py.

    plan: how the schedule treats the algorithm's transform, for this problem.
    row_block_elements: elements that a row block of `rows` output rows stages beside the product; (conv, rows) -> count.
    """

    plan: Callable[[Conv2d], Plan]
    row_block_elements: Callable[[Conv2d, int], int]
    family = "windows"
    exact = True
    dtypes = FLOAT32

    def unsupported_reason(self, conv: Conv2d) -> str | None:
        """Why no tile suits a problem: there is always one."""
        return None

    def tile(self, values: Mapping[str, Any]) -> Any:
        """A tile from its plain values; ValueError if they are none."""
        return Tile.from_dict(values)

    def space(self, conv: Conv2d, machine: Machine) -> list[Any]:
        """Every tile worth a trial."""
        return list(windows_space.space(conv, machine, matrix=self.plan(conv).matrix))

    def violations(self, conv: Conv2d, tile: Any, machine: Machine) -> list[str]:
        """Every rule that a tile breaks."""
        return legality.violations(conv, tile, machine, matrix=self.plan(conv).matrix)

    def estimate(self, conv: Conv2d, tile: Any, machine: Machine, stored: int) -> Any:
        """The model's `schedules.model.Estimate`; `stored` are the elements of the whole transformed tensor."""
        plan = self.plan(conv)
        staged = stored if plan.where == "root" else self.row_block_elements(conv, tile.row_block)
        return model.estimate(conv, tile, machine, matrix=plan.matrix, where=plan.where, staged=staged, step=plan.step)

    def module(self, conv: Conv2d, row: Any, tile: Any) -> Any:
        """The scheduled module, one function `conv2d` over the tensors of `conv.arguments`; whether the tile is legal is not asked."""
        chunks = {"chunks": tile.chunks} if tile.chunks > 1 else {}
        tensors = row.define(conv, tile.pack, tile.row_block, **chunks)
        reloaded = tile.inputs == "reloaded"
        changes = [*padding_changes(conv, tile), *([fence] if reloaded else [])]
        module = change_loops(kernel_module(conv, schedule(conv, tensors, tile, self.plan(conv))), *changes)
        return with_fence(module) if reloaded else module

    def held_bytes(self, conv: Conv2d, tile: Any) -> int:
        """Bytes that packed filters take beyond the filters: a few of padding, not counted."""
        return 0


@dataclass(frozen=True)
class CudaOnly:
    """No schedule on CPUs: `unsupported_reason` says so for every problem, and the rest is never asked for."""

    family = "none"
    exact = False
    dtypes = FLOAT32

    def unsupported_reason(self, conv: Conv2d) -> str | None:
        """Why no tile suits a problem: there is none."""
        return "no CPU schedule"

    def _refused(self, *arguments: Any) -> Any:
        raise ValueError("the algorithm has no CPU schedule.")

    tile = space = violations = estimate = module = held_bytes = _refused


class OwnModules:
    """A scheduler whose tiles have a folder of their own, with modules that answer what is asked of it."""

    dtypes: ClassVar[tuple[str, ...]] = FLOAT32
    _tile: type[PlainTile]
    _legality: Any
    _space: Any
    _model: Any

    def unsupported_reason(self, conv: Conv2d) -> str | None:
        """Why no tile suits a problem; None if one does."""
        reason: str | None = self._legality.unsupported_reason(conv)
        return reason

    def tile(self, values: Mapping[str, Any]) -> Any:
        """A tile from its plain values; ValueError if they are none."""
        return self._tile.from_dict(values)

    def space(self, conv: Conv2d, machine: Machine) -> list[Any]:
        """Every tile worth a trial."""
        return list(self._space.space(conv, machine))

    def violations(self, conv: Conv2d, tile: Any, machine: Machine) -> list[str]:
        """Every rule that a tile breaks."""
        return list(self._legality.violations(conv, tile, machine))

    def estimate(self, conv: Conv2d, tile: Any, machine: Machine, stored: int) -> Any:
        """The model's `schedules.model.Estimate`."""
        return self._model.estimate(conv, tile, machine)


@dataclass(frozen=True)
class Winograd(OwnModules):
    """Winograd's minimal filtering: schedules/cpu_winograd/."""

    family = "winograd"
    exact = False
    _tile, _legality, _space, _model = WinogradTile, winograd_legality, winograd_space, winograd_model

    def module(self, conv: Conv2d, row: Any, tile: Any) -> Any:
        """The scheduled module; whether the tile is legal for a machine is not asked."""
        tensors = row.define(conv, tile.pack, tile.row_block, tile.images)
        return any_alignment(winograd_cpu.module(conv, tensors, tile, SYMBOL), conv.itemsize)

    def held_bytes(self, conv: Conv2d, tile: Any) -> int:
        """Bytes that packed filters take beyond the filters: t_h * t_w elements for kernel_h * kernel_w."""
        return winograd_cpu.held_bytes(conv, tile)


@dataclass(frozen=True)
class Depthwise(OwnModules):
    """Sums over the taps of depthwise layers: schedules/cpu_depthwise/."""

    family = "depthwise"
    exact = True
    _tile, _legality, _space, _model = DepthwiseTile, depthwise_legality, depthwise_space, depthwise_model

    def module(self, conv: Conv2d, row: Any, tile: Any) -> Any:
        """The scheduled module; whether the tile is legal for a machine is not asked."""
        return any_alignment(depthwise_cpu.module(conv, tile, SYMBOL), conv.itemsize)

    def held_bytes(self, conv: Conv2d, tile: Any) -> int:
        """Bytes that packed filters take beyond the filters: none."""
        return 0


@dataclass(frozen=True)
class DotProduct(OwnModules):
    """Dot products of words of channels, in int8, uint8, bfloat16 and float16: schedules/cpu_dot/."""

    family = "dot"
    exact = True
    dtypes: ClassVar[tuple[str, ...]] = dot_legality.DTYPES
    _tile, _legality, _space, _model = DotTile, dot_legality, dot_space, dot_model

    def module(self, conv: Conv2d, row: Any, tile: Any) -> Any:
        """The scheduled module; whether the tile is legal for a machine is not asked."""
        return any_alignment(dot_cpu.module(conv, tile, SYMBOL), 1)

    def held_bytes(self, conv: Conv2d, tile: Any) -> int:
        """Bytes that packed filters take beyond the filters: channels that fill words, wider elements, and offsets."""
        return dot_cpu.held_bytes(conv, tile)
