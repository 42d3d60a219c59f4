"""Storage formats of a model's values: those of ONNX, or, for a float16 or bfloat16 model, its type, channels last where faster.

Convolutions, pooling, local response normalisation and concatenation of channels read and write channels-last memory (N, H, W, C), which
the fastest kernels of these types use. TVM compiles everything else. Its loops compute in float32, as the model states, and convert what
they read and write (`rest`), including views of images. Separate conversions remain only where a model's input or output meets a
convolution, and where a concatenation or a product needs ONNX's order.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np

from im2win.frontends.models import half
from im2win.frontends.models.parts import Convolution, Join, Parts, Pool, Response
from im2win.frontends.models.precision import NARROW
from im2win.frontends.models.program import Call, Program, Shape
from im2win.frontends.models.source import Source
from im2win.frontends.onnx.layers import ModelError, import_onnx


@dataclass(frozen=True)
class Stored:
    """A value of a program and the ONNX value that it holds; `last` means channels last."""

    name: str
    origin: str
    dtype: str
    last: bool


class TensorLayouts:
    """Stores every value as ONNX does."""

    def __init__(self, source: Source, parts: Parts, program: Program) -> None:
        self.source, self.parts, self.program = source, parts, program
        self.functions: dict[str, Any] = {}

    def dtype(self, name: str) -> str:
        """Element type of a value in ONNX."""
        if name in self.source.constants:
            return str(self.source.constants[name].dtype)
        return str(import_onnx().helper.tensor_dtype_to_np_dtype(self.source.graph.types[name]))

    def shape(self, name: str) -> Shape:
        """Shape of a value in ONNX.

        Raises:
            ModelError: the shape is not fixed.
        """
        if name in self.source.constants:
            return tuple(self.source.constants[name].shape)
        shape = self.source.graph.shapes.get(name)
        if shape is None or not all(isinstance(extent, int) for extent in shape):
            raise ModelError(f"value {name!r} has the shape {shape}; shapes must be fixed but for the batch.")
        return tuple(int(extent) for extent in shape)

    def reads(self, name: str, last: bool = False) -> str:
        """The program's value from which a part reads an ONNX value; `last` asks for channels last."""
        return name

    def makes(self, name: str) -> str:
        """The program's value to which a part writes an ONNX value."""
        return name

    def last(self, name: str) -> bool:
        """Whether a value is written with channels last."""
        return False

    def origin(self, stored: str) -> str:
        """The ONNX value that a value of the program holds."""
        return stored

    def read_by_rest(self, name: str) -> Stored:
        """The stored value from which TVM's part reads an ONNX value."""
        return Stored(name, name, self.dtype(name), False)

    def made_by_rest(self, names: Iterable[str]) -> list[Stored]:
        """The stored values to which TVM's part writes ONNX values that others read."""
        return [Stored(name, name, self.dtype(name), False) for name in names]

    def joins(self) -> tuple[Join, ...]:
        """The concatenations, in terms of the program's values."""
        return self.parts.joins


class NarrowLayouts(TensorLayouts):
    """Stores floating-point values in `precision`; those that convolutions, pooling and response normalisation use have channels last."""

    def __init__(self, source: Source, parts: Parts, program: Program, precision: str, arithmetic: half.Arithmetic) -> None:
        super().__init__(source, parts, program)
        self.precision, self._arithmetic = precision, arithmetic
        self._ports = {one.name: Stored(one.name, one.name, one.dtype, False) for one in (*source.inputs, *source.outputs)}
        self._given = {one.name for one in source.inputs}
        self._last, self._joins_last = _channels_last(self)
        self._held: dict[str, Stored] = {}
        self._ready: set[str] = set()
        self._wanted: set[str] = set()
        self._finished: set[str] = set()

    def narrow(self, name: str) -> bool:
        """Whether a value is stored in the model's precision."""
        return self.dtype(name) in ("float32", *NARROW)

    def last(self, name: str) -> bool:
        return name in self._last

    def makes(self, name: str) -> str:
        stored = self._at_home(name)
        if name in self._ports and stored.name != name and name not in self._finished:
            self._finished.add(name)  # a model's output is converted from what its maker wrote
            self._convert(stored, self._ports[name])
        return stored.name

    def reads(self, name: str, last: bool = False) -> str:
        if name in self.source.constants:
            return self._constant(name, last)
        home = self._at_home(name)
        self._wanted.add(name)
        if name in self._given and home.name != name and home.name not in self._ready:
            self._ready.add(home.name)
            self._convert(self._ports[name], home)
        if home.last == last or not self.narrow(name):
            return home.name
        other = self._declare(Stored(f"{name}/{'last' if last else 'first'}", name, self.precision, last))
        if other.name not in self._ready:
            self._ready.add(other.name)
            _, channels, height, width = self.shape(name)
            if channels == 1 or height == width == 1:  # both orders are the same
                self.program.views[other.name] = home.name
            else:
                self._convert(home, other)
        return other.name

    def origin(self, stored: str) -> str:
        return self._held[stored].origin if stored in self._held else stored

    def read_by_rest(self, name: str) -> Stored:
        return self._ports[name] if name in self._given else self._at_home(name)

    def made_by_rest(self, names: Iterable[str]) -> list[Stored]:
        found: list[Stored] = []
        for name in names:
            found += [self._ports[name]] if name in self._ports else []
            found += [self._at_home(name)] if name not in self._ports or (name in self._wanted and self.narrow(name)) else []
        return found

    def joins(self) -> tuple[Join, ...]:
        found = []
        for join in self.parts.joins:
            last = join.output in self._joins_last
            sources = tuple(self.reads(name, last) for name in join.sources)
            found.append(Join(sources, self.makes(join.output), 3 if last else join.axis))
        return tuple(found)

    def _at_home(self, name: str) -> Stored:
        """The stored value that a value's maker writes. A model's input or output that convolutions use has one beside the port itself."""
        if not self.narrow(name):
            return self._declare(Stored(name, name, self.dtype(name), False))
        return self._declare(Stored(f"{name}/half" if name in self._ports else name, name, self.precision, name in self._last))

    def _declare(self, stored: Stored) -> Stored:
        if stored.name not in self.program.shapes:
            shape = self.shape(stored.origin)
            self.program.declare(stored.name, half.last_shape(shape) if stored.last else shape, stored.dtype)
        self._held.setdefault(stored.name, stored)
        return stored

    def _constant(self, name: str, last: bool) -> str:
        array = self.source.constants[name]
        if array.dtype.kind != "f":
            return self.program.constant(name, array) if name not in self.program.shapes else name
        stored = f"{name}/{'last' if last else 'first'}"
        if stored not in self.program.shapes:
            array = narrowed(array, name, self.precision)
            self.program.constant(stored, np.ascontiguousarray(array.transpose(0, 2, 3, 1)) if last else array)
        return stored

    def _convert(self, source: Stored, target: Stored) -> None:
        kernel = f"convert_{len(self.functions)}"
        forms = source.dtype, source.last, target.dtype, target.last
        self.functions[kernel] = half.convert(self.shape(source.origin), *forms, self._arithmetic)
        self.program.calls.append(Call(kernel, (source.name,), (target.name,)))


def _channels_last(layouts: NarrowLayouts) -> tuple[frozenset[str], frozenset[str]]:
    """The values that are written with channels last, and those of them that concatenations write.

    TVM's part writes either order at no cost, so it writes what its readers need.
    """
    source, parts = layouts.source, layouts.parts
    last, wanted = _of_images(source, parts)
    made = {name for index in parts.rest for name in source.graph.nodes[index].output}
    last |= wanted & (made | {one.name for one in source.inputs})
    joins = set()
    for join in parts.joins:
        channels = join.axis == 1 and len(layouts.shape(join.output)) == 4 and layouts.narrow(join.output)
        if channels and (join.output in wanted or any(name in last for name in join.sources)):
            joins.add(join.output)
            last |= {join.output, *(made & set(join.sources))}
    return frozenset(last), frozenset(joins)


def _of_images(source: Source, parts: Parts) -> tuple[set[str], set[str]]:
    """The values that convolutions, pooling and response normalisation of images write, and those that they read."""
    planes = [one for one in parts.convolutions if one.conv.layout == "NCHW"]  # matrix products have no images
    windows: list[Pool | Response] = [*parts.pools]
    windows += [one for one in parts.responses if len(source.graph.shapes.get(one.source, ())) == 4]
    read = {name for one in planes for name in (one.data, one.residual) if name}
    return {one.output for one in (*planes, *windows)}, read | {one.source for one in windows}


def without_views(source: Source, parts: Parts) -> Parts:
    """The parts without views of images, where the order of elements matters. TVM's loops reorder these while they read or write."""
    made, read = _of_images(source, parts)
    made |= {join.output for join in parts.joins if join.axis == 1 and len(source.graph.shapes.get(join.output, ())) == 4}

    def matters(name: str) -> bool:
        shape = source.graph.shapes.get(name, ())
        return len(shape) == 4 and shape[1] != 1 and shape[2:] != (1, 1)

    moved = [one for one in parts.views if (one.source in made and matters(one.source)) or (one.output in read and matters(one.output))]
    nodes = {found[0] for one in moved if (found := source.graph.maker(one.output)) is not None}
    views = tuple(one for one in parts.views if one not in moved)
    return replace(parts, views=views, rest=tuple(sorted({*parts.rest, *nodes})))


def in_precision(convolutions: Iterable[Convolution], precision: str) -> list[Convolution]:
    """The convolutions of a float32 model as float16 or bfloat16 problems with channels last. Matrix products have that layout already.

    Raises:
        ModelError: filters or a bias exceed the range of the type.
    """

    def converted(one: Convolution) -> Convolution:
        bias = None if one.bias is None else narrowed(one.bias, one.name, precision)
        filters = narrowed(one.filter, one.name, precision)
        return replace(one, conv=one.conv.with_(dtype=precision, layout="NHWC"), filter=filters, bias=bias)

    return list(map(converted, convolutions))


def narrowed(array: np.ndarray[Any, Any], name: str, precision: str) -> np.ndarray[Any, Any]:
    """Constants in float16 or bfloat16.

    Raises:
        ModelError: a finite number exceeds the range of the type.
    """
    with np.errstate(over="ignore"):
        found = array.astype(precision)
    if not np.array_equal(np.isfinite(found), np.isfinite(array)):
        largest = float(np.abs(array[np.isfinite(array)]).max())
        limit = float(ml_dtypes.finfo(precision).max)  # type: ignore[no-untyped-call]
        raise ModelError(f"`dtype` (={precision!r}) must hold every weight; those of {name!r} reach {largest:g}, beyond {limit:g}.")
    return found
