"""CPUs behind the interface that ranking, tuning, look-up and building use (`im2win.registry.interface`)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from im2win.codegen import llvm
from im2win.device.cpu import Machine
from im2win.registry import cpu_lowering
from im2win.registry.interface import Kernel, Tile
from im2win.registry.schedules import SCHEDULES, Schedule
from im2win.spec.accuracy import Accuracy
from im2win.spec.conv2d import Conv2d

TILE_FEATURES = (
    "windows", "lanes", "vectors", "rows", "cols", "row_block", "cvu", "uvc", "unroll", "chunks", "skipped", "reloaded", "outputs",
)  # fmt: skip
"""What a CPU tile may say of itself in `features`, for one cost model of all families; 0 of those that it does not have."""


class CpuBackend:
    """A CPU: vectorized, parallel, unrolled loops."""

    target = "cpu"
    runner = "im2win.tuner.runners.cpu"

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.name, self.threads, self.workers = machine.name, machine.threads, machine.threads

    def check_tools(self) -> None:
        """Nothing is needed but what is installed with the package."""

    def measurement_slots(self) -> list[dict[str, str]]:
        """Where kernels can be measured at the same time without disturbing each other: environments of a measuring process."""
        return [{"TVM_NUM_THREADS": str(self.threads)}]

    def tile(self, row: Schedule, values: Mapping[str, Any]) -> Tile:
        """A tile from its plain values."""
        return row.scheduler.tile(values)

    def _estimate(self, conv: Conv2d, row: Schedule, tile: Tile) -> Any:
        return row.scheduler.estimate(conv, tile, self.machine, row.transform_bytes(conv) // conv.itemsize)

    def cost(self, conv: Conv2d, row: Schedule, tile: Tile) -> float:
        """The model's estimate of a tile, memory priced in."""
        return float(self._estimate(conv, row, tile).cost)

    def floor(self, conv: Conv2d, row: Schedule) -> float:
        """A cost that no tile of an algorithm's space is below; not known on CPUs."""
        return 0.0

    def ranked(self, conv: Conv2d, row: Schedule) -> list[tuple[float, Tile]]:
        """An algorithm's space with the model's estimates, best first; ties keep the space's order."""
        tiles = row.scheduler.space(conv, self.machine)
        return sorted(((self.cost(conv, row, tile), tile) for tile in tiles), key=lambda pair: pair[0])

    def features(self, conv: Conv2d, row: Schedule, tile: Tile, cost: float) -> list[float]:
        """Numbers that tell tiles apart, most of them shares and logarithms, so that layers can learn from each other."""
        parts = self._estimate(conv, row, tile)
        total = parts.product + parts.write_back + parts.stage + parts.cache + parts.memory
        shares = [parts.product / total, parts.write_back / total, parts.stage / total, parts.cache / total, parts.memory / total]
        depth = math.prod(conv.filter_shape[1:])
        sizes = [depth, conv.output_size[0], conv.output_size[1], conv.out_channels, conv.batch, depth * tile.block, conv.kernel[1]]
        known = tile.features()
        plain = [
            *(known.get(name, 0) for name in TILE_FEATURES), tile.accumulators, tile.accumulators / self.machine.registers,
            parts.imbalance, conv.stride[1], any(conv.padding),
        ]  # fmt: skip
        names = [row.key == name for name in SCHEDULES]
        return [*shares, *(math.log2(size) for size in sizes), math.log2(tile.pass_blocks), *map(float, plain), *map(float, names)]

    def shape(self, row: Schedule, tile: Tile) -> tuple[Any, ...]:
        """Deduplication key of the first population."""
        key: tuple[Any, ...] = tile.deduplication_key
        return key

    def violations(self, conv: Conv2d, row: Schedule, tile: Tile) -> list[str]:
        """Every rule that a tile breaks."""
        return row.scheduler.violations(conv, tile, self.machine)

    def pack(self, conv: Conv2d, row: Schedule, tile: Tile) -> Any:
        """How filters are packed for a tile."""
        return tile.pack

    def workspace_bytes(self, conv: Conv2d, row: Schedule, tile: Tile) -> int:
        """None: a call allocates what it needs."""
        return 0

    def build(self, conv: Conv2d, row: Schedule, tile: Tile, path: Path) -> Kernel:
        """Compiles into the library `path`."""
        compiled = llvm.compile_module(cpu_lowering.lower(conv, row, tile, self.machine), self.machine)
        compiled.export(path)
        return Kernel(compiled.allocated + row.scheduler.held_bytes(conv, tile), compiled.fingerprint)

    def accuracy(self, tile: Tile) -> Accuracy:
        """The arithmetic of a tile's kernel."""
        return "float32"

    def proven(self, conv: Conv2d, tile: Tile) -> bool:
        """Whether a tile that nobody tuned for this problem may be used."""
        return True

    def alike(self, conv: Conv2d, other: Conv2d) -> bool:
        """Whether a tile that was tuned for the other layer, of the same family, is expected to do better than the model's."""
        return True
