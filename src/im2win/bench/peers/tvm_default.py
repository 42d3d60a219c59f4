"""The peer TVM: its default MetaSchedule space on a plain te definition of the convolution, without any part of im2win."""

from __future__ import annotations

import contextlib
import logging
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tvm
from tvm import te
from tvm.s_tir import meta_schedule as ms

from im2win.bench.peers.subject import PeerError
from im2win.bench.peers.tvm_candidates import Builder, runner
from im2win.codegen.cuda import cuda_target
from im2win.common.locking import locked
from im2win.device.cpu import Machine, usable_cpus
from im2win.registry.backends import Device
from im2win.spec.conv2d import Conv2d
from im2win.spec.dtypes import ELEMENT_TYPES

_DONE, _LIBRARY = "done", "best.tar"
_LOCK = "measuring.lock"
_LONGEST_S = 3600.0  # seconds to wait for another process that searches for the same layer


def definition(conv: Conv2d) -> Any:
    """The textbook convolution of `conv` (NCHW, no epilogue) as a PrimFunc of (data, filter, output); float16 is accumulated in float32."""
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


def refused(conv: Conv2d) -> str | None:
    """Why the definition is not this convolution; None if it is."""
    if conv.bias or conv.residual or conv.activation != "none" or conv.layout != "NCHW" or ELEMENT_TYPES[conv.dtype].integer:
        return f"TVM's default search gets the plain convolution in NCHW, not {conv}."
    return None


def lacks(conv: Conv2d, trials: int, device: Device, cache: Path) -> bool:
    """Whether the cache has no complete search with this number of trials."""
    return not (_folder(conv, trials, device, cache) / _DONE).exists()


def search(conv: Conv2d, trials: int, device: Device, cache: Path, cpus: int) -> float:
    """Searches with `trials` trials, on `cpus` threads and compiling processes, and stores the result in the cache.

    If several processes request the same search, one runs it and the others wait for the result.

    Returns:
        Seconds per call of the best candidate.

    Raises:
        PeerError: no candidate ran, or the best does not compile again.
        LogError: another process searches for longer than an hour.
    """
    folder = _folder(conv, trials, device, cache)
    with locked(cache / f".{folder.name}.lock", _LONGEST_S):
        if lacks(conv, trials, device, cache):
            return _search_anew(conv, trials, device, cache, cpus)
        return _seconds(_best(ms.database.JSONDatabase(work_dir=str(folder)), conv, _target(device), trials))


def _search_anew(conv: Conv2d, trials: int, device: Device, cache: Path, cpus: int) -> float:
    logging.getLogger("tvm.s_tir.meta_schedule").setLevel(logging.ERROR)
    errors = list[str]()
    folder, target, builds = _folder(conv, trials, device, cache), _target(device), Builder(cpus, errors)
    shutil.rmtree(folder, ignore_errors=True)  # a truncated file could not be read
    folder.mkdir(parents=True)
    with runner(cache / _LOCK, not isinstance(device, Machine), errors) as runs:
        how = {"num_trials_per_iter": min(trials, 64), "num_tuning_cores": cpus, "builder": builds, "runner": runs, "seed": 1}
        database = ms.tune_tir(definition(conv), target, str(folder), trials, space=_space(conv, device), **how)
    (folder / _DONE).touch()
    best = _best(database, conv, target, trials, errors)
    _keep(best, target, folder, builds)
    return _seconds(best)


def _seconds(record: Any) -> float:
    return float(sum(map(float, record.run_secs))) / len(record.run_secs)


def compiled(conv: Conv2d, trials: int, device: Device, cache: Path | None) -> Any:
    """The best candidate of a search with `trials` trials, which runs now if `cache` lacks it.

    Raises:
        PeerError: no candidate ran, or the best does not compile again.
    """
    with contextlib.ExitStack() as stack:
        root = cache if cache is not None else Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="im2win-tvm-")))
        if lacks(conv, trials, device, root):
            search(conv, trials, device, root, usable_cpus())
        folder, target = _folder(conv, trials, device, root), _target(device)
        if not (folder / _LIBRARY).exists():
            database = ms.database.JSONDatabase(work_dir=str(folder))
            _keep(_best(database, conv, target, trials), target, folder, Builder(1, []))
        return tvm.runtime.load_module(str(folder / _LIBRARY))["main"]


def _folder(conv: Conv2d, trials: int, device: Device, cache: Path) -> Path:
    return cache / f"{conv}-{device.name}-{trials}"


def _best(database: Any, conv: Conv2d, target: Any, trials: int, errors: Sequence[str] = ()) -> Any:
    """The fastest candidate's record.

    Args:
        errors: messages of candidates that did not compile or run.

    Raises:
        PeerError: no candidate ran.
    """
    module = tvm.IRModule({"main": definition(conv)})
    record = database.query_tuning_record(module, target, "main")
    if record is None:
        reason = f" One said: {errors[0].strip().splitlines()[-1][-200:]}" if errors else ""
        raise PeerError(f"tvm: no candidate of the default space ran in {trials} trials.{reason}")
    return record


def _keep(record: Any, target: Any, folder: Path, builds: Any) -> None:
    """Compiles a record's candidate into the folder's library."""
    schedule = tvm.s_tir.Schedule(record.workload.mod)
    record.trace.apply_to_schedule(schedule, remove_postproc=False)
    [built] = builds.build([ms.builder.BuilderInput(schedule.mod, target)])
    if built.error_msg is not None:
        raise PeerError(f"tvm: the best candidate does not compile: {str(built.error_msg).strip()[-300:]}")
    made = Path(str(built.artifact_path))
    shutil.move(made, folder / _LIBRARY)
    made.parent.rmdir()


def _space(conv: Conv2d, device: Device) -> Any:
    """TVM's default space for the target.

    For float16 on a GPU it is the space without tensor cores, since TVM does not compile the candidates with them.

    TVM 0.27 reports "tvm_access_ptr element type must match the source buffer (float16 vs float32)" for any definition.
    """
    if isinstance(device, Machine) or not ELEMENT_TYPES[conv.dtype].narrow:
        return "post-order-apply"
    return ms.space_generator.PostOrderApply(sch_rules="cuda", postprocs="cuda", mutator_probs="cuda")


def _target(device: Device) -> Any:
    """TVM's target, with the attributes that its default space requires."""
    if isinstance(device, Machine):
        return tvm.target.Target({"kind": "llvm", "mcpu": device.mcpu, "num-cores": device.threads})

    return cuda_target(device)
