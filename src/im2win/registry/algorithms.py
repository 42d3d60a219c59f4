"""The registry of convolution algorithms: one literal row each. A new algorithm is one file in compute/ and one row here."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from im2win.compute import direct, im2col, im2win, implicit_gemm, mcfa, mec, winograd
from im2win.numerics.winograd_tiling import refusal
from im2win.registry.schedules import CudaOnly, Scheduler, Windows, Winograd
from im2win.schedules.cpu.kernel import Plan, Where
from im2win.schedules.cuda.families.base import CudaFamily
from im2win.schedules.cuda.families.persistent import PersistentPlan
from im2win.schedules.cuda.families.split_k import SplitPlan
from im2win.schedules.cuda.families.warp_specialized import StreamedPlan
from im2win.schedules.cuda.kernels.output_parts import InParts
from im2win.schedules.cuda.plan import CudaPlan, WinogradPlan
from im2win.schedules.studies.winograd_tc.plan import TensorCorePlan
from im2win.spec.accuracy import Accuracy
from im2win.spec.conv2d import MAX_ELEMENTS, Conv2d

Define = Callable[..., list[Any]]


@dataclass(frozen=True)
class Algorithm:
    """One way to compute a convolution.

    define: the tensor-expression definition: (conv, pack, strip, what else the scheduler says) -> the kernel's tensors, output last.
    scheduler: how it is scheduled on CPUs.
    transform_bytes: bytes of the whole transformed tensor, the formula of its paper; 0 where none is ever stored.
    cuda: how CUDA kernels take its windows; None where they do not know it.
    """

    name: str
    title: str
    paper: str
    define: Define
    scheduler: Scheduler
    transform_bytes: Callable[[Conv2d], int]
    cuda: CudaPlan | None = None

    def stored_bytes(self, conv: Conv2d, target: str = "cpu") -> int:
        """Bytes of the transformed tensor on a target, of a part of it where only parts are ever stored; for what it supports."""
        return self.transform_bytes(conv) if target == "cpu" or self.cuda is None else self.cuda.transform_bytes(conv)

    def plan(self, conv: Conv2d) -> Plan:
        """How the schedule of windows treats its transform; TypeError for algorithms that another schedule serves."""
        if not isinstance(self.scheduler, Windows):
            raise TypeError(f"{self.name} is scheduled as {self.scheduler.family}, which has no such plan.")
        return self.scheduler.plan(conv)

    def supports(self, conv: Conv2d, target: str = "cpu", accuracy: Accuracy = "float32") -> str | None:
        """Why this algorithm cannot compute `conv` on `target` with that accuracy; None if it can."""
        if accuracy == "exact" and not self.scheduler.exact:
            return "it rounds more than a sum of products, which accuracy 'exact' leaves out"
        if target == "cuda":
            return self._supports_cuda(conv, accuracy)
        if target != "cpu":
            return f"no schedule for target {target!r}"
        if conv.dtype != "float32":
            return f"CPU schedules compute float32, not {conv.dtype}"
        return self.scheduler.unable(conv) or _too_large(self.stored_bytes(conv) // conv.itemsize)

    def _supports_cuda(self, conv: Conv2d, accuracy: Accuracy) -> str | None:
        if self.cuda is None:
            return "no CUDA schedule"
        if conv.out_dtype == "int32" and conv.activation == "silu":
            return "int8 sums are integers, which have no silu"
        if isinstance(self.cuda, CudaFamily) and (reason := self.cuda.unable(conv, accuracy)) is not None:
            return reason
        if isinstance(self.cuda, WinogradPlan) and (reason := refusal(conv, accuracy)) is not None:
            return reason
        if self.cuda.staged != "taps" and math.prod(conv.kernel) == 1:
            return "the windows of a 1x1 kernel share no taps: implicit_gemm copies them as well"
        return _too_large(self.stored_bytes(conv, "cuda") // conv.itemsize)


def _too_large(stored: int) -> str | None:
    return f"its transformed tensor would have {stored} elements, more than {MAX_ELEMENTS}" if stored > MAX_ELEMENTS else None


def _nothing(conv: Conv2d, rows: int) -> int:
    return 0


def _pad_rows(conv: Conv2d, rows: int) -> int:
    if not any(conv.padding):
        return 0
    return conv.in_channels * ((rows - 1) * conv.stride[0] + conv.window[0]) * conv.padded_size[1]


def _im2win_rows(conv: Conv2d, rows: int) -> int:
    return conv.in_channels * rows * conv.padded_size[1] * conv.kernel[0]


def _im2col_rows(conv: Conv2d, rows: int) -> int:
    return conv.in_channels * math.prod(conv.kernel) * rows * conv.output_size[1]


def _direct(conv: Conv2d) -> Plan:
    step = conv.stride[1]
    return Plan(direct.PAD, "strip", step=step) if any(conv.padding) else Plan(step=step)


def _im2win(where: Where) -> Callable[[Conv2d], Plan]:
    return lambda conv: Plan(im2win.IM2WIN, where, fused=((3, "u"),), step=conv.stride[1] * conv.kernel[0])


def _im2col(where: Where) -> Callable[[Conv2d], Plan]:
    return lambda conv: Plan(im2col.IM2COL, where, matrix=True, fused=((2, "uv"), (3, "x")))


def _implicit(conv: Conv2d) -> Plan:
    return _im2col("inline" if conv.pointwise else "strip")(conv)


def _mec(conv: Conv2d) -> Plan:
    return Plan(mec.LOWERED, "root", step=conv.padded_size[0] * conv.kernel[1])


def _mcfa(conv: Conv2d) -> Plan:
    return Plan(mcfa.BLOCK, "strip")


def _implicit_panel(conv: Conv2d, rows: int) -> int:
    return 0 if conv.pointwise else _im2col_rows(conv, rows)


ALGORITHMS: dict[str, Algorithm] = {
    row.name: row
    for row in (
        Algorithm(
            "direct",
            "direct",
            "thesis Alg. 1",
            direct.define,
            Windows(_direct, _pad_rows),
            direct.transform_bytes,
            CudaPlan(staged="rows"),
        ),
        Algorithm(
            "direct_persistent",
            "direct, blocks that stay",
            "Chetlur et al. 2014, CUTLASS' persistent kernels",
            direct.define,
            CudaOnly(),
            direct.transform_bytes,
            PersistentPlan(),
        ),
        Algorithm(
            "direct_streamed",
            "direct, filters and windows in steps",
            "Chetlur et al. 2014, CUTLASS' warp-specialised kernels",
            direct.define,
            CudaOnly(),
            direct.transform_bytes,
            StreamedPlan(),
        ),
        Algorithm(
            "im2win",
            "im2win, tensor stored",
            "thesis Alg. 2 and 3, arXiv 2306.14320",
            im2win.define,
            Windows(_im2win("root"), _nothing),
            im2win.transform_bytes,
            CudaPlan("ncmku"),
        ),
        Algorithm(
            "im2win_fused",
            "im2win, strip by strip",
            "thesis Alg. 2 and 3, transform inside the product",
            im2win.define,
            Windows(_im2win("strip"), _im2win_rows),
            direct.transform_bytes,
            CudaPlan(staged="windows"),
        ),
        Algorithm(
            "im2col",
            "im2col and product",
            "Chellapilla et al. 2006",
            im2col.define,
            Windows(_im2col("root"), _nothing),
            im2col.transform_bytes,
            CudaPlan("ncuvmx"),
        ),
        Algorithm(
            "implicit_gemm",
            "implicit GEMM",
            "Chetlur et al. 2014",
            implicit_gemm.define,
            Windows(_implicit, _implicit_panel),
            implicit_gemm.transform_bytes,
            CudaPlan(),
        ),
        Algorithm(
            "implicit_gemm_split",
            "implicit GEMM, the sum in parts",
            "split-K, Chetlur et al. 2014",
            implicit_gemm.define,
            CudaOnly(),
            SplitPlan().transform_bytes,
            SplitPlan(),
        ),
        Algorithm(
            "mec",
            "MEC",
            "Cho and Brand, arXiv 1706.06873",
            mec.define,
            Windows(_mec, _nothing),
            mec.transform_bytes,
            CudaPlan("ncxyv"),
        ),
        Algorithm(
            "mcfa",
            "MCFA, blocked im2col",
            "Fang and Chen 2019",
            mcfa.define,
            Windows(_mcfa, _im2col_rows),
            mcfa.transform_bytes,
            InParts("ncuvmx"),
        ),
        Algorithm(
            "winograd",
            "Winograd, strip by strip",
            "Lavin and Gray, arXiv 1509.09308",
            winograd.define,
            Winograd(),
            direct.transform_bytes,
            WinogradPlan(),
        ),
        Algorithm(
            "winograd_tc",
            "Winograd on tensor cores, fused",
            "partial kernel fusion, Lavin and Gray, arXiv 1509.09308",
            winograd.define,
            CudaOnly(),
            TensorCorePlan().transform_bytes,
            TensorCorePlan(),
        ),
    )
}


def algorithm(name: str) -> Algorithm:
    """The registry's row of that name.

    Raises:
        ValueError: there is none; the message names those there are.
    """
    if name not in ALGORITHMS:
        raise ValueError(f"`algorithm` (={name!r}) must be auto or one of {', '.join(ALGORITHMS)}.")
    return ALGORITHMS[name]


def candidates(name: str, conv: Conv2d, target: str = "cpu", accuracy: Accuracy = "float32") -> list[Algorithm]:
    """The algorithms that a request means: all that support the problem with that accuracy for "auto", else the named one.

    Raises:
        ValueError: an unknown name, or none supports the problem; the message holds the reasons.
    """
    rows = list(ALGORITHMS.values()) if name == "auto" else [algorithm(name)]
    reasons = {row.name: row.supports(conv, target, accuracy) for row in rows}
    able = [row for row in rows if reasons[row.name] is None]
    if not able:
        raise ValueError(f"no algorithm computes {conv} on {target!r}: " + "; ".join(f"{n}: {why}" for n, why in reasons.items()))
    return able
