"""Facts about the GPU that a schedule is built for."""

from __future__ import annotations

import functools
import itertools
import os
import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """One CUDA device as a schedule sees it.

    Attributes:
        arch: the architecture that code is generated for.
        multiprocessors: their number.
        registers, shared, threads: of one multiprocessor: registers of 4 bytes, bytes of shared memory, threads.
        block_shared: bytes of shared memory that one thread block may use.
        clock_hz: under load.
        dram_bytes_s, l2_bytes_s: bandwidths that kernels reach.
    """

    brand: str
    arch: str
    multiprocessors: int
    registers: int
    shared: int
    block_shared: int
    threads: int
    clock_hz: float
    dram_bytes_s: float
    l2_bytes_s: float

    @property
    def warpgroups(self) -> bool:
        """Whether its tensor cores have wgmma."""
        return self.arch == "sm_90a"

    @property
    def name(self) -> str:
        """The device's slug, the folder of its tuning logs."""
        return "-".join(re.findall(r"[a-z0-9]+", self.brand.lower()))

    @property
    def capability(self) -> str:
        """Its compute capability, such as "9.0"."""
        digits = "".join(re.findall(r"\d", self.arch))
        return f"{digits[:-1]}.{digits[-1]}"


# Measured: copy bandwidth, and the sustained clock under load. Unknown values are estimated from the H200's ratios.
KNOWN = {
    gpu.name: gpu
    for gpu in (
        Gpu("NVIDIA H200", "sm_90a", 132, 65536, 233472, 232448, 2048, 1.75e9, 4.2e12, 5.5e12),
        Gpu("NVIDIA H100 80GB HBM3", "sm_90a", 132, 65536, 233472, 232448, 2048, 1.75e9, 3.0e12, 5.5e12),
    )
}
H200 = KNOWN["nvidia-h200"]


class NoGpuError(RuntimeError):
    """No CUDA device, or none that kernels can be generated for. The message says which."""


@functools.cache
def device_gpu(index: int = 0) -> Gpu:
    """The CUDA device with this number.

    Raises:
        NoGpuError: there is none, or its compute capability is below 8.0: kernels need asynchronous copies.
    """
    import tvm

    device = tvm.cuda(index)
    if not device.exist:
        raise NoGpuError(f"there is no CUDA device {index} on this machine.")
    capability = str(device.compute_version)
    major, minor = map(int, capability.split("."))
    brand = str(device.device_name)
    if major < 8:
        raise NoGpuError(f"{brand} has compute capability {capability}; generated kernels need 8.0 or newer.")
    known = KNOWN.get("-".join(re.findall(r"[a-z0-9]+", brand.lower())))
    if known is not None:
        return known
    block_shared = int(device.max_shared_memory_per_block)
    multiprocessors = int(device.multi_processor_count)
    share = multiprocessors / H200.multiprocessors
    return Gpu(
        brand=brand, arch=f"sm_{major}{minor}" + ("a" if major >= 9 else ""), multiprocessors=multiprocessors, registers=65536,
        shared=block_shared + 1024, block_shared=block_shared, threads=2048 if (major, minor) in ((8, 0), (9, 0)) else 1536,
        clock_hz=float(device.max_clock_rate) * 1e3, dram_bytes_s=H200.dram_bytes_s * share, l2_bytes_s=H200.l2_bytes_s * share,
    )  # fmt: skip


def alike_gpus() -> list[str]:
    """The CUDA devices of the first one's model, as `CUDA_VISIBLE_DEVICES` names them. A kernel tuned on one of them is tuned for all."""
    import tvm

    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    brands = [str(tvm.cuda(i).device_name) for i in itertools.takewhile(lambda i: tvm.cuda(i).exist, itertools.count())]
    alike = [i for i, brand in enumerate(brands) if brand == brands[0]]
    return [visible[i] if visible else str(i) for i in alike]
