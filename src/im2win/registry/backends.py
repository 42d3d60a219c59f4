"""What differs between a CPU and a GPU for whoever ranks, tunes, looks up or builds: one object of this kind per device."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from im2win.codegen import cuda as codegen_cuda
from im2win.codegen import llvm
from im2win.device.cpu import Machine, usable_cpus
from im2win.device.gpu import Gpu, alike_gpus, device_gpu
from im2win.registry import cpu_lowering, cuda_lowering
from im2win.registry.schedules import SCHEDULES, Schedule
from im2win.schedules.cuda.arithmetic import PRODUCTS
from im2win.spec import objective
from im2win.spec.accuracy import Accuracy, allows
from im2win.spec.conv2d import Conv2d

Device = Machine | Gpu

TARGETS = ("cpu", "cuda")
Tile = Any
"""`schedules.cpu.tile.Tile`, `DepthwiseTile` or `WinogradTile` of the folders beside it, or a `schedules.cuda.tiles.base.CudaTile`."""


def check_target(target: str) -> None:
    """Raises ValueError for a target that no schedule is for."""
    if target not in TARGETS:
        raise ValueError(f"`target` (={target!r}) must be one of {', '.join(TARGETS)}.")


def device_for(target: str, threads: int | None = None) -> Device:
    """This machine's CPU or first GPU.

    Raises:
        ValueError: unknown target, or `threads` for a GPU. NoGpuError: no usable GPU.
    """
    check_target(target)
    if target == "cpu":
        return Machine.host(threads)
    if threads is not None:
        raise ValueError(f"`threads` (={threads!r}) is for target cpu; a GPU's kernels choose their own.")
    return device_gpu()


@dataclass(frozen=True)
class Kernel:
    """What was compiled: its fingerprint (`im2win.records.emission`), and the bytes of what it takes beside its arguments.

    That is, on a CPU, what a call allocates and what packed filters grow by; on a GPU, the tensor that a call makes before the product.
    """

    extra_bytes: int
    fingerprint: str


class Backend(Protocol):
    """A device with its schedules.

    target: kind of target; name: the device's folder in a log; threads: of the CPU that run a kernel; workers: processes that build.
    """

    target: str
    name: str
    threads: int
    workers: int
    runner: str

    def check_tools(self) -> None: ...
    def measurement_slots(self) -> list[dict[str, str]]: ...
    def tile(self, row: Schedule, values: Mapping[str, Any]) -> Tile: ...
    def ranked(self, conv: Conv2d, row: Schedule) -> list[tuple[float, Tile]]: ...
    def floor(self, conv: Conv2d, row: Schedule) -> float: ...
    def cost(self, conv: Conv2d, row: Schedule, tile: Tile) -> float: ...
    def features(self, conv: Conv2d, row: Schedule, tile: Tile, cost: float) -> list[float]: ...
    def shape(self, row: Schedule, tile: Tile) -> tuple[Any, ...]: ...
    def violations(self, conv: Conv2d, row: Schedule, tile: Tile) -> list[str]: ...
    def pack(self, conv: Conv2d, row: Schedule, tile: Tile) -> Any: ...
    def workspace_bytes(self, conv: Conv2d, row: Schedule, tile: Tile) -> int: ...
    def build(self, conv: Conv2d, row: Schedule, tile: Tile, path: Path) -> Kernel: ...
    def accuracy(self, tile: Tile) -> Accuracy: ...
    def proven(self, conv: Conv2d, tile: Tile) -> bool: ...
    def alike(self, conv: Conv2d, other: Conv2d) -> bool: ...


CPU_TILE_FEATURES = ("windows", "lanes", "vectors", "rows", "cols", "row_block", "cvu", "uvc", "unroll", "outputs")
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
            *(known.get(name, 0) for name in CPU_TILE_FEATURES), tile.accumulators, tile.accumulators / self.machine.registers,
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


_MANY_WINDOWS = 1 << 15
GPU_TILE_FEATURES = (
    "slabs", "stages", "images", "rows", "cols", "channel_planes", "outputs", "sync_free", "shmem", "llc", "wave", "cluster", "pingpong",
    "taps", "filter_stages", "filter_blocks",
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
        self.workers = max(1, usable_cpus() - 1)

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
        plain = [conv.stride[1], conv.layout == "NHWC", *(known.get(name, 0) for name in GPU_TILE_FEATURES)]
        kinds = [tile.product == product for product in PRODUCTS] + [row.key == name for name in SCHEDULES]
        return [*shares, *(math.log2(size) for size in sizes), *map(float, plain), *map(float, kinds)]

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


def backend_for(device: Device, accuracy: Accuracy = "float32") -> Backend:
    """The backend of a device."""
    return CudaBackend(device, accuracy) if isinstance(device, Gpu) else CpuBackend(device)


BackendOf = Callable[[Device], Backend]
