"""Process that builds deliberately broken kernels and judges them.

The tuner's check judges those of CPUs (`broken_cpu`), as before it times a kernel; the emulator judges CUDA kernels (`broken_cuda`), and
what the reconstructor asks judges reconstructions (`broken_units`).
"""

from __future__ import annotations

import math
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import broken_cpu
import broken_cuda
import broken_units
import numpy as np
from broken_cpu import Broken, WrongPack
from broken_cuda import BrokenCuda
from broken_units import BrokenUnit
from oracle import Array, Tensors
from schedules_dot import dot_tensors

from im2win.common.worker_pool import serve
from im2win.numerics.reference import typed_tensors
from im2win.runtime.libraries import load_kernel
from im2win.runtime.tensors import aligned, argument
from im2win.spec.conv2d import Conv2d
from im2win.spec.dtypes import ELEMENT_TYPES
from im2win.spec.symbols import SYMBOL
from im2win.tuner.runners.cpu import Bench, Candidate, Kernel, checked_fully
from im2win.tuner.runners.tensors import special

SEED = 11
ORDERS = range(12)  # seeds of the emulator
RANDOM = 4  # random tensors with which kernels that pass the check are compared with the right one, beside the basis


@dataclass(frozen=True)
class Verdict:
    """What the check says of a kernel.

    outcome: "ok" (of a kernel without a mistake), "caught", "refused" (it does not compile), "equivalent" or "missed".
    why: what the check found, or why the kernel is equivalent: its program is the same, or its outputs are on a basis of all inputs.
    """

    outcome: str
    why: str = ""


class Judge:
    """Keeps the right kernel of each layer."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.right: dict[int, tuple[Conv2d, Path, Any, str]] = {}

    def _right(self, layer: int) -> tuple[Conv2d, Path, Any, str]:
        if layer not in self.right:
            path = self.folder / f"right-{layer}.so"
            conv, pack, fingerprint = broken_cpu.build(layer, path)
            self.right[layer] = conv, path, pack, fingerprint
        return self.right[layer]

    def __call__(self, job: Broken | BrokenCuda | BrokenUnit | int | str) -> Verdict:
        """Judges a broken kernel; of a layer's number, or of a CUDA kernel's name, the kernel without a mistake."""
        if isinstance(job, BrokenUnit):
            return _verified(job)
        if isinstance(job, BrokenCuda | str):
            return _emulated(job)
        layer = job if isinstance(job, int) else job.layer
        conv, right, right_pack, right_fingerprint = self._right(layer)
        path, pack = right, right_pack
        if isinstance(job, Broken):
            path = self.folder / "broken.so"
            try:
                _, pack, fingerprint = broken_cpu.build(job, path)
            except Exception as error:  # whatever TVM says of a program that makes no sense
                return Verdict("refused", f"{type(error).__name__}: {str(error)[:200]}")
            if fingerprint == right_fingerprint and not isinstance(pack, WrongPack):
                return Verdict("equivalent", "the same program")
        try:
            bench, candidate = Bench(conv, SEED), Candidate(path, pack)
            kernel = Kernel(bench, candidate)
            message, _ = checked_fully(bench, candidate, kernel)
            if message or isinstance(job, int):
                return Verdict("caught" if message else "ok", message)
            differs = self._difference(conv, (path, pack), (right, right_pack))
            return Verdict("missed", differs) if differs else Verdict("equivalent", "the same outputs on a basis")
        finally:
            if isinstance(job, Broken):
                path.unlink(missing_ok=True)

    def _difference(self, conv: Conv2d, one: tuple[Path, Any], other: tuple[Path, Any]) -> str:
        """The first tensors on which two kernels differ, "" if they agree.

            Sums are linear in the input, so inputs of a single element show every product that a kernel takes; weights are all different.
        """
        functions = [load_kernel(path)[SYMBOL] for path, _ in (one, other)]
        for number in range(RANDOM + math.prod(conv.input_shape)):
            tensors = dot_tensors(conv, SEED + number) if number < RANDOM else _single(conv, number - RANDOM)
            first, second = (_called(conv, run, pack, tensors) for run, (_, pack) in zip(functions, (one, other), strict=True))
            if first.tobytes() != second.tobytes():
                return f"random tensors {number}" if number < RANDOM else f"the input {number - RANDOM} alone"
        return ""


def _emulated(job: BrokenCuda | str) -> Verdict:
    """Runs a CUDA kernel in the emulator, in different orders of its threads; with the tensors of a GPU's check if it requantises."""
    import emulated

    from im2win.schedules.cuda.mma import mma_sync

    mma_sync.restored = lambda products: 1.0  # sums of two TF32 parts are then exact, as sums of the others are
    key, kernel, _ = broken_cuda.ALL[job if isinstance(job, str) else job.kernel]
    conv = Conv2d.parse(key)
    given = [make(conv, SEED) for make in (typed_tensors, *special(conv).values())] if conv.requantised else None
    wrong = emulated.goes_wrong(conv, kernel, str if isinstance(job, str) else broken_cuda.edit_of(job), ORDERS, given)
    return Verdict("caught" if wrong else "ok" if isinstance(job, str) else "missed")


def _verified(job: BrokenUnit) -> Verdict:
    reason = broken_units.objection(job)
    if reason or not job.mistake:
        return Verdict("caught" if reason else "ok", reason)
    why = broken_units.EQUIVALENT.get(str(job), "")
    return Verdict("equivalent" if why else "missed", why)


def _single(conv: Conv2d, place: int) -> Tensors:
    """An input of one element that is not zero; weights that differ from each other."""
    tensors = dot_tensors(conv, SEED)
    data = np.full(math.prod(conv.input_shape), conv.zero_point, conv.dtypes["data"])
    data[place] = conv.zero_point + 1 if conv.zero_point < 127 or conv.dtype == "uint8" else conv.zero_point - 1
    count = math.prod(conv.filter_shape)
    weights = np.arange(count) % (127 if conv.itemsize < 4 else count) + 1  # exact in every type
    return tensors | {"data": data.reshape(conv.input_shape), "filter": weights.reshape(conv.filter_shape).astype(conv.dtypes["filter"])}


def _called(conv: Conv2d, run: Any, pack: Any, tensors: Tensors) -> Array:
    given = dict(tensors) | {"filter": pack.filter(conv, tensors["filter"])}
    given |= {"bias": pack.bias(conv, tensors["bias"])} if conv.bias else {}
    y = aligned(np.full(conv.output_shape, ELEMENT_TYPES[conv.out_dtype].poisons[0]).astype(conv.out_dtype))
    arrays = [aligned(given[name]) for name in conv.arguments[:-1]]
    run(*map(argument, [*arrays, y]))
    return y


def main(job_fd: int, result_fd: int) -> None:
    """Entry point of the process."""
    judge: Any = Judge()
    serve(judge, job_fd, result_fd)
