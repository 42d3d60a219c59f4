"""The registry of schedules: how each algorithm runs on CPUs and on GPUs, one literal row each.

A row pairs an algorithm with what schedules it. Its key, such as "direct/persistent", names it in records, logs and results.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from im2win.compute import direct, im2col, im2win, mcfa, mec
from im2win.registry.algorithms import ALGORITHMS, Algorithm, Define
from im2win.registry.cpu_schedules import CudaOnly, Depthwise, DotProduct, Scheduler, Windows, Winograd
from im2win.schedules.cpu.kernel import Plan, Where
from im2win.schedules.cuda.families import depthwise, tma
from im2win.schedules.cuda.families.base import CudaSchedule
from im2win.schedules.cuda.families.multistage import Multistage, OutputParts
from im2win.schedules.cuda.families.scheduled import Scheduled
from im2win.schedules.cuda.families.split_k import SplitK
from im2win.schedules.cuda.families.winograd import WinogradBands
from im2win.schedules.cuda.kernels.output_parts import WindowsInParts
from im2win.schedules.cuda.scheduled.gemm import Stage
from im2win.schedules.cuda.windows import WindowSource
from im2win.schedules.studies.winograd_tc.family import TensorCores
from im2win.spec import methods, padding
from im2win.spec.accuracy import Accuracy
from im2win.spec.activations import activation_of
from im2win.spec.conv2d import MAX_ELEMENTS, Conv2d
from im2win.spec.dtypes import ELEMENT_TYPES


@dataclass(frozen=True)
class Schedule:
    """How an algorithm runs.

    algorithm: the mathematics. name: of the schedule. title: what it does, in a few words.
    cuda: how it runs on GPUs; None where it does not.
    scheduler: how it is scheduled on CPUs.
    formula: bytes of what it stores, where that is not the algorithm's whole transformed tensor.
    """

    algorithm: Algorithm
    name: str
    title: str
    cuda: CudaSchedule | None = None
    scheduler: Scheduler = CudaOnly()  # noqa: RUF009 - frozen, and without fields
    formula: Callable[[Conv2d], int] | None = None

    @property
    def key(self) -> str:
        """Algorithm and schedule in one word."""
        return methods.key(self.algorithm.name, self.name)

    @property
    def define(self) -> Define:
        """The algorithm's definition."""
        return self.algorithm.define

    def transform_bytes(self, conv: Conv2d) -> int:
        """Bytes of the whole tensor that it stores, by formula; 0 where it never stores one."""
        return (self.formula or self.algorithm.transform_bytes)(conv)

    def stored_bytes(self, conv: Conv2d, target: str = "cpu") -> int:
        """Bytes of the transformed tensor on a target, of a part of it where only parts are ever stored; for what it supports."""
        return self.transform_bytes(conv) if target == "cpu" or self.cuda is None else self.cuda.transform_bytes(conv)

    @property
    def on_gpu(self) -> CudaSchedule:
        """How it runs on GPUs; TypeError where it does not."""
        if self.cuda is None:
            raise TypeError(f"{self.key} has no CUDA schedule.")
        return self.cuda

    def plan(self, conv: Conv2d) -> Plan:
        """How a CPU schedule of windows treats the algorithm's transform; TypeError for other CPU schedules."""
        if not isinstance(self.scheduler, Windows):
            raise TypeError(f"{self.key} is scheduled as {self.scheduler.family}, which has no such plan.")
        return self.scheduler.plan(conv)

    def supports(self, conv: Conv2d, target: str = "cpu", accuracy: Accuracy = "float32") -> str | None:
        """Why this schedule cannot compute `conv` on `target` with that accuracy; None if it can."""
        if accuracy == "exact" and not (self.algorithm.exact and (target != "cpu" or self.scheduler.exact)):
            return "it rounds more than a sum of products, which accuracy 'exact' leaves out"
        if target == "cuda":
            return self._supports_cuda(conv, accuracy)
        if target != "cpu":
            return f"no schedule for target {target!r}"
        if self.scheduler.family != "none" and conv.dtype not in self.scheduler.dtypes:
            return f"its CPU schedule computes {', '.join(self.scheduler.dtypes)}, not {conv.dtype}"
        if ELEMENT_TYPES[conv.out_dtype].integer and not conv.requantised and not activation_of(conv.activation).integers:
            return f"int8 sums are integers, which have no {conv.activation}"
        return self.scheduler.unsupported_reason(conv) or _too_large(self.stored_bytes(conv) // conv.itemsize)

    def _supports_cuda(self, conv: Conv2d, accuracy: Accuracy) -> str | None:
        if self.cuda is None:
            return "no CUDA schedule"
        if "uint8" in (conv.dtype, conv.out_dtype):
            return "CUDA schedules have no uint8"
        if conv.zero_point or conv.out_zero_point:
            return "CUDA schedules have no zero points"
        if conv.own_steps:
            return "CUDA schedules add residuals in the steps of the output"
        if ELEMENT_TYPES[conv.out_dtype].integer and not conv.requantised and not activation_of(conv.activation).integers:
            return f"int8 sums are integers, which have no {conv.activation}"
        if ELEMENT_TYPES[conv.dtype].scaled and conv.dtype not in self.cuda.dtypes:
            return f"its CUDA schedule computes {', '.join(self.cuda.dtypes)}, not {conv.dtype}"
        if (reason := self.cuda.unsupported_reason(conv, accuracy)) is not None:
            return reason
        return _too_large(self.stored_bytes(conv, "cuda") // conv.itemsize)


def _too_large(stored: int) -> str | None:
    return f"its transformed tensor would have {stored} elements, more than {MAX_ELEMENTS}" if stored > MAX_ELEMENTS else None


def _nothing(conv: Conv2d, rows: int) -> int:
    return 0


def _pad_rows(conv: Conv2d, rows: int) -> int:
    if not any(conv.padding) or padding.skips(conv):
        return 0
    return conv.in_channels * ((rows - 1) * conv.stride[0] + conv.window[0]) * conv.padded_size[1]


def _im2win_rows(conv: Conv2d, rows: int) -> int:
    return conv.in_channels * rows * conv.padded_size[1] * conv.kernel[0]


def _im2col_rows(conv: Conv2d, rows: int) -> int:
    return conv.in_channels * math.prod(conv.kernel) * rows * conv.output_size[1]


def _direct(conv: Conv2d) -> Plan:
    step = conv.stride[1]
    if not any(conv.padding):
        return Plan(step=step)
    return Plan(direct.PAD, "inline" if padding.skips(conv) else "row_block", step=step)


def _im2win(where: Where) -> Callable[[Conv2d], Plan]:
    return lambda conv: Plan(im2win.IM2WIN, where, fused=((3, "u"),), step=conv.stride[1] * conv.kernel[0])


def _im2col(where: Where) -> Callable[[Conv2d], Plan]:
    return lambda conv: Plan(im2col.IM2COL, where, matrix=True, fused=((2, "uv"), (3, "x")))


def _implicit(conv: Conv2d) -> Plan:
    return _im2col("inline" if conv.pointwise else "row_block")(conv)


def _mec(conv: Conv2d) -> Plan:
    return Plan(mec.LOWERED, "root", step=conv.padded_size[0] * conv.kernel[1])


def _mcfa(conv: Conv2d) -> Plan:
    return Plan(mcfa.BLOCK, "row_block")


def _implicit_panel(conv: Conv2d, rows: int) -> int:
    return 0 if conv.pointwise else _im2col_rows(conv, rows)


def _scheduled(
    name: str, stage: str, title: str, stored: bool = False, order: str = "", apart: Callable[[Conv2d], int] | None = None
) -> Schedule:
    """A row of TVM schedules of an algorithm's definition on GPUs.

    Args:
        stage: name of the transform's block. stored: whether a kernel of its own stores the tensor of windows.
        order, apart: of its elements, see `Stage`.
    """
    algorithm = ALGORITHMS[name]
    cuda = Scheduled(algorithm.define, Stage(stage, stored, order, apart), algorithm.transform_bytes)
    return Schedule(algorithm, "scheduled", title, cuda, formula=None if stored else direct.transform_bytes)


_ROWS = (
    Schedule(
        ALGORITHMS["direct"], "tiled", "block and register tiles", Multistage(WindowSource(staged="rows")), Windows(_direct, _pad_rows),
    ),
    Schedule(ALGORITHMS["direct"], "persistent", "persistent thread blocks, resident filters", tma.PERSISTENT),
    Schedule(ALGORITHMS["direct"], "warp_specialized", "producer and consumer warps, filters and inputs in stages", tma.WARP_SPECIALIZED),
    Schedule(
        ALGORITHMS["direct"], "depthwise", "vectors of channels of different groups, or of windows", depthwise.Depthwise(), Depthwise(),
    ),
    Schedule(
        ALGORITHMS["direct"], "dot_product", "dot products of words of channels, in vectors or AMX tiles", scheduler=DotProduct(),
    ),
    Schedule(
        ALGORITHMS["im2win"], "stored", "the whole tensor stored", Multistage(WindowSource("ncmku")), Windows(_im2win("root"), _nothing),
    ),
    Schedule(
        ALGORITHMS["im2win"], "fused", "the tensor made row by row inside the product", Multistage(WindowSource(staged="windows")),
        Windows(_im2win("row_block"), _im2win_rows), formula=direct.transform_bytes,
    ),
    Schedule(
        ALGORITHMS["im2col"], "tiled", "the whole matrix stored", Multistage(WindowSource("ncuvmx")), Windows(_im2col("root"), _nothing),
    ),
    Schedule(ALGORITHMS["implicit_gemm"], "tiled", "block and register tiles", Multistage(), Windows(_implicit, _implicit_panel)),
    Schedule(
        ALGORITHMS["implicit_gemm"], "split_k", "the sum in parts, added up by a second kernel", SplitK(),
        formula=SplitK().transform_bytes,
    ),
    Schedule(ALGORITHMS["mec"], "tiled", "the lowered tensor stored", Multistage(WindowSource("ncxyv")), Windows(_mec, _nothing)),
    Schedule(
        ALGORITHMS["mcfa"], "tiled", "the matrix stored block by block", OutputParts(WindowsInParts("ncuvmx")),
        Windows(_mcfa, _im2col_rows),
    ),
    _scheduled("direct", direct.PAD, "TVM's schedule: block and register tiles, windows copied from the input"),
    _scheduled(
        "im2win", im2win.IM2WIN, "TVM's schedule of the whole tensor stored", stored=True, order="cvu",
        apart=lambda conv: conv.stride[1] * conv.kernel[0],
    ),
    _scheduled("im2col", im2col.IM2COL, "TVM's schedule of the whole matrix stored", stored=True),
    _scheduled("implicit_gemm", im2col.IM2COL, "TVM's schedule: panels of the matrix in shared memory"),
    _scheduled("mec", mec.LOWERED, "TVM's schedule of the lowered tensor stored", stored=True),
    _scheduled("mcfa", mcfa.BLOCK, "TVM's schedule: blocks of the matrix in shared memory"),
    Schedule(ALGORITHMS["winograd"], "tiled", "bands of transformed tiles", WinogradBands(), Winograd()),
    Schedule(
        ALGORITHMS["winograd"], "tensor_cores", "transform and product fused, on tensor cores", TensorCores(),
        formula=TensorCores().transform_bytes,
    ),
)  # fmt: skip
SCHEDULES: dict[str, Schedule] = {row.key: row for row in _ROWS}


def _meant(name: str) -> list[Schedule]:
    """The schedules that a name means: all ("auto"), those of an algorithm, or one. A name of before is the one it stood for."""
    if name == "auto":
        return list(SCHEDULES.values())
    if name in ALGORITHMS:
        return [row for row in SCHEDULES.values() if row.algorithm.name == name]
    found = SCHEDULES.get(methods.OLD_NAMES.get(name, name))
    if found is None:
        known = f"auto, one of {', '.join(ALGORITHMS)}, or with its schedule one of {', '.join(SCHEDULES)}"
        raise ValueError(f"`algorithm` (={name!r}) must be {known}.")
    return [found]


def schedule_of(name: str) -> Schedule:
    """The schedule that a key names; the first of an algorithm's for its name alone.

    Raises:
        ValueError: there is none; the message names those there are.
    """
    return _meant(name)[0]


def candidates(name: str, conv: Conv2d, target: str = "cpu", accuracy: Accuracy = "float32") -> list[Schedule]:
    """The schedules that a request means ("auto": all) and that support the problem with that accuracy.

    Raises:
        ValueError: an unknown name, or none supports the problem; the message holds the reasons.
    """
    reasons = {row.key: row.supports(conv, target, accuracy) for row in _meant(name)}
    able = [SCHEDULES[key] for key, reason in reasons.items() if reason is None]
    if not able:
        named: dict[str | None, list[str]] = {}
        for key, reason in reasons.items():
            named.setdefault(reason, []).append(methods.shown(key))
        why = str(*named) if len(named) == 1 else "; ".join(f"{', '.join(keys)}: {reason}" for reason, keys in named.items())
        raise ValueError(f"no algorithm computes {conv} on {target!r}: {why}")
    return able
