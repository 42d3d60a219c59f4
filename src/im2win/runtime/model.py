"""Loads and runs compiled models. Needs numpy and the TVM runtime, never the compiler."""

from __future__ import annotations

import collections
import mmap
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import tvm_ffi

from im2win.runtime.libraries import load_kernel
from im2win.runtime.manifest import ArtefactError, manifest_path
from im2win.runtime.model_manifest import Bucket, ModelManifest, Port, weights_path
from im2win.runtime.tensors import ArgumentError, empty, is_torch, view
from im2win.runtime.tensors import Port as Argument

ALIGNMENT = 64  # bytes; vector loads from a tensor's begin then cross no cache line
Array = np.ndarray[Any, Any]
Pieces = list[tuple[Bucket, int]]


class Model:
    """A compiled model: ``y = model(x)``.

    A call takes any number of images. It runs the function of the smallest of `batches` that holds them and pads the rest with zeros. More
    images than the largest batch are run in pieces. The model is thread-safe: calls that run at the same time have separate workspaces.
    """

    def __init__(self, manifest: ModelManifest, library: Path, weights: Path) -> None:
        self.manifest = manifest
        self._library, self._weights_file = library, weights
        self._module = load_kernel(library)
        self._buckets = sorted(manifest.buckets, key=lambda bucket: bucket.batch)
        self._functions = {bucket.batch: self._function(bucket.function) for bucket in self._buckets}
        self._whole = {bucket.batch: self._arguments(bucket.batch) for bucket in self._buckets}
        self._holds = [port.batched for port in manifest.inputs]
        self._idle: collections.deque[Any] = collections.deque()
        self._weights = self._held(weights)

    def _function(self, name: str) -> Any:
        try:
            return self._module[name]
        except (AttributeError, KeyError) as error:
            raise ArtefactError(f"{self._library}: it has no function {name!r}, which its manifest names.") from error

    def _held(self, path: Path) -> Any:
        """The weights as a tensor. The file is memory-mapped, so that loading reads nothing."""
        if not self.manifest.weights_bytes:
            return tvm_ffi.from_dlpack(np.zeros(1, np.uint8))
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        return tvm_ffi.from_dlpack(np.frombuffer(mapped, np.uint8))

    def _arguments(self, batch: int) -> tuple[list[Argument], list[Argument]]:
        """What checks the inputs and outputs of a call with exactly `batch` images."""
        inputs = [Argument(port.name, port.at(batch), port.dtype) for port in self.inputs]
        return inputs, [Argument(port.name, port.at(batch), port.dtype, writable=True) for port in self.outputs]

    @property
    def inputs(self) -> tuple[Port, ...]:
        """Names, dtypes and shapes of the inputs."""
        return self.manifest.inputs

    @property
    def outputs(self) -> tuple[Port, ...]:
        """Names, dtypes and shapes of the outputs."""
        return self.manifest.outputs

    @property
    def batches(self) -> tuple[int, ...]:
        """The batch sizes that the model was compiled for, ascending."""
        return tuple(bucket.batch for bucket in self._buckets)

    def __repr__(self) -> str:
        return f"<Model {len(self.manifest.layers)} convolutions and products, batches {', '.join(map(str, self.batches))}>"

    def __call__(self, *inputs: Any, out: Any = None) -> Any:
        """The outputs for inputs in the model's order: one tensor, or a tuple if the model has several outputs.

        Args:
            inputs: contiguous CPU tensors of numpy, PyTorch or any DLPack library. Results are PyTorch tensors if the first input is one,
                else numpy arrays.
            out: tensors to write to, in the form in which the call returns them; new tensors if None.

        Raises:
            ArgumentError: a tensor has the wrong shape, dtype or layout, or the number of inputs is wrong.
        """
        self._counted(inputs)
        results = self._run([_array(port.name, value) for port, value in zip(self.inputs, inputs, strict=True)], self._given(out))
        return self._as_given(inputs, results) if out is None else out

    def _as_given(self, inputs: Sequence[Any], results: Sequence[Array]) -> Any:
        """Results in the form in which a call returns them."""
        made: list[Any] = list(results)
        if is_torch(inputs[0] if inputs else None):
            import torch

            made = [torch.from_numpy(array) for array in results]
        return made[0] if len(made) == 1 else tuple(made)

    def bind(self, *inputs: Any, out: Any = None) -> Bound:
        """The model with its inputs and outputs fixed, for calls in a loop: they are checked now, and no more in the calls.

        Args:
            inputs: CPU tensors as for a call, as many images as one of `batches`. A call reads what they hold then.
            out: tensors to write to; new ones if None.

        Raises:
            ArgumentError: as for a call, or the number of images is none of `batches`.
        """
        self._counted(inputs)
        arrays = [_array(port.name, value) for port, value in zip(self.inputs, inputs, strict=True)]
        images, tensors, results = self._checked(arrays, self._given(out))
        if images not in self._whole:
            raise ArgumentError(f"{images} images must be one of the batches {self.batches} to be bound.")
        made = self._as_given(inputs, results) if out is None else out
        return Bound(self._functions[images], (self._weights, self._workspace(), *tensors), (arrays, results), made)

    def _counted(self, inputs: Sequence[Any]) -> None:
        """Checks the number of inputs."""
        if len(inputs) != len(self.inputs):
            names = ", ".join(port.name for port in self.inputs)
            raise ArgumentError(f"the model takes {len(self.inputs)} inputs ({names}), not {len(inputs)}.")

    def _given(self, out: Any) -> tuple[Any, ...]:
        """The tensors to write to; empty if the call allocates them."""
        given = () if out is None else tuple(out) if isinstance(out, tuple | list) else (out,)
        if out is not None and len(given) != len(self.outputs):
            raise ArgumentError(f"`out` must have {len(self.outputs)} tensors, not {len(given)}.")
        return given

    def run(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """The outputs by name, for inputs by name.

        Raises:
            ArgumentError: a name is missing or unknown, or a tensor has the wrong shape, dtype or layout.
        """
        known = [port.name for port in self.inputs]
        if set(inputs) != set(known):
            raise ArgumentError(f"inputs ({', '.join(inputs) or 'none'}) must be exactly those of the model: {', '.join(known) or 'none'}.")
        results = self(*(inputs[name] for name in known))
        return dict(zip((port.name for port in self.outputs), results if isinstance(results, tuple) else (results,), strict=True))

    def _run(self, inputs: list[Array], given: Sequence[Any]) -> list[Array]:
        images, tensors, results = self._checked(inputs, given)
        if images in self._whole:
            self._call(images, tensors)
            return results
        begin = 0
        for bucket, count in self._pieces(images):
            self._piece(bucket, inputs, results, begin, count)
            begin += count
        return results

    def _checked(self, inputs: list[Array], given: Sequence[Any]) -> tuple[int, list[Any], list[Array]]:
        """The number of images, all tensors as kernel arguments, and the outputs, new ones where none are given."""
        images = self._first(inputs)
        if images not in self._whole:
            images = self._images({port.name: value.shape for port, value in zip(self.inputs, inputs, strict=True)})
            self._pieces(images)
        taken, made = self._whole.get(images) or self._arguments(images)
        try:
            tensors = [argument(value) for argument, value in zip(taken, inputs, strict=True)]
        except ArgumentError:
            self._images({port.name: value.shape for port, value in zip(self.inputs, inputs, strict=True)})
            raise
        if given:
            results = [_array(argument.name, value) for argument, value in zip(made, given, strict=True)]
        else:
            results = [empty(argument.shape, argument.dtype) for argument in made]
        for argument, value in zip(made, results, strict=True):
            tensors.append(argument(value))
            if any(np.may_share_memory(value, one) for one in inputs):
                raise ArgumentError(f"`out` ({argument.name}) must not overlap the inputs.")
        return images, tensors, results

    def _first(self, inputs: Sequence[Array]) -> int:
        """The number of images in the first input that holds any; 0 where there is none."""
        return next((value.shape[0] for value, holds in zip(inputs, self._holds, strict=True) if holds and value.shape), 0)

    def _images(self, shapes: Mapping[str, tuple[int, ...]]) -> int:
        """The number of images in inputs of these shapes."""
        counts = {port.name: (*shapes[port.name], 0)[0] for port in self.inputs if port.batched}
        if not counts:
            return self._buckets[0].batch
        if len(set(counts.values())) != 1 or 0 in counts.values():
            stated = ", ".join(f"{name}: {count}" for name, count in counts.items())
            raise ArgumentError(f"inputs must hold the same number of images, at least 1; they hold {stated}.")
        return next(iter(counts.values()))

    def _pieces(self, images: int) -> Pieces:
        """The compiled batches to run one after another, each with the number of images that it takes."""
        pieces: Pieces = []
        largest = self._buckets[-1]
        left = images
        while left:
            bucket = next((bucket for bucket in self._buckets if bucket.batch >= left), largest)
            count = min(left, bucket.batch)
            pieces.append((bucket, count))
            left -= count
        whole = next((port.name for port in (*self.inputs, *self.outputs) if not port.batched), None)
        if whole is not None and (len(pieces) > 1 or pieces[0][0].batch != images):
            raise ArgumentError(f"{images} images must be one of the batches {self.batches}: {whole!r} does not grow with the batch.")
        return pieces

    def _piece(self, bucket: Bucket, inputs: list[Array], results: list[Array], begin: int, count: int) -> None:
        """Runs images `begin` to `begin + count`. Where the function takes more images, its tensors are padded with zeros."""
        full = count == bucket.batch
        taken: list[Array] = []
        for port, value in zip(self.inputs, inputs, strict=True):
            part = value[begin : begin + count] if port.batched else value
            if not full and port.batched:
                padded = empty(port.at(bucket.batch), port.dtype)
                padded[:count], padded[count:] = part, 0
                part = padded
            taken.append(part)
        made = [
            (value[begin : begin + count] if port.batched else value) if full else empty(port.at(bucket.batch), port.dtype)
            for port, value in zip(self.outputs, results, strict=True)
        ]
        self._call(bucket.batch, [view("", one, one.shape, str(one.dtype)) for one in (*taken, *made)])
        if not full:
            for value, part in zip(results, made, strict=True):
                value[begin : begin + count] = part[:count]

    def _workspace(self) -> Any:
        """A workspace that no call uses."""
        try:
            return self._idle.pop()
        except IndexError:
            return _workspace(max(one.workspace for one in self._buckets))

    def _call(self, batch: int, tensors: Sequence[Any]) -> None:
        """Runs the function of a compiled batch on its inputs and outputs, in a workspace that no other call uses."""
        workspace = self._workspace()
        try:
            self._functions[batch](self._weights, workspace, *tensors)
        finally:
            self._idle.append(workspace)

    def export(self, path: str | os.PathLike[str]) -> Path:
        """Writes the library to `path`, and its weights and manifest beside it. Returns the library's path.

        Raises:
            ArtefactError: the folder cannot be written.
        """
        target = Path(path)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            for source, goal in ((self._weights_file, weights_path(target)), (self._library, target)):
                if goal.exists() and goal.samefile(source):
                    continue
                partial = goal.with_name(goal.name + ".partial")
                shutil.copyfile(source, partial)
                os.replace(partial, goal)
            write_manifest(self.manifest, target)
        except OSError as error:
            raise ArtefactError(f"`path` (={str(target)!r}) must be a file that can be written: {error.strerror or error}.") from None
        return target


class Bound:
    """A model with its inputs and outputs fixed; see `Model.bind`. It is called by one thread at a time."""

    def __init__(self, function: Any, arguments: tuple[Any, ...], held: Any, outputs: Any) -> None:
        self._function, self._arguments, self._held, self.outputs = function, arguments, held, outputs

    def __call__(self) -> Any:
        """Computes the outputs, and returns them in the form in which a call of the model does."""
        self._function(*self._arguments)
        return self.outputs


def write_manifest(manifest: ModelManifest, library: Path) -> ModelManifest:
    """Writes a manifest beside a library, and returns it with the file names that library and weights have there."""
    named = replace(manifest, library=library.name, weights=weights_path(library).name)
    manifest_path(library).write_text(named.to_json())
    return named


def _workspace(size: int) -> Any:
    """An aligned buffer of at least `size` bytes."""
    return tvm_ffi.from_dlpack(empty((max(size, 1),), np.uint8, ALIGNMENT))


def _array(name: str, value: Any) -> Array:
    """The tensor as a numpy array that shares its memory. The caller checks shape and dtype."""
    if isinstance(value, np.ndarray):
        return value
    if is_torch(value):
        view(name, value, tuple(value.shape), str(value.dtype).removeprefix("torch."))  # checks device, contiguity and gradients
        array: Array = value.numpy()
        return array
    if not hasattr(value, "__dlpack__"):
        raise ArgumentError(f"`{name}` (a {type(value).__name__}) must be a numpy array, a torch tensor or a DLPack tensor.")
    shared: Array = np.from_dlpack(value)
    return shared
