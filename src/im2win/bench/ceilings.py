"""Measures the machine's ceilings, the two sides of the roofline: peaks of arithmetic and copy bandwidth.

They run like any subject of a benchmark (bench/harness.py): in a separate process, warmed up by time, on the same number of threads.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from im2win.bench import product_peak
from im2win.bench.harness import Worker
from im2win.bench.peers.subject import Subject, Tensors, Trial
from im2win.codegen.llvm import llvm_target
from im2win.common.files import default_folder, replace_json
from im2win.device.cpu import Machine
from im2win.spec.conv2d import Conv2d
from im2win.spec.dtypes import ELEMENT_TYPES

_log = logging.getLogger(__name__)
COPY_BYTES = 512 << 20  # bytes read plus written; more than the level-3 cache of any CPU that was measured (the largest reports 480 MB)
CHAINS = 12  # independent accumulators of a thread; two FMA units of latency four need eight
STEPS = 1_000_000  # some milliseconds a call, so that waking threads does not count
PRODUCT_STEPS = 200_000  # likewise
KEPT_DAYS = 7
PROCESSES = 2  # in one of them, the caller may share a CPU with a thread that it waits for


@dataclass(frozen=True)
class Ceilings:
    """The machine's ceilings.

    fma_gflops: float32 GFLOPS of fused multiply-adds. copy_gbs: GB/s of a copy, bytes read plus bytes written.
    products: GFLOPS of the machine's fastest products in narrower types, by the names in `ElementType.ceilings`, where it has instructions
        for them and they were measured.
    """

    fma_gflops: float
    copy_gbs: float
    products: dict[str, float] = field(default_factory=dict)

    @property
    def by_name(self) -> dict[str, float]:
        """All of them, as a result file holds them."""
        return {"fma_gflops": self.fma_gflops, "copy_gbs": self.copy_gbs, **self.products}

    def gflops(self, dtype: str) -> float:
        """The arithmetic ceiling of an element type."""
        return next((self.products[name] for name in ELEMENT_TYPES[dtype].ceilings if name in self.products), self.fma_gflops)

    def floor_ms(self, conv: Conv2d) -> float:
        """Least time of direct convolution in ms: its arithmetic at the peak, or each tensor moved once at copy bandwidth.

        A layer whose tensors stay in a cache between calls can be faster than the second bound.
        """
        return max(conv.flops / self.gflops(conv.dtype), conv.bytes_moved / self.copy_gbs) / 1e6


@dataclass(frozen=True)
class FmaPeak:
    """Fused multiply-adds between vector registers, and nothing else, on every thread."""

    name: str = "fma peak"

    def prepare(self, conv: Conv2d, tensors: Tensors, threads: int) -> Trial:
        import tvm

        machine = Machine.host(threads)
        kernel = fma_kernel(threads, machine.lanes, machine.mcpu)
        factors = np.random.default_rng(0).uniform(0.25, 0.75, (threads, machine.lanes)).astype(np.float32)
        sums = np.full((threads, CHAINS, machine.lanes), np.nan, np.float32)
        held = [tvm.runtime.tensor(array, tvm.cpu()) for array in (factors, sums)]
        return Trial(lambda: kernel(*held), held[1].numpy)


@dataclass(frozen=True)
class ProductPeak:
    """Products in an element type between vector or tile registers, and nothing else, on every thread."""

    dtype: str

    @property
    def name(self) -> str:
        """Its name as a subject."""
        return f"{self.dtype} peak"

    def prepare(self, conv: Conv2d, tensors: Tensors, threads: int) -> Trial:
        import tvm

        machine = Machine.host(threads)
        one = product_peak.fastest(self.dtype, machine)
        assert one is not None
        kernel = tvm.compile(product_peak.module(self.dtype, one, machine, PRODUCT_STEPS), llvm_target(machine))
        sums = np.ones(threads * product_peak.SUM_WORDS, one.sums)  # a sum may be a factor
        held = [tvm.runtime.tensor(array, tvm.cpu()) for array in (np.ones(128, np.uint8), sums)]
        return Trial(lambda: kernel(*held), held[1].numpy)


@dataclass(frozen=True)
class Copy:
    """A copy of half of `COPY_BYTES` to the other half, one slice for each thread."""

    name: str = "copy"

    def prepare(self, conv: Conv2d, tensors: Tensors, threads: int) -> Trial:
        source, target = (np.full(COPY_BYTES // 2 // 4, value, np.float32) for value in (1.0, 0.0))
        slices = list(zip(np.array_split(target, threads), np.array_split(source, threads), strict=True))
        pool = ThreadPoolExecutor(threads)

        def call() -> None:
            for _ in pool.map(lambda pair: np.copyto(*pair), slices):
                pass

        return Trial(call, lambda: target[:: max(1, target.size // 1024)])


def fma_kernel(threads: int, lanes: int, mcpu: str) -> Any:
    """A compiled function that sets sums = sums * factors + factors `STEPS` times.

    Its arguments are factors, float32 [threads, lanes], and sums, float32 [threads, CHAINS, lanes]. All chains share one vector of factors,
    so that chains and factors fit the sixteen vector registers of AVX2. The recurrence prevents the compiler from removing work. Its limit
    is f / (1 - f), so no value is special.
    """
    import tvm
    from tvm import te
    from tvm.s_tir import Schedule

    horner = te.comm_reducer(lambda x, y: x * y + y, lambda dtype: tvm.tirx.const(0, dtype), name="horner")
    factors = te.placeholder((threads, lanes), "float32", name="factors")
    k = te.reduce_axis((0, STEPS), "k")
    sums = te.compute((threads, CHAINS, lanes), lambda t, c, i: horner(factors[t, i], axis=k), name="sums")
    schedule = Schedule(te.create_prim_func([factors, sums]))
    block = schedule.get_sblock("sums")
    thread, chain, lane, step = schedule.get_loops(block)
    schedule.reorder(thread, step, chain, lane)
    schedule.reverse_compute_at(schedule.cache_write(block, 0, "local"), thread)
    schedule.parallel(thread)
    schedule.unroll(chain)
    schedule.vectorize(lane)
    zero = schedule.get_loops(schedule.decompose_reduction(block, step))
    schedule.unroll(zero[-2])
    schedule.vectorize(zero[-1])
    return tvm.compile(schedule.mod, tvm.target.Target({"kind": "llvm", "mcpu": mcpu, "num-cores": threads}))


def measure(threads: int, repeats: int = 15, seconds_warmup: float = 0.5, dtypes: Collection[str] = ()) -> Ceilings:
    """Measures the ceilings. Each is the best of `repeats` measurements in `PROCESSES` processes, since a ceiling is an upper bound.

    Args:
        dtypes: element types whose products are measured, too, where the machine has instructions for them.
    """

    def best(subject: Subject) -> float:
        return min(least(subject) for _ in range(PROCESSES))

    def least(subject: Subject) -> float:
        with Worker(subject, threads) as worker:
            worker.prepare(Conv2d(1, 1, 1, 1, 1, 1), seed=0)  # the layer is not used
            worker.warm(seconds_warmup)
            return min(worker.sample(settle=0.01, calls=1) for _ in range(repeats))

    machine = Machine.host(threads)
    products: dict[str, float] = {}
    for dtype in dtypes:
        if (one := product_peak.fastest(dtype, machine)) is not None:
            done = threads * product_peak.operations(one, machine) * PRODUCT_STEPS
            products[ELEMENT_TYPES[dtype].ceilings[0]] = done / best(ProductPeak(dtype)) / 1e9
    flops = 2.0 * threads * CHAINS * machine.lanes * STEPS
    return Ceilings(fma_gflops=flops / best(FmaPeak()) / 1e9, copy_gbs=COPY_BYTES / best(Copy()) / 1e9, products=products)


def kept(threads: int, dtypes: Collection[str] = ()) -> Ceilings:
    """What `measure` found on this machine in the last `KEPT_DAYS`, with the same versions; else measured now, and kept in the cache.

    For what tells a person how far a kernel is from a roof. Results are measured beside their own ceilings.
    """
    import tvm

    from im2win import __version__

    machine = Machine.host(threads)
    names = {ELEMENT_TYPES[dtype].ceilings[0] for dtype in dtypes if product_peak.fastest(dtype, machine) is not None}
    path, versions = default_folder() / machine.name / "ceilings.json", [__version__, str(tvm.__version__)]
    found = _read(path, versions)
    if found is not None and names <= set(found.products):
        return found
    made = measure(threads, dtypes=dtypes)
    if found is not None:
        made = replace(made, products={**found.products, **made.products})
    try:
        replace_json(path, {"versions": versions, "made": time.time(), "ceilings": made.by_name})
    except OSError as error:
        _log.info("ceilings are not kept (%s): the next explanation measures them again", error)
    return made


def _read(path: Path, versions: list[str]) -> Ceilings | None:
    """Ceilings that were kept; None where there are none, or they are of other versions or old."""
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
        age, speeds = time.time() - read["made"], {str(name): float(speed) for name, speed in read["ceilings"].items()}
        if read["versions"] != versions or not 0 <= age < KEPT_DAYS * 86400 or not all(0 < one < math.inf for one in speeds.values()):
            return None
        return Ceilings(speeds.pop("fma_gflops"), speeds.pop("copy_gbs"), speeds)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
