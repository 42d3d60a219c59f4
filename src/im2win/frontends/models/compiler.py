"""Compiles an ONNX model to a library.

The model is split into parts, convolutions are looked up, the rest is lowered by TVM, memory is planned, and everything is compiled and
linked.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import weakref
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tvm

from im2win import __version__
from im2win.common.progress import Reporter, reporting
from im2win.device.gpu import Gpu
from im2win.frontends.models import driver
from im2win.frontends.models.assembly import Assembly
from im2win.frontends.models.cuda import CudaKernels
from im2win.frontends.models.host import CpuKernels, Kernels
from im2win.frontends.models.precision import NARROW, Precision, chosen, widened, with_ports
from im2win.frontends.models.source import at_batch, read
from im2win.frontends.onnx.coverage import coverage
from im2win.frontends.onnx.layers import ModelError, layers_of
from im2win.frontends.tuning import checked_trials, tune_untuned
from im2win.registry.backends import Device, device_for
from im2win.runtime.load import load_model
from im2win.runtime.model import Model, write_manifest
from im2win.runtime.model_manifest import ModelManifest, digest, weights_path
from im2win.runtime.seal import seal
from im2win.spec.accuracy import Accuracy
from im2win.spec.conv2d import Conv2d

if TYPE_CHECKING:
    from onnx import ModelProto

_log = logging.getLogger("im2win")
_MANY = 64  # batches of one library, each of which adds code


def compile_model(
    source: str | os.PathLike[str] | ModelProto,
    path: str | os.PathLike[str] | None = None,
    target: str = "cpu",
    *,
    batches: Sequence[int] | None = None,
    logs: Any = None,
    threads: int | None = None,
    accuracy: Accuracy = "float32",
    dtype: str | None = None,
    trials: int | None = None,
) -> Model:
    """Compiles an ONNX model: a library, its weights and a manifest.

    Every convolution, and every Gemm and MatMul with a fixed matrix, becomes the kernel that `im2win.build` builds for its shape. The
    kernel includes the batch normalisation, bias, residual addition and activation that follow, and its filters are packed now. TVM
    compiles the rest into parallel loops. All tensors are NCHW, as in ONNX, so that no layout is converted. In a float16 or bfloat16 model
    the tensors between convolutions are NHWC, and its inputs and outputs are converted.

    Args:
        source: path of an ONNX file, or a loaded model.
        path: of the library; None for a temporary one that lives as long as the result, which can be exported.
        target: "cpu" or "cuda".
        batches: numbers of images to compile for; the model's own by default, 1 where that is symbolic.
        logs: folders of tuning records (a path, or several), searched before the user's own (`IM2WIN_LOGS`) and those of the package.
        threads: CPUs to schedule for; all that the process may use by default.
        accuracy: the rounding that kernels may use; see `im2win.build`.
        dtype: "float16" or "bfloat16": filters and the tensors between layers are rounded to it, sums are float32, and inputs and
            outputs keep the model's types. "float32", or None for the model's own.
        trials: candidates to tune each layer with that has no record of this device, as for `im2win.tune`. The records go to the first
            folder of `logs`, else to the user's, where later calls find them. None tunes nothing.

    A warning says so if im2win computes none of the model's convolutions, and why.

    Raises:
        LogError: with `trials`, the records cannot be written.
        ModelError: the model cannot be read, has shapes that are not fixed, or has operators that TVM cannot import.
        ToolchainError: there is no C++ compiler to link with.
        NoGpuError: target "cuda" without a usable GPU.
        ValueError: an argument out of range; the message names argument, value and rule.
    """
    sizes = _sizes(batches)
    label, model = read(source)
    device = device_for(target, threads)
    if (trials := checked_trials(trials)) is not None:
        precision = chosen(model, dtype)
        convs = [conv for size in sizes for conv in _problems(model, size, precision)]
        tune_untuned(convs, target, trials=trials, logs=logs, threads=threads, accuracy=accuracy)
    with reporting(f"compiling {label}") as reporter:
        compiled = compile_for(label, model, device, path, sizes, logs, accuracy, dtype, reporter)
    if compiled.manifest.skipped and not _convolves(model, compiled):
        reasons = "; ".join(compiled.manifest.skipped[:3])
        _log.warning("%s: im2win computes none of its convolutions, TVM's plain loops do: %s", label, reasons)
    return compiled


def _convolves(model: ModelProto, compiled: Model) -> bool:
    """Whether im2win computes some convolution of the model or, if it has none, some product."""
    listed = coverage(model, compiled.batches[0], {layer.name for layer in compiled.manifest.layers}, products=True)
    convolutions = [one for one in listed if "Conv" in one.operator]
    return any(one.ours for one in convolutions or listed)


def _problems(model: ModelProto, batch: int | None, precision: Precision) -> list[Conv2d]:
    """The layers that compiling looks up in this precision; none of a model without any."""
    try:
        convs = [layer.conv for layer in layers_of(model, batch, epilogues=True, products=True)]
    except ModelError:
        return []
    return [conv.with_(dtype=precision, layout="NHWC") for conv in convs] if precision in NARROW else convs


def _sizes(batches: Sequence[int] | None) -> list[int | None]:
    if batches is None:
        return [None]
    sizes = sorted(set(batches))
    if not sizes or len(sizes) > _MANY or any(isinstance(size, bool) or not isinstance(size, int) or size < 1 for size in sizes):
        raise ValueError(f"`batches` (={batches!r}) must be 1 to {_MANY} integers, each at least 1.")
    return list(sizes)


def compile_for(
    label: str,
    model: ModelProto,
    device: Device,
    path: str | os.PathLike[str] | None,
    sizes: Sequence[int | None],
    logs: Any,
    accuracy: Accuracy,
    dtype: str | None = None,
    reporter: Reporter | None = None,
) -> Model:
    """`compile_model` for a loaded model and a known device."""
    if path is not None:
        library = Path(path)
        library.parent.mkdir(parents=True, exist_ok=True)
        write_model(label, model, device, library, sizes, logs, accuracy, dtype, reporter)
        return load_model(library)
    folder = Path(tempfile.mkdtemp(prefix="im2win-model-"))
    try:
        write_model(label, model, device, folder / "model.so", sizes, logs, accuracy, dtype, reporter)
        loaded = load_model(folder / "model.so")
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    weakref.finalize(loaded, shutil.rmtree, folder, ignore_errors=True)
    return loaded


def write_model(
    label: str,
    model: ModelProto,
    device: Device,
    library: Path,
    sizes: Sequence[int | None],
    logs: Any = None,
    accuracy: Accuracy = "float32",
    dtype: str | None = None,
    reporter: Reporter | None = None,
) -> ModelManifest:
    """Writes the library of a model, its weights and its manifest. The device may be a GPU that this machine does not have."""
    precision, ports = chosen(model, dtype), dict[str, str]()
    if precision in NARROW:
        model, ports = widened(model)
    assembly = Assembly(label, logs, accuracy, kernels_for(device, reporter), precision)
    for size in sizes:
        source = with_ports(at_batch(model, label, size), ports)
        assembly.add(source, size or next((one.shape[0] for one in source.inputs if one.batched), 1))
    return link(assembly, device, library)


def kernels_for(device: Device, reporter: Reporter | None = None) -> Kernels:
    """An empty collection of kernels for a device."""
    if isinstance(device, Gpu):
        return CudaKernels(device, reporter)
    return CpuKernels(device, reporter)


def link(assembly: Assembly, device: Device, library: Path) -> ModelManifest:
    """Links the library and writes weights and manifest beside it. Existing files of these names are replaced atomically."""
    partial, weights = library.with_name(library.name + ".partial"), weights_path(library)
    with tempfile.TemporaryDirectory(prefix="im2win-objects-") as folder:
        run = Path(folder) / "driver.o"
        driver.compile_source(driver.source(assembly.runs), run)
        assembly.kernels.link(partial, run)
    partial_weights = weights.with_name(weights.name + ".partial")
    assembly.weights.write(partial_weights)
    target, isa, threads = ("cuda", device.arch, 1) if isinstance(device, Gpu) else ("cpu", device.isa, device.threads)
    manifest = ModelManifest(
        inputs=assembly.inputs, outputs=assembly.outputs, buckets=tuple(assembly.buckets), layers=tuple(assembly.layers.values()),
        skipped=tuple(assembly.skipped), target=target, machine=device.name, isa=isa, threads=threads, tvm=tvm.__version__,
        im2win=__version__, weights_bytes=assembly.weights.bytes, weights_sha256=digest(partial_weights),
    )  # fmt: skip
    seal(partial, manifest.facts())
    os.replace(partial_weights, weights)
    os.replace(partial, library)
    return write_manifest(replace(manifest, sha256=digest(library)), library)
