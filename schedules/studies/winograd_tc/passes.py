"""TVM's lowering passes for kernels whose barriers TVM inserts: `schedules.cuda.passes` and those for shared memory and WMMA.

A barrier stands wherever a thread block writes and reads the same shared memory, as in TVM's default lowering. The reconstructor removes
those that warps do not need.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import s_tir
from tvm.tirx import transform
from tvm.tirx.compilation_pipeline import finalize_device_passes, finalize_host_passes, register_tir_pipeline

PIPELINE = "im2win_cuda_barriers"


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
        s_tir.transform.ThreadSync("shared"),
        s_tir.transform.InferFragment(),
        transform.SplitHostDevice(),
        transform.MakePackedAPI(),
    ]
    return tvm.transform.Sequential(passes), finalize_host_passes, finalize_device_passes


register_tir_pipeline(PIPELINE, _pipeline)
