"""GPUs behind the interface that ranking, tuning, look-up and building use (`im2win.registry.interface`)."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from im2win.codegen import cuda as codegen_cuda
from im2win.codegen import llvm
from im2win.device.cpu import usable_cpus
from im2win.device.gpu import Gpu, alike_gpus
from im2win.registry import cuda_lowering
from im2win.registry.interface import Kernel, Tile
from im2win.registry.schedules import SCHEDULES, Schedule
from im2win.schedules.cuda.arithmetic import PRODUCTS
from im2win.spec import objective
from im2win.spec.accuracy import Accuracy, allows
from im2win.spec.conv2d import Conv2d

_MANY_WINDOWS = 1 << 15
TILE_FEATURES = (
    "slabs", "stages", "images", "rows", "cols", "channel_planes", "outputs", "sync_free", "shmem", "llc", "wave", "cluster", "pingpong",
    "taps", "filter_stages", "filter_blocks", "fetched", "windows_staged",
)  # fmt: skip
"""What a `CudaTile` may say of itself in `features`, for one cost model of all families; 0 of those that it does not have."""


class CudaBackend:
    """A GPU: block tiles, shared memory, register tiles, tensor cores.

    Args:
        accuracy: "exact" keeps to IEEE float32; "float32" allows sums of TF32 products that are as accurate; "tf32" TF32 itself;
            "winograd" tiles transformed in float16 and int8, too, where problems otherwise have one arithmetic only.
    """

    target = "cuda"
    runner = "im2win.tuner.runners.cuda"
    threads = 1

    def __init__(self, gpu: Gpu, accuracy: Accuracy = "float32") -> None:
        self.gpu, self._accuracy = gpu, accuracy
        self.name = gpu.name

    @property
    def workers(self) -> int:
        """Processes that build: one CPU is left for the one that measures."""
        return max(1, usable_cpus() - 1)

    def check_tools(self) -> None:
        """Raises ToolchainError unless kernels can be compiled and measured here: without, every trial would fail for the same reason."""
        codegen_cuda.compiler()
        if importlib.util.find_spec("torch") is None:
            raise llvm.ToolchainError("measuring on a GPU needs PyTorch with CUDA: pip install torch.")

    def measurement_slots(self) -> list[dict[str, str]]:
        """Where kernels can be measured at the same time: environments of a measuring process, one for every GPU like this one."""
        return [{"CUDA_VISIBLE_DEVICES": name} for name in alike_gpus()]

    def tile(self, row: Schedule, values: Mapping[str, Any]) -> Tile:
        """A tile from its plain values."""
        return row.on_gpu.tile(values)

    def cost(self, conv: Conv2d, row: Schedule, tile: Tile) -> float:
        """The model's estimate of a tile in seconds, memory priced in."""
        return objective.cost(conv, row.on_gpu.estimate(conv, tile, self.gpu).seconds, self.workspace_bytes(conv, row, tile))

    def floor(self, conv: Conv2d, row: Schedule) -> float:
        """A cost that no tile of a schedule's space is below: its time alone, which the price of memory adds to."""
        return row.on_gpu.floor(conv, self.gpu, self._accuracy)

    def ranked(self, conv: Conv2d, row: Schedule) -> list[tuple[float, Tile]]:
        """A schedule's space with the model's estimates, best first; ties keep the space's order."""
        tiles = row.on_gpu.space(conv, self.gpu, self._accuracy)
        allowed = (tile for tile in tiles if allows(self._accuracy, tile.accuracy))
        return sorted(((self.cost(conv, row, tile), tile) for tile in allowed), key=lambda pair: pair[0])

    def features(self, conv: Conv2d, row: Schedule, tile: Tile, cost: float) -> list[float]:
        """Numbers that tell tiles apart, most of them shares and logarithms, so that layers can learn from each other."""
        parts, known = row.on_gpu.estimate(conv, tile, self.gpu), tile.features()
        shares = [parts.compute / parts.seconds, parts.cache / parts.seconds, parts.memory / parts.seconds]
        sizes = [
            math.prod(conv.filter_shape[1:]), *conv.output_size, conv.out_channels, conv.batch, tile.block_m, tile.block_n, tile.warp_m,
            tile.warp_n, tile.threads, parts.occupancy, parts.shared_bytes, tile.accumulators,
        ]  # fmt: skip
        plain = [conv.stride[1], conv.layout == "NHWC", *(known.get(name, 0) for name in TILE_FEATURES)]
        kinds = [tile.product == product for product in PRODUCTS] + [row.key == name for name in SCHEDULES]
        return [*shares, *(math.log2(max(size, 1)) for size in sizes), *map(float, plain), *map(float, kinds)]

    def shape(self, row: Schedule, tile: Tile) -> tuple[Any, ...]:
        """Deduplication key of the first population."""
        key: tuple[Any, ...] = tile.deduplication_key
        return key

    def violations(self, conv: Conv2d, row: Schedule, tile: Tile) -> list[str]:
        """Every rule that a tile breaks, this device's accuracy among them."""
        schedule = row.on_gpu
        if (reason := schedule.unsupported_reason(conv, self._accuracy)) is not None:
            return [reason]
        if broken := schedule.violations(conv, tile, self.gpu):
            return broken
        if not allows(self._accuracy, tile.arithmetic.accuracy):
            return [f"`product` (={tile.product}) needs `accuracy` {tile.arithmetic.accuracy}, not {self._accuracy}"]
        if not allows(self._accuracy, tile.accuracy):
            return [f"`outputs` (={tile.outputs}) of {tile.dtype} needs `accuracy` {tile.accuracy}, not {self._accuracy}"]
        return []

    def pack(self, conv: Conv2d, row: Schedule, tile: Tile) -> Any:
        """How filters are packed for a tile."""
        return row.on_gpu.pack(conv, tile)

    def workspace_bytes(self, conv: Conv2d, row: Schedule, tile: Tile) -> int:
        """Bytes beside its tensors that a call is given."""
        return row.on_gpu.workspace_bytes(conv, tile)

    def build(self, conv: Conv2d, row: Schedule, tile: Tile, path: Path) -> Kernel:
        """Compiles into the library `path`."""
        compiled = codegen_cuda.compile_module(cuda_lowering.lower(conv, row, tile, self.gpu), self.gpu)
        compiled.export(path)
        return Kernel(self.workspace_bytes(conv, row, tile), compiled.fingerprint)

    def accuracy(self, tile: Tile) -> Accuracy:
        """The arithmetic of a tile's kernel."""
        accuracy: Accuracy = tile.accuracy
        return accuracy

    def proven(self, conv: Conv2d, tile: Tile) -> bool:
        """Whether a tile that nobody tuned for this problem may be used."""
        return bool(tile.proven(conv))

    def alike(self, conv: Conv2d, other: Conv2d) -> bool:
        """Whether a tile that was tuned for the other layer, of the same family, is expected to do better than the model's.

        That takes the same channels, and as many windows, or so many that blocks occupy every multiprocessor in both layers.
        """
        if (conv.in_channels, conv.out_channels, conv.groups) != (other.in_channels, other.out_channels, other.groups):
            return False
        fewer, more = sorted(one.batch * math.prod(one.output_size) for one in (conv, other))
        return more <= 2 * fewer or fewer >= _MANY_WINDOWS
