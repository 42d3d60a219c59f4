"""Loads and runs built convolutions. Needs numpy and the TVM runtime, never the compiler."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from typing import Any, NamedTuple, cast

import im2win
from im2win.packing import codec as packs
from im2win.runtime.libraries import load_kernel
from im2win.runtime.manifest import ArtefactError, Manifest, manifest_path
from im2win.runtime.seal import seal
from im2win.runtime.tensors import ArgumentError, Port, aligned, argument, as_numpy, empty_like, finite
from im2win.runtime.weights import weights_file, weights_path
from im2win.spec.conv2d import Conv2d
from im2win.spec.symbols import SYMBOL


class Op:
    """A built convolution: ``y = op(x, w)``.

    Operators are thread-safe: calls share nothing but the code. A call takes contiguous CPU tensors and returns a tensor of the same
    library as x.
    """

    def __init__(self, manifest: Manifest, library: Path) -> None:
        self.manifest = manifest
        self._module = load_kernel(library)
        self._kernel = self._module[SYMBOL]
        self._library = library

    @property
    def conv(self) -> Conv2d:
        """The problem that the operator computes."""
        return self.manifest.conv

    @property
    def algorithm(self) -> str:
        """Name of the algorithm."""
        return self.manifest.algorithm

    @property
    def schedule(self) -> str:
        """Name of the schedule that runs the algorithm."""
        return self.manifest.schedule

    @property
    def method(self) -> str:
        """Algorithm and schedule in one word."""
        return self.manifest.method

    @property
    def tile(self) -> dict[str, Any]:
        """The parameters of the schedule."""
        return self.manifest.tile

    @property
    def tuned(self) -> bool:
        """Whether a tuning record chose the tile, rather than the analytic model."""
        return self.manifest.tuned

    @property
    def extra_bytes(self) -> int:
        """Bytes that a call allocates beside input, filter and output."""
        return self.manifest.extra_bytes

    def __repr__(self) -> str:
        return f"<Op {self.conv} {self.method} {'tuned' if self.tuned else 'default tile'}>"

    def bind(self, w: Any, bias: Any = None, scale: Any = None) -> Any:
        """Packs filters, bias and scale once. Returns a `Layer`, which is called with the input alone.

        Args:
            w: filters of `conv.filter_shape`; later changes to the tensor have no effect.
            bias: [out_channels]; required where the problem has a bias, refused elsewhere.
            scale: float32 [out_channels], with `own_steps` [out_channels + 5], finite; required where the problem requantises its outputs,
                refused elsewhere.

        Raises:
            ArgumentError: a tensor has the wrong shape, dtype or layout, a scale is not finite, or a bias or scale is missing or not
                wanted.
        """
        return Layer(self, w, bias, scale)

    def __call__(self, x: Any, w: Any, bias: Any = None, residual: Any = None, out: Any = None, scale: Any = None) -> Any:
        """The convolution of x with w. Every call packs the filters; `bind` them for repeated use.

        Args:
            x: input of `conv.input_shape`; see `Layer.__call__` for `residual` and `out`.
            w: filters of `conv.filter_shape`; see `bind` for `bias` and `scale`.

        Raises:
            ArgumentError: a tensor has the wrong shape, dtype or layout.
        """
        return self.bind(w, bias, scale)(x, residual, out)

    def export(self, path: str | os.PathLike[str]) -> Path:
        """Writes the shared library to `path` and its manifest beside it. Returns the library's path.

        Raises:
            ArtefactError: the folder cannot be written.
        """
        target = Path(path)
        partial = target.with_name(target.name + ".partial")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(self._library, partial)
            seal(partial, self.manifest.facts())
            os.replace(partial, target)
            manifest_path(target).write_text(self.manifest.to_json(target))
        except OSError as error:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
            raise ArtefactError(f"`path` (={str(target)!r}) must be a file that can be written: {error.strerror or error}.") from None
        return target

    def export_c(self, folder: str | os.PathLike[str], name: str | None = None) -> Path:
        """Compiles the operator again as C or CUDA code that does not depend on TVM.

        The files are NAME.h, libNAME.so and libNAME.a for a CPU, and NAME.h and NAME.cu for a GPU.

        Args:
            folder: where the files go; it is created if it does not exist.
            name: suffix of the names of functions and files: letters, digits and underscores; the problem's key if None.

        Raises:
            ArtefactError: the operator was built for another device, or the folder cannot be written.
            ValueError: `name` cannot be part of a C identifier.
            ToolchainError: there is no C compiler.
            ImportError: only TVM's runtime is installed.
        """
        return im2win.export_c(self, folder, name)


class Launch(NamedTuple):
    """What a call of a bound layer runs, for callers that run it themselves.

    Attributes:
        product: TVM's function of x, `packed`, the residual if there is one, and the output.
        transform: function of x and the workspace that runs before `product`, which then takes the workspace in place of x; None for none.
        made: elements of the workspace, of x's dtype; 0 for none. Without a transform `product` takes the workspace behind x.
        packed: packed filters, bias and scale.
    """

    product: Any
    transform: Any
    made: int
    packed: list[Any]


class Layer:
    """An `Op` with its filters bound."""

    def __init__(self, op: Op, w: Any, bias: Any, scale: Any = None) -> None:
        conv = op.conv
        self.op = op
        self._memory = [aligned(array) for array in self._pack(w, bias, scale)]
        self._packed = [argument(array) for array in self._memory]
        self._kernel = op._kernel
        self._data = Port("x", conv.input_shape, conv.dtype)
        self._residual = Port("residual", conv.output_shape, conv.out_dtype) if conv.residual else None
        self._out = Port("out", conv.output_shape, conv.out_dtype, writable=True)

    def _pack(self, w: Any, bias: Any, scale: Any) -> list[Any]:
        conv, dtypes = self.op.conv, self.op.conv.dtypes
        for name, value in (("bias", bias), ("scale", scale)):
            if (value is not None) != (name in dtypes):
                raise ArgumentError(f"`{name}` must be {'given' if name in dtypes else 'left out'}: the problem is {conv}.")
        assert packs.kind_of(self.op.manifest.pack) not in packs.ONLY_CUDA
        pack = cast("packs.CpuPack", self.op.manifest.pack)
        packed = [pack.filter(conv, as_numpy("w", w, conv.filter_shape, dtypes["filter"]))]
        if conv.bias:
            packed.append(pack.bias(conv, as_numpy("bias", bias, (conv.out_channels,), dtypes["bias"])))
        if conv.requantised:
            packed.append(finite("scale", as_numpy("scale", scale, (conv.scales,), dtypes["scale"])))
        return packed

    def rebind(self, w: Any, bias: Any = None, scale: Any = None) -> None:
        """Packs other filters (and bias and scale) into the memory of the bound ones. No call may run meanwhile.

        Raises:
            ArgumentError: a tensor has the wrong shape, dtype or layout, a scale is not finite, or a bias or scale is missing or not
                wanted.
        """
        for memory, array in zip(self._memory, self._pack(w, bias, scale), strict=True):
            memory[...] = array

    def __call__(self, x: Any, residual: Any = None, out: Any = None) -> Any:
        """The convolution of x with the bound filters, written into `out` if it is given.

        Args:
            x: input of `conv.input_shape`, contiguous, on the CPU.
            residual: tensor of `conv.output_shape`; required where the problem adds one, refused elsewhere.
            out: tensor of `conv.output_shape` to write to; a new tensor of x's library if None. It must not overlap the inputs.

        Raises:
            ArgumentError: a tensor has the wrong shape, dtype or layout.
        """
        data = self._data(x)
        if (residual is None) == (self._residual is not None):
            raise ArgumentError(f"`residual` must be {'left out' if self._residual is None else 'given'}: the problem is {self.op.conv}.")
        added = () if self._residual is None else (self._residual(residual),)
        result = empty_like(x, self._out.shape, self._out.dtype) if out is None else out
        output = self._out(result)
        if out is not None and (self._overlaps(output, data, self._data) or (added and self._overlaps(output, *added, self._residual))):
            raise ArgumentError("`out` must not overlap x or residual.")
        self._kernel(data, *self._packed, *added, output)
        return result

    def export(self, path: str | os.PathLike[str]) -> Path:
        """Writes library and manifest as `Op.export` does, and beside them the packed filters for C++ programs.

        Args:
            path: of the library; the filters' path has ".weights" appended (`runtime.weights.weights_file`).

        Raises:
            ArtefactError: the folder cannot be written.
        """
        library = self.op.export(path)
        names = [name for name in self.op.conv.arguments if name in ("filter", "bias", "scale")]
        packed = dict(zip(names, self._memory, strict=True))
        target = weights_path(library)
        try:
            target.write_bytes(weights_file(self.op.conv, packed, library.read_bytes()))
        except OSError as error:
            raise ArtefactError(f"`path` (={str(target)!r}) must be a file that can be written: {error.strerror or error}.") from None
        return library

    @property
    def launch(self) -> Launch:
        """The functions and tensors of a call, for callers that run it themselves."""
        return Launch(self._kernel, None, 0, self._packed)

    def run(self, x: Any, residual: Any, out: Any, like: Any = None) -> None:
        """A call without its checks.

        Args:
            x: tensor of the right shape, dtype, device and memory order that requires no gradient; `residual` and `out` likewise.
            like: not used on a CPU; see `CudaLayer.run`.
        """
        added = () if residual is None else (residual,)
        self._kernel(x, *self._packed, *added, out)

    def _overlaps(self, output: Any, tensor: Any, port: Any) -> bool:
        start, first = output.data_ptr(), tensor.data_ptr()
        return bool(start < first + port.nbytes and first < start + self._out.nbytes)
