"""Assembles a model's functions, batch by batch: the kernels of its parts, and the driver's tables that call them."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from im2win.frontends.models import driver, half, kernels, resizing
from im2win.frontends.models.host import Chosen, Kernels
from im2win.frontends.models.memory import Plan, plan
from im2win.frontends.models.parts import Convolution, Join, Parts, take_apart
from im2win.frontends.models.precision import NARROW, Precision
from im2win.frontends.models.program import Call, Copy, Program
from im2win.frontends.models.relax_fallback import add_fallback
from im2win.frontends.models.source import Array, Source, Tensor
from im2win.frontends.models.tables import look_up
from im2win.frontends.models.tensor_layouts import NarrowLayouts, TensorLayouts, in_precision, without_views
from im2win.frontends.onnx.layers import ModelError, import_onnx
from im2win.runtime.model import ALIGNMENT
from im2win.runtime.model_manifest import Bucket, ModelLayer, Port
from im2win.spec.accuracy import Accuracy
from im2win.spec.conv2d import Conv2d


@dataclass
class Weights:
    """The file of constants. Equal constants are stored once."""

    arrays: list[Array] = field(default_factory=list)
    offsets: dict[str, int] = field(default_factory=dict)
    bytes: int = 0

    def add(self, array: Array) -> int:
        """The offset of an array in the file, in bytes."""
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
class Assembly:
    """What the functions of all batches share.

    Attributes:
        dtype: "float32", or "float16" or "bfloat16" if values are stored as `tensor_layouts.NarrowLayouts` stores them.
        runs: number of tensors and steps of each function.
        skipped: convolutions that are left to TVM (an ordered set).
    """

    label: str
    logs: Any
    accuracy: Accuracy
    kernels: Kernels
    dtype: Precision = "float32"
    chosen: dict[Conv2d, Chosen] = field(default_factory=dict)
    weights: Weights = field(default_factory=Weights)
    layers: dict[tuple[str, Conv2d], ModelLayer] = field(default_factory=dict)
    runs: dict[str, tuple[int, list[driver.Step]]] = field(default_factory=dict)
    buckets: list[Bucket] = field(default_factory=list)
    skipped: dict[str, None] = field(default_factory=dict)
    inputs: tuple[Port, ...] = ()
    outputs: tuple[Port, ...] = ()

    @property
    def narrow(self) -> bool:
        """Whether tensors are rounded between layers."""
        return self.dtype in NARROW

    def add(self, source: Source, batch: int) -> None:
        """Adds the function of one batch.

        Raises:
            ModelError: see `compile_model`.
        """
        self._ports(source, batch)
        able = self.kernels
        wide = not self.narrow
        parts = take_apart(
            source, batch, lines=wide, resizes=able.resizes and wide, alignment=able.alignment, integers=able.integers and wide,
            vectors=able.vectors_of_bytes,
        )  # fmt: skip
        layers: Sequence[Convolution] = parts.convolutions
        if self.narrow:
            parts, layers = without_views(source, parts), in_precision(layers, self.dtype)
        self.chosen |= self.kernels.choose([one.conv for one in layers], self.logs, self.accuracy)
        self.skipped |= {f"{one.name}: {one.reason}": None for one in parts.skipped}
        program, joins = self._program(source, parts, layers, batch)
        offsets = {name: self.weights.add(array) for name, array in program.constants.items()}
        planned = plan(program, joins, offsets, self.kernels.alignment)
        function = f"run_{batch}"
        self.runs[function] = (2 + len(program.inputs) + len(program.outputs), self._steps(program, planned))
        self.buckets.append(Bucket(batch, function, planned.workspace))

    def _ports(self, source: Source, batch: int) -> None:
        """Inputs and outputs. They must equal those of the other batches except for the number of images."""

        def ports(tensors: tuple[Tensor, ...]) -> tuple[Port, ...]:
            return tuple(Port(one.name, one.dtype, one.shape, one.batched) for one in tensors)

        if not self.buckets:
            self.inputs, self.outputs = ports(source.inputs), ports(source.outputs)
        for port, tensor in zip((*self.inputs, *self.outputs), (*source.inputs, *source.outputs), strict=True):
            if port.at(batch) != tensor.shape:
                raise ModelError(
                    f"`source` (={self.label}) must hold the images of {port.name!r} on its first axis alone to be "
                    f"compiled for several batches; it has the shape {list(tensor.shape)} at batch {batch}."
                )

    def _program(self, source: Source, parts: Parts, layers: Sequence[Convolution], batch: int) -> tuple[Program, tuple[Join, ...]]:
        """The program before memory is planned, and the concatenations that remain.

        Args:
            layers: the convolutions in the model's precision.
        """
        program = Program(tuple(one.name for one in source.inputs), tuple(one.name for one in source.outputs))
        for port in (*source.inputs, *source.outputs):
            program.declare(port.name, port.shape, port.dtype)
            if port.name in source.constants:
                program.constant(port.name, source.constants[port.name].astype(port.dtype))
        if not self.narrow:
            for name in _read_and_made(source, parts):
                self._declare(source, program, name)
        for interleave in parts.interleaves:
            program.declare(interleave.source, interleave.shape, "float32")
        able, layouts = self.kernels, TensorLayouts(source, parts, program)
        if self.narrow:
            layouts = NarrowLayouts(source, parts, program, self.dtype, able.arithmetic)
        for one in layers:
            self._convolution(program, layouts, one)
        for view in parts.views:
            program.views[layouts.makes(view.output)] = layouts.reads(view.source)
        for cut in parts.cuts:
            program.cuts[cut.output] = cut.source, cut.begin * np.dtype(program.dtypes[cut.source]).itemsize
        functions: dict[str, Any] = {}
        for number, response in enumerate(parts.responses):
            shape, last = layouts.shape(response.source), layouts.last(response.output)
            function = kernels.response(shape, response)
            if self.narrow:
                function = half.response(shape, response, last, self.dtype, able.arithmetic)
            functions[f"response_{number}"] = function
            program.calls.append(Call(f"response_{number}", (layouts.reads(response.source, last),), (layouts.makes(response.output),)))
        for number, pool in enumerate(parts.pools):
            shape, made, last = layouts.shape(pool.source), layouts.shape(pool.output), layouts.last(pool.output)
            function = half.pool(shape, made, pool, self.dtype, able.arithmetic) if self.narrow else self.kernels.pool(shape, made, pool)
            functions[f"pool_{number}"] = function
            program.calls.append(Call(f"pool_{number}", (layouts.reads(pool.source, last),), (layouts.makes(pool.output),)))
        for number, table in enumerate(parts.tables):
            dtypes, count = (layouts.dtype(table.source), str(table.values.dtype)), math.prod(layouts.shape(table.source))
            functions[f"table_{number}"] = look_up(count, dtypes, vectors=able.vectors_of_bytes)
            held = program.constant(f"{table.output}/table", table.values)
            program.calls.append(Call(f"table_{number}", (table.source, held), (table.output,)))
        for number, interleave in enumerate(parts.interleaves):
            made = layouts.shape(interleave.output)
            functions[f"interleave_{number}"] = kernels.interleave(interleave.shape, made, interleave.phases)
            program.calls.append(Call(f"interleave_{number}", (interleave.source,), (interleave.output,)))
        for number, resize in enumerate(parts.resizes):
            functions[f"resize_{number}"] = resizing.resize(layouts.shape(resize.source), layouts.shape(resize.output), resize)
            tables = [program.constant(f"{resize.output}/table{place}", table) for place, table in enumerate(resizing.tables(resize))]
            program.calls.append(Call(f"resize_{number}", (resize.source, *tables), (resize.output,)))
        joins = layouts.joins()
        joined = {name for join in joins for name in join.sources}
        functions |= add_fallback(source, parts, program, layouts, joined, self.label, self.kernels.lowered)
        functions |= layouts.functions
        renamed = {name: self.kernels.loops(f"b{batch}_{name}", function) for name, function in functions.items()}
        program.calls = [
            Call(renamed.get(call.kernel, call.kernel), call.inputs, call.outputs) if isinstance(call, Call) else call
            for call in program.calls
        ]
        return program, joins

    def _declare(self, source: Source, program: Program, name: str) -> None:
        if name in program.shapes:
            return
        if name in source.constants:
            program.constant(name, source.constants[name])
            return
        shape, code = source.graph.shapes.get(name), source.graph.types.get(name)
        if shape is None or not code or not all(isinstance(extent, int) for extent in shape):
            raise ModelError(f"`source` (={self.label}) must have fixed shapes but for the batch; {name!r} has {shape}.")
        dtype = str(import_onnx().helper.tensor_dtype_to_np_dtype(code))
        program.declare(name, tuple(int(extent) for extent in shape), dtype)

    def _convolution(self, program: Program, layouts: TensorLayouts, one: Convolution) -> None:
        """Adds the calls of a convolution, with its packed filters."""
        chosen = self.chosen[one.conv]
        made = self.kernels.convolution(one.conv, chosen)
        packed = [program.constant(f"{one.output}/filter", made.pack_filter(one.filter))]
        if one.bias is not None:
            packed.append(program.constant(f"{one.output}/bias", made.pack_bias(one.bias)))
        if one.scale is not None:
            packed.append(program.constant(f"{one.output}/scale", one.scale))
        last = layouts.last(one.output)
        residual = [layouts.reads(one.residual, last)] if one.residual else []
        made.call(program, layouts.reads(one.data, last), packed, residual, layouts.makes(one.output))
        layer = ModelLayer(one.name, str(one.conv), chosen.algorithm, chosen.tile.as_dict(), chosen.tier)
        self.layers.setdefault((one.name, one.conv), layer)

    def _steps(self, program: Program, planned: Plan) -> list[driver.Step]:
        steps: list[driver.Step] = []
        for call in planned.calls:
            if isinstance(call, Copy):
                call = self._copy(program, call)
            names, seen = (*call.inputs, *call.outputs), self.kernels.arguments(call.kernel)
            arguments = tuple(driver.Argument(planned.places[name], *one) for name, one in zip(names, seen, strict=True))
            for name, argument in zip(names, arguments, strict=True):
                assert argument.bytes == program.bytes(name), f"{call.kernel} takes {argument} for {name} {program.shapes[name]}"
            steps.append(driver.Step(call.kernel, arguments))
        return steps

    def _copy(self, program: Program, one: Copy) -> Call:
        shape, whole, dtype = program.shapes[one.source], program.shapes[one.output], program.dtypes[one.source]
        words = "x".join(map(str, shape)), "x".join(map(str, whole)), str(one.axis), str(one.begin), dtype
        kernel = self.kernels.loops("_".join(("copy", *words)), kernels.copy(shape, whole, one.axis, one.begin, dtype))
        return Call(kernel, (one.source,), (one.output,))


def _read_and_made(source: Source, parts: Parts) -> list[str]:
    """Values that the parts read or write, except constants that only TVM's part reads."""
    names: list[str] = []
    for one in parts.convolutions:
        names += [one.data, one.output, *([one.residual] if one.residual else [])]
    for view in parts.views:
        names += [view.source, view.output]
    for cut in parts.cuts:
        names += [cut.source, cut.output]
    for join in parts.joins:
        names += [*join.sources, join.output]
    for response in parts.responses:
        names += [response.source, response.output]
    for pool in parts.pools:
        names += [pool.source, pool.output]
    sources = {one.source for one in parts.interleaves}
    names = [name for name in names if name not in sources] + [one.output for one in parts.interleaves]
    for resize in parts.resizes:
        names += [resize.source, resize.output]
    for table in parts.tables:
        names += [table.source, table.output]
    for index in parts.rest:
        node = source.graph.nodes[index]
        names += [name for name in (*node.input, *node.output) if name and name not in source.constants]
    return names
