"""TVM's own answer to a convolution: the default MetaSchedule space on a plain te definition. A peer, not a part of im2win."""

from __future__ import annotations

import contextlib
import logging
import tempfile
from pathlib import Path
from typing import Any

import tvm
from tvm import te
from tvm.s_tir import meta_schedule as ms

from im2win.backends import Device
from im2win.machine import Machine, usable_cpus
from im2win.peers import PeerError
from im2win.problem import Conv2d

_BUILD_SECONDS = 180  # a candidate for a GPU takes longer than TVM's default of 30 s where every CPU compiles one


def definition(conv: Conv2d) -> Any:
    """The textbook convolution of `conv` (NCHW, no epilogue) as a PrimFunc of (data, filter, output); float16 is summed in float32."""
    top, left = conv.padding[:2]
    data = te.placeholder(conv.input_shape, conv.dtype, name="data")
    weight = te.placeholder(conv.filter_shape, conv.dtype, name="filter")
    source = data
    if any(conv.padding):

        def padded(n: Any, c: Any, h: Any, w: Any) -> Any:
            inside = tvm.tirx.all(h >= top, h < top + conv.height, w >= left, w < left + conv.width)
            return tvm.tirx.if_then_else(inside, data[n, c, h - top, w - left], tvm.tirx.const(0, conv.dtype))

        source = te.compute((conv.batch, conv.in_channels, *conv.padded_size), padded, name="pad")
    _, share, kernel_h, kernel_w = conv.filter_shape
    c, u, v = te.reduce_axis((0, share), "c"), te.reduce_axis((0, kernel_h), "u"), te.reduce_axis((0, kernel_w), "v")
    filters = conv.out_channels // conv.groups
    (s, t), (d, e) = conv.stride, conv.dilation

    def summed(n: Any, j: Any, m: Any, x: Any) -> Any:
        one, other = source[n, j // filters * share + c, m * s + u * d, x * t + v * e], weight[j, c, u, v]
        return te.sum(one.astype("float32") * other.astype("float32"), axis=[c, u, v])

    output = te.compute(conv.output_shape, summed, name="conv")
    if conv.dtype != "float32":
        sums = output
        output = te.compute(conv.output_shape, lambda *index: sums[index].astype(conv.dtype), name="rounded")
    return te.create_prim_func([data, weight, output])


def compiled(conv: Conv2d, trials: int, device: Device, cache: Path | None) -> Any:
    """Searches with `trials` trials (or takes the search of the last run from `cache`) and compiles the best.

    Raises:
        PeerError: the search found no candidate that runs.
    """
    target = _target(device)
    logging.getLogger("tvm.s_tir.meta_schedule").setLevel(logging.ERROR)
    with contextlib.ExitStack() as stack:
        root = cache if cache is not None else Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="im2win-tvm-")))
        folder = root / f"{conv}-{device.name}-{trials}"
        done = folder / "done"
        folder.mkdir(parents=True, exist_ok=True)
        if done.exists():
            database = ms.database.JSONDatabase(work_dir=str(folder))
        else:
            builder = ms.builder.LocalBuilder(max_workers=usable_cpus(), timeout_sec=_BUILD_SECONDS)
            how = {"num_trials_per_iter": min(trials, 64), "builder": builder, "seed": 1}
            database = ms.tune_tir(definition(conv), target, str(folder), trials, **how)
            done.touch()
        schedule = ms.tir_integration.compile_tir(database, definition(conv), target)
        if schedule is None:
            raise PeerError(f"tvm: no candidate of the default space ran in {trials} trials.")
        return tvm.compile(schedule.mod, target)["main"]


def _target(device: Device) -> Any:
    """TVM's target, with what its default space asks of one."""
    if isinstance(device, Machine):
        return tvm.target.Target({"kind": "llvm", "mcpu": device.mcpu, "num-cores": device.threads})
    from im2win.cuda_codegen import cuda_target

    return cuda_target(device)
