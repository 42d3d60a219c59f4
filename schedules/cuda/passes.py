"""TVM's passes for kernels that say themselves where threads wait and what shared memory holds.

The passes for schedules insert a barrier wherever they see shared memory written and read, and lay its buffers over each other. Here every
barrier is in the schedule, where it can be argued for, and the emulator and racecheck judge it.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import s_tir
from tvm.tirx import transform
from tvm.tirx.compilation_pipeline import finalize_device_passes, finalize_host_passes, register_tir_pipeline

PIPELINE = "im2win_cuda"
CONFIG = {"tirx.UnrollLoop": {"explicit_unroll": False}}  # leaves unrolling to the CUDA compiler: the source stays readable


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
        transform.MakePackedAPI(),
    ]
    return tvm.transform.Sequential(passes), finalize_host_passes, finalize_device_passes


register_tir_pipeline(PIPELINE, _pipeline)
