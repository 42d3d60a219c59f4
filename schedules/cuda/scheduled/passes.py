"""TVM's own lowering passes, by a name of this project: they lower the blocks of a schedule and insert barriers for shared memory."""

from __future__ import annotations

from tvm.s_tir.pipeline import default_s_tir_pipeline
from tvm.tirx.compilation_pipeline import register_tir_pipeline

PIPELINE = "im2win_cuda_scheduled"

register_tir_pipeline(PIPELINE, default_s_tir_pipeline)
