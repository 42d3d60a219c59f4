"""TVM's own lowering passes, by names of this project: they lower the blocks of a schedule and insert barriers for shared memory."""

from __future__ import annotations

from typing import Any

import tvm
from tvm.s_tir.pipeline import default_s_tir_pipeline
from tvm.tirx.compilation_pipeline import register_tir_pipeline
from tvm.tirx.transform import LowerWarpMemory

PIPELINE = "im2win_cuda_scheduled"
WARP_PIPELINE = "im2win_cuda_tensorized"
WARP_BUFFERS = 10  # at most, in a kernel: sums, and two operands in the loop and in every step behind it; a pass of TVM lowers one


def _tensorized_pipeline() -> tuple[Any, Any, Any]:
    """TVM's passes for schedules with buffers of a warp: they must see the lane in every index, where a common subexpression hides it."""
    passes, host, device = default_s_tir_pipeline()

    @tvm.transform.module_pass(opt_level=0)  # type: ignore[untyped-decorator]
    def lowered(mod: tvm.IRModule, ctx: tvm.transform.PassContext) -> tvm.IRModule:
        config = {**dict(ctx.config.items()), "tirx.disable_cse_tir": True}
        with tvm.transform.PassContext(opt_level=ctx.opt_level, instruments=list(ctx.instruments or []), config=config):
            return passes(mod)

    def device_passes() -> Any:
        return tvm.ir.transform.Sequential([*(LowerWarpMemory() for _ in range(WARP_BUFFERS)), device()])

    return lowered, host, device_passes


register_tir_pipeline(PIPELINE, default_s_tir_pipeline)
register_tir_pipeline(WARP_PIPELINE, _tensorized_pipeline)
