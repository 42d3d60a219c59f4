"""From an ONNX model to a library: taken apart, convolutions looked up, the rest lowered, memory planned, all of it compiled and linked."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import tvm

from im2win import __version__
from im2win.backends import Device, device_for
from im2win.gpu import Gpu
from im2win.models import driver, kernels
from im2win.models.artefact import Bucket, ModelLayer, ModelManifest, Port, digest, weights_path
from im2win.models.host import Chosen, CpuKernels, Kernels
from im2win.models.memory import Plan, plan
from im2win.models.parts import Convolution, Parts, take_apart
from im2win.models.program import Call, Copy, Program
from im2win.models.rest import add_rest
from im2win.models.runtime import ALIGNMENT, Model, load_model, write_manifest
from im2win.models.source import Array, Source, at_batch, read
from im2win.onnx_layers import ModelError
from im2win.problem import Conv2d
from im2win.reference import Accuracy

if TYPE_CHECKING:
    from onnx import ModelProto

_MANY = 64  # batches of one library; each has code of its own


@dataclass
class _Weights:
    """The file of constants: equal ones are stored once."""

    arrays: list[Array] = field(default_factory=list)
    offsets: dict[str, int] = field(default_factory=dict)
    bytes: int = 0

    def add(self, array: Array) -> int:
        """The offset of an array in the file."""
        content = np.ascontiguousarray(array)
        key = hashlib.sha256(content.reshape(-1).view(np.uint8).data).hexdigest()
        if key not in self.offsets:
            self.offsets[key] = self.bytes
            self.arrays.append(content)
            self.bytes += -(-content.nbytes // ALIGNMENT) * ALIGNMENT
        return self.offsets[key]

    def write(self, path: Path) -> None:
        """Writes the file."""
        with path.open("wb") as file:
            for array in self.arrays:
                file.write(array.reshape(-1).view(np.uint8).data)
                file.write(b"\0" * (-array.nbytes % ALIGNMENT))


@dataclass
class Compiler:
    """What the functions of all batches share."""

    label: str
    device: Device
    logs: Any
    accuracy: Accuracy
    kernels: Kernels
    chosen: dict[Conv2d, Chosen] = field(default_factory=dict)
    weights: _Weights = field(default_factory=_Weights)
    layers: dict[str, ModelLayer] = field(default_factory=dict)
    runs: dict[str, tuple[int, list[driver.Step]]] = field(default_factory=dict)
    buckets: list[Bucket] = field(default_factory=list)
    skipped: dict[str, None] = field(default_factory=dict)

    def add(self, source: Source, batch: int) -> None:
        """Adds the function of one batch."""
        parts = take_apart(source, batch)
        self.chosen |= self.kernels.choose([one.conv for one in parts.convolutions], self.logs, self.accuracy)
        self.skipped |= {f"{one.name}: {one.reason}": None for one in parts.skipped}
        program = self._program(source, parts, batch)
        offsets = {name: self.weights.add(array) for name, array in program.constants.items()}
        planned = plan(program, parts.joins, offsets)
        function = f"run_{batch}"
        steps = self._steps(program, planned)
        self.runs[function] = (2 + len(program.inputs) + len(program.outputs), steps)
        self.buckets.append(Bucket(batch, function, planned.workspace))

    def _program(self, source: Source, parts: Parts, batch: int) -> Program:
        graph = source.graph
        program = Program(tuple(one.name for one in source.inputs), tuple(one.name for one in source.outputs))
        for port in (*source.inputs, *source.outputs):
            program.declare(port.name, port.shape, port.dtype)

        def declare(name: str) -> None:
            if name in source.constants:
                if name not in program.constants:
                    program.constant(name, source.constants[name])
                return
            shape, onnx_type = graph.shapes.get(name), graph.types.get(name)
            if shape is None or not onnx_type or not all(isinstance(extent, int) for extent in shape):
                raise ModelError(f"compile_model: `source` (={self.label}) must have fixed shapes but for the batch; {name!r} has {shape}.")
            import onnx

            program.declare(name, tuple(int(extent) for extent in shape), str(onnx.helper.tensor_dtype_to_np_dtype(onnx_type)))

        for one in parts.convolutions:
            for name in (one.data, one.output, *([one.residual] if one.residual else [])):
                declare(name)
            self._convolution(program, one)
        for view in parts.views:
            declare(view.source)
            declare(view.output)
            program.views[view.output] = view.source
        for join in parts.joins:
            for name in (*join.sources, join.output):
                declare(name)
        for response in parts.responses:
            declare(response.source)
            declare(response.output)
            kernel = self.kernels.loops(f"b{batch}_response", kernels.response(program.shapes[response.source], response))
            program.calls.append(Call(kernel, (response.source,), (response.output,)))
        for pool in parts.pools:
            declare(pool.source)
            declare(pool.output)
            function = kernels.pool(program.shapes[pool.source], program.shapes[pool.output], pool)
            program.calls.append(Call(self.kernels.loops(f"b{batch}_{pool.kind}_pool", function), (pool.source,), (pool.output,)))
        for index in parts.rest:
            for name in (*graph.nodes[index].input, *graph.nodes[index].output):
                if name and name not in source.constants and name not in program.shapes:
                    declare(name)
        read_by_joins = {name for join in parts.joins for name in join.sources}
        functions = add_rest(source, parts, program, read_by_joins, self.label)
        renamed = {name: self.kernels.loops(f"b{batch}_{name}", function) for name, function in functions.items()}
        program.calls = [
            Call(renamed.get(call.kernel, call.kernel), call.inputs, call.outputs) if isinstance(call, Call) else call
            for call in program.calls
        ]
        return program

    def _convolution(self, program: Program, one: Convolution) -> None:
        """Adds the calls of a convolution, its filters packed."""
        chosen = self.chosen[one.conv]
        made = self.kernels.convolution(one.conv, chosen)
        packed = [program.constant(f"{one.output}/filter", made.pack_filter(one.filter))]
        if one.bias is not None:
            packed.append(program.constant(f"{one.output}/bias", made.pack_bias(one.bias)))
        residual = [one.residual] if one.residual else []
        made.call(program, one.data, packed, residual, one.output)
        if one.name not in self.layers or str(one.conv) != self.layers[one.name].conv:
            key = one.name if one.name not in self.layers else f"{one.name} {one.conv}"
            self.layers[key] = ModelLayer(one.name, str(one.conv), chosen.algorithm, chosen.tile.as_dict(), chosen.rung)

    def _steps(self, program: Program, planned: Plan) -> list[driver.Step]:
        steps: list[driver.Step] = []
        for call in planned.calls:
            if isinstance(call, Copy):
                shape, whole = program.shapes[call.source], program.shapes[call.output]
                function = kernels.copy(shape, whole, call.axis, call.begin, program.dtypes[call.source])
                words = "x".join(map(str, shape)), "x".join(map(str, whole)), call.axis, call.begin, program.dtypes[call.source]
                kernel = self.kernels.loops("copy_" + "_".join(map(str, words)), function)
                call = Call(kernel, (call.source,), (call.output,))
            names = (*call.inputs, *call.outputs)
            seen = self.kernels.arguments(call.kernel)
            steps.append(
                driver.Step(
                    call.kernel,
                    tuple(driver.Argument(planned.places[name], *one) for name, one in zip(names, seen, strict=True)),
                )
            )
        return steps


def compile_model(
    source: str | os.PathLike[str] | ModelProto,
    path: str | os.PathLike[str] | None = None,
    target: str = "cpu",
    *,
    batches: Sequence[int] | None = None,
    logs: Any = None,
    threads: int | None = None,
    accuracy: Accuracy = "float32",
) -> Model:
    """Compiles an ONNX model: a library, its weights and a manifest. Never tunes.

    Every convolution, and every Gemm and MatMul with a fixed matrix, becomes the kernel that `im2win.build` would make for its shape, with
    the batch normalisation, bias, residual addition and activation behind it, and its filters packed now. The rest is TVM's, scheduled in
    parallel loops. All tensors are NCHW, as in ONNX, so nothing is converted on the way.

    Args:
        source: path of an ONNX file, or a loaded model.
        path: of the library; None for a temporary one that lives as long as the result, which can be exported.
        target: "cpu" or "cuda".
        batches: numbers of images to compile for; the model's own by default, 1 where that is symbolic.
        logs: a folder of tuning records looked up before those that ship with the package; None for these only.
        threads: CPUs to schedule for; all that the process may use by default.
        accuracy: what kernels may round; see `im2win.build`.

    Raises:
        ModelError: the model cannot be read, has shapes that are not fixed, or operators that TVM cannot import.
        ToolchainError: no C++ compiler to link with. NoGpuError: target "cuda" without a usable GPU.
        ValueError: an argument out of range; the message names argument, value and rule.
    """
    sizes = _sizes(batches)
    label, model = read(source)
    device = device_for(target, threads)
    return compile_for(label, model, device, path, sizes, logs, accuracy)


def _sizes(batches: Sequence[int] | None) -> list[int | None]:
    if batches is None:
        return [None]
    sizes = sorted(set(batches))
    if not sizes or len(sizes) > _MANY or any(isinstance(size, bool) or not isinstance(size, int) or size < 1 for size in sizes):
        raise ValueError(f"compile_model: `batches` (={batches!r}) must be 1 to {_MANY} integers, each at least 1.")
    return list(sizes)


def compile_for(
    label: str,
    model: ModelProto,
    device: Device,
    path: str | os.PathLike[str] | None,
    sizes: Sequence[int | None],
    logs: Any,
    accuracy: Accuracy,
) -> Model:
    """`compile_model` for a model that is read, on a device that is known."""
    if path is not None:
        library = Path(path)
        library.parent.mkdir(parents=True, exist_ok=True)
        write_model(label, model, device, library, sizes, logs, accuracy)
        return load_model(library)
    folder = Path(tempfile.mkdtemp(prefix="im2win-model-"))
    try:
        write_model(label, model, device, folder / "model.so", sizes, logs, accuracy)
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
) -> ModelManifest:
    """Writes the library of a model, its weights and its manifest; for a GPU, too, that this machine does not have."""
    compiler = Compiler(label, device, logs, accuracy, _kernels_for(device))
    sources = [at_batch(model, label, size) for size in sizes]
    for size, source in zip(sizes, sources, strict=True):
        compiler.add(source, size or next((one.shape[0] for one in source.inputs if one.batched), 1))
    return _write(compiler, sources[0], library)


def _kernels_for(device: Device) -> Kernels:
    if isinstance(device, Gpu):
        from im2win.models.cuda import CudaKernels

        return CudaKernels(device)
    return CpuKernels(device)


def _write(compiler: Compiler, first: Source, library: Path) -> ModelManifest:
    """Links the library and writes what lies beside it; files of these names are replaced whole."""
    device = compiler.device
    partial = library.with_name(library.name + ".partial")
    with tempfile.TemporaryDirectory(prefix="im2win-objects-") as folder:
        run = Path(folder) / "driver.o"
        driver.compile_source(driver.source(compiler.runs), run)
        compiler.kernels.link(partial, run)
    partial_weights = weights_path(library).with_name(weights_path(library).name + ".partial")
    compiler.weights.write(partial_weights)
    os.replace(partial_weights, weights_path(library))
    os.replace(partial, library)

    def ports(tensors: Any) -> tuple[Port, ...]:
        return tuple(Port(one.name, one.dtype, one.shape, one.batched) for one in tensors)

    gpu = isinstance(device, Gpu)
    manifest = ModelManifest(
        inputs=ports(first.inputs), outputs=ports(first.outputs), buckets=tuple(compiler.buckets), layers=tuple(compiler.layers.values()),
        skipped=tuple(compiler.skipped), target="cuda" if gpu else "cpu", machine=device.name,
        isa=device.arch if isinstance(device, Gpu) else device.isa, threads=1 if isinstance(device, Gpu) else device.threads,
        tvm=tvm.__version__, im2win=__version__, sha256=digest(library), weights_bytes=compiler.weights.bytes,
        weights_sha256=digest(weights_path(library)),
    )  # fmt: skip
    return write_manifest(manifest, library)
