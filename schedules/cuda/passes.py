"""TVM's lowering passes for kernels that place their barriers and shared-memory buffers themselves.

TVM's default passes insert a barrier wherever shared memory is written and then read, and overlap its buffers. Here the schedule states
every barrier, and the emulator and compute-sanitizer's racecheck validate them.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import s_tir
from tvm.tirx import transform
from tvm.tirx.compilation_pipeline import finalize_device_passes, finalize_host_passes, register_tir_pipeline

from im2win.schedules.cuda.launch_overlap import mark_launches

PIPELINE = "im2win_cuda"
CONFIG = {"tirx.UnrollLoop": {"explicit_unroll": False}}  # unrolling is left to the CUDA compiler, so that the source stays readable


def _pipeline() -> tuple[tvm.transform.Pass, Any, Any]:
    passes = [
        transform.LowerTIRx(),
        s_tir.transform.UnifyThreadBinding(),
        transform.StmtSimplify(),
        transform.LowerTIRxOpaque(),
        transform.FlattenBuffer(),
        transform.NarrowDataType(32),
        transform.VectorizeLoop(True),
        transform.UnrollLoop(),
        transform.StmtSimplify(),
        transform.CommonSubexprElim(),
        transform.VerifyMemory(),
        transform.AnnotateEntryFunc(),
        transform.SplitHostDevice(),
        mark_launches,
        transform.MakePackedAPI(),
    ]
    return tvm.transform.Sequential(passes), host_passes, finalize_device_passes


def host_passes() -> Any:
    """TVM's for the host, whose code generator has no pointers to bfloat16: there they are passed as integers of two bytes."""
    return tvm.transform.Sequential([transform.BF16StorageLegalize(), finalize_host_passes()])


register_tir_pipeline(PIPELINE, _pipeline)
