"""Loading and running built convolutions; needs numpy and the TVM runtime, never the compiler."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import importlib.util
import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tvm_ffi

from im2win import packs
from im2win.chunk_packing import ChunkPack
from im2win.cuda_packing import CudaPack
from im2win.problem import Conv2d, ConvError
from im2win.quantised_packing import QuantisedPack
from im2win.split_packing import SplitPack
from im2win.tensors import ArgumentError, Port, aligned, as_numpy, empty_like
from im2win.weights import weights_file, weights_path

SCHEMA = 3
SYMBOL = "conv2d"
_FIELDS = {
    "schema", "conv", "algorithm", "tile", "pack", "target", "machine", "isa", "threads", "tuned", "extra_bytes", "tvm", "im2win",
    "library", "sha256", "made",
}  # fmt: skip


class ArtefactError(ValueError):
    """A library or manifest that cannot be loaded; the message names the file and what is wrong with it."""


@functools.cache
def runtime_library() -> ctypes.CDLL:
    """Loads TVM's runtime (not its compiler) and lets kernels use every CPU that this process may use."""
    spec = importlib.util.find_spec("tvm")
    if spec is None or not spec.origin:
        raise ArtefactError("the TVM runtime is not installed: pip install apache-tvm.")
    # TVM takes half of the logical CPUs unless told; its thread pool reads this when the first kernel runs.
    os.environ.setdefault("TVM_NUM_THREADS", str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1))
    library = next(p for p in (Path(spec.origin).parent / "lib").iterdir() if p.name.startswith("libtvm_runtime."))
    return ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)


@functools.cache
def cuda_runtime_library() -> ctypes.CDLL:
    """Loads the part of TVM's runtime that runs kernels on a GPU.

    Raises:
        ArtefactError: it is not there, or the machine has no CUDA driver.
    """
    host = Path(str(runtime_library()._name))
    try:
        return ctypes.CDLL(str(host.with_name(host.name.replace("libtvm_runtime.", "libtvm_runtime_cuda."))), ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise ArtefactError(f"kernels for a GPU need TVM's CUDA runtime and the CUDA driver: {error}.") from None


@dataclass(frozen=True)
class Manifest:
    """What a shared library holds, as stored beside it.

    made: on a GPU, elements of the tensor that a kernel of its own makes from the input before the product, the whole or a part at a time;
        0 where there is none.
    """

    conv: Conv2d
    algorithm: str
    tile: dict[str, Any]
    pack: packs.Pack
    target: str
    machine: str
    isa: str
    threads: int
    tuned: bool
    extra_bytes: int
    tvm: str
    im2win: str
    made: int = 0

    def to_json(self, library: Path) -> str:
        """The manifest's text for the library it lies beside."""
        values = {
            "schema": SCHEMA, "conv": str(self.conv), "algorithm": self.algorithm, "tile": self.tile, "pack": packs.as_dict(self.pack),
            "target": self.target, "machine": self.machine, "isa": self.isa, "threads": self.threads, "tuned": self.tuned,
            "extra_bytes": self.extra_bytes, "tvm": self.tvm, "im2win": self.im2win, "library": library.name,
            "sha256": hashlib.sha256(library.read_bytes()).hexdigest(), "made": self.made,
        }  # fmt: skip
        return json.dumps(values, indent=1) + "\n"

    @classmethod
    def read(cls, path: Path) -> tuple[Manifest, str]:
        """The manifest in a file, and its library's sha256.

        Raises:
            ArtefactError: missing, not JSON, or not such a manifest.
        """
        try:
            values = json.loads(path.read_text())
        except FileNotFoundError:
            raise ArtefactError(f"{path}: no manifest there; `im2win build` writes it beside the library.") from None
        except (ValueError, OSError) as error:
            raise ArtefactError(f"{path}: not a readable manifest ({error}).") from None
        if not isinstance(values, dict) or "schema" not in values:
            raise ArtefactError(f"{path}: not a manifest of im2win (its fields differ).")
        if values.get("kind") == "model":
            raise ArtefactError(f"{path}: the manifest of a whole model; `im2win.load_model` loads it.")
        if values["schema"] != SCHEMA:
            raise ArtefactError(f"{path}: manifest schema {values['schema']} is not {SCHEMA}; build the library again.")
        if set(values) != _FIELDS:
            raise ArtefactError(f"{path}: not a manifest of im2win (its fields differ).")
        try:
            conv, pack, made = Conv2d.parse(values["conv"]), packs.from_dict(values["pack"]), int(values["made"])
        except (ConvError, KeyError, TypeError, ValueError) as error:
            raise ArtefactError(f"{path}: {error}") from None
        names = ("algorithm", "tile", "target", "machine", "isa", "threads", "tuned", "extra_bytes", "tvm", "im2win")
        return cls(conv=conv, pack=pack, made=made, **{name: values[name] for name in names}), str(values["sha256"])


def manifest_path(library: Path) -> Path:
    """Where a library's manifest lies: beside it, with .json appended."""
    return library.with_name(library.name + ".json")


def load_kernel(library: Path) -> Any:
    """The module in a shared library, with TVM's runtime behind it.

    The dynamic linker takes two files of one path for the same library, even where the file was replaced in between; so each load goes
    through a link with a name of its own.
    """
    runtime_library()
    with tempfile.TemporaryDirectory(prefix="im2win-load-") as folder:
        link = Path(folder) / "conv.so"
        link.symlink_to(library.resolve())
        module = tvm_ffi.load_module(str(link))
        if _launch is not None:
            with contextlib.suppress(OSError, ValueError):  # a kernel without parallel loops, or for a GPU: TVM's runtime serves it
                ctypes.c_void_p.in_dll(ctypes.CDLL(str(link), mode=os.RTLD_NOLOAD), "__TVMBackendParallelLaunch").value = _launch.value
        return module


_launch: ctypes.c_void_p | None = None


def launch_through(function: ctypes.c_void_p | None) -> None:
    """Lets kernels loaded from now on run their parallel loops through a function like TVMBackendParallelLaunch; None: through TVM's."""
    global _launch
    _launch = function


class Op:
    """A built convolution: ``y = op(x, w)``.

    Thread-safe: calls share nothing but the code. Each call takes contiguous CPU tensors and returns one of x's kind.
    """

    def __init__(self, manifest: Manifest, library: Path) -> None:
        self.manifest = manifest
        self._module = load_kernel(library)
        self._kernel = self._module[SYMBOL]
        self._library = library

    @property
    def conv(self) -> Conv2d:
        """The problem it computes."""
        return self.manifest.conv

    @property
    def algorithm(self) -> str:
        """Name of its algorithm."""
        return self.manifest.algorithm

    @property
    def tile(self) -> dict[str, Any]:
        """The numbers of its schedule."""
        return self.manifest.tile

    @property
    def tuned(self) -> bool:
        """Whether a tuning record chose the tile, rather than the model."""
        return self.manifest.tuned

    @property
    def extra_bytes(self) -> int:
        """Bytes it allocates during a call beside input, filter and output."""
        return self.manifest.extra_bytes

    def __repr__(self) -> str:
        return f"<Op {self.conv} {self.algorithm} {'tuned' if self.tuned else 'default tile'}>"

    def bind(self, w: Any, bias: Any = None) -> Any:
        """Packs filters (and bias) once; the result is called with the input alone.

        Args:
            w: filters of `conv.filter_shape`; later changes to it are not seen.
            bias: [out_channels], exactly where the problem has a bias.

        Raises:
            ArgumentError: a tensor that does not fit, or a bias missing or not wanted.
        """
        return Layer(self, w, bias)

    def __call__(self, x: Any, w: Any, bias: Any = None, residual: Any = None, out: Any = None) -> Any:
        """The convolution of x with w; filters are packed in every call, so bind them for repeated use.

        Raises:
            ArgumentError: a tensor that does not fit; see `Conv2d` for shapes.
        """
        return self.bind(w, bias)(x, residual, out)

    def export(self, path: str | os.PathLike[str]) -> Path:
        """Writes the shared library to `path` and its manifest beside it; returns the library's path.

        Raises:
            ArtefactError: the folder cannot be written.
        """
        target = Path(path)
        partial = target.with_name(target.name + ".partial")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(self._library, partial)
            os.replace(partial, target)
            manifest_path(target).write_text(self.manifest.to_json(target))
        except OSError as error:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
            raise ArtefactError(f"{target}: cannot export there ({error.strerror or error}).") from None
        return target

    def export_c(self, folder: str | os.PathLike[str], name: str | None = None) -> Path:
        """Compiles it anew for programs in C and C++ that have nothing of TVM's: NAME.h and libNAME.so and .a, on a GPU NAME.h and NAME.cu.

        Args:
            folder: for the files; made if it does not exist.
            name: ends the names of functions and files: letters, digits and underscores; the problem's key if None.

        Raises:
            ArtefactError: built for another device, or the folder cannot be written. ValueError: `name` is no part of a C name.
            ToolchainError: no C compiler. ImportError: only TVM's runtime is installed.
        """
        from im2win.c_abi import export_manifest

        return export_manifest(self.manifest, Path(folder), name)


class Launch(NamedTuple):
    """What a call of a bound layer runs, for callers that run it by themselves.

    product: TVM's function of x, `packed`, what is added if anything is, and the output.
    transform: None, or the function of x and scratch that runs before it; `product` then takes scratch in place of x.
    made: elements of scratch, of x's type; 0 for none. Without a transform `product` takes scratch behind x.
    """

    product: Any
    transform: Any
    made: int
    packed: list[Any]


class Layer:
    """An `Op` with its filters bound."""

    def __init__(self, op: Op, w: Any, bias: Any) -> None:
        conv = op.conv
        if (bias is not None) != conv.bias:
            raise ArgumentError(f"`bias` must be {'given' if conv.bias else 'left out'}: the problem is {conv}.")
        self.op = op
        self._memory = [aligned(array) for array in self._pack(w, bias)]
        self._packed = [tvm_ffi.from_dlpack(array) for array in self._memory]
        self._kernel = op._kernel
        self._data = Port("x", conv.input_shape, conv.dtype)
        self._residual = Port("residual", conv.output_shape, conv.dtype) if conv.residual else None
        self._out = Port("out", conv.output_shape, conv.dtype, writable=True)

    def _pack(self, w: Any, bias: Any) -> list[Any]:
        conv, pack = self.op.conv, self.op.manifest.pack
        assert not isinstance(pack, CudaPack | ChunkPack | SplitPack | QuantisedPack)  # no CPU library has one
        packed = [pack.filter(conv, as_numpy("w", w, conv.filter_shape, conv.dtype))]
        if conv.bias:
            packed.append(pack.bias(conv, as_numpy("bias", bias, (conv.out_channels,), conv.dtype)))
        return packed

    def rebind(self, w: Any, bias: Any = None) -> None:
        """Packs other filters (and bias) into the memory of those bound; no call may run meanwhile.

        Raises:
            ArgumentError: a tensor that does not fit.
        """
        for memory, array in zip(self._memory, self._pack(w, bias), strict=True):
            memory[...] = array

    def __call__(self, x: Any, residual: Any = None, out: Any = None) -> Any:
        """The convolution of x with the bound filters, into `out` if given.

        Args:
            x: input of `conv.input_shape`, contiguous, on the CPU.
            residual: tensor of `conv.output_shape`, exactly where the problem adds one.
            out: where to write; a new tensor of x's kind if None. It must not overlap the inputs.

        Raises:
            ArgumentError: a tensor that does not fit.
        """
        data = self._data(x)
        if (residual is None) == (self._residual is not None):
            raise ArgumentError(f"`residual` must be {'left out' if self._residual is None else 'given'}: the problem is {self.op.conv}.")
        added = () if self._residual is None else (self._residual(residual),)
        result = empty_like(x, self._out.shape) if out is None else out
        output = self._out(result)
        if out is not None and (self._overlaps(output, data, self._data) or (added and self._overlaps(output, *added, self._residual))):
            raise ArgumentError("`out` must not overlap x or residual.")
        self._kernel(data, *self._packed, *added, output)
        return result

    def export(self, path: str | os.PathLike[str]) -> Path:
        """Writes the operator's library and manifest as `Op.export`, and beside them the packed filters for programs in C++.

        Args:
            path: of the library; the filters' has ".weights" appended (`weights.weights_file`).

        Raises:
            ArtefactError: the folder cannot be written.
        """
        library = self.op.export(path)
        names = [name for name in self.op.conv.arguments if name in ("filter", "bias")]
        packed = dict(zip(names, map(np.from_dlpack, self._packed), strict=True))
        try:
            weights_path(library).write_bytes(weights_file(self.op.conv, packed, library.read_bytes()))
        except OSError as error:
            raise ArtefactError(f"{weights_path(library)}: cannot export there ({error.strerror or error}).") from None
        return library

    @property
    def launch(self) -> Launch:
        """What a call runs."""
        return Launch(self._kernel, None, 0, self._packed)

    def run(self, x: Any, residual: Any, out: Any, like: Any = None) -> None:
        """A call without its checks: tensors of the right shape, type, device and memory order that require no gradient.

        Args:
            like: a PyTorch tensor of x's type and device, where x is none (`addressed`); a GPU's scratch comes from its allocator.
        """
        added = () if residual is None else (residual,)
        self._kernel(x, *self._packed, *added, out)

    def _overlaps(self, output: Any, tensor: Any, port: Any) -> bool:
        start, first = output.data_ptr(), tensor.data_ptr()
        return bool(start < first + port.nbytes and first < start + self._out.nbytes)


def load(path: str | os.PathLike[str]) -> Op:
    """Loads an exported convolution. Needs the TVM runtime only.

    Raises:
        ArtefactError: library or manifest missing, truncated, foreign, or built for instructions that this CPU lacks.
    """
    library = Path(path).resolve()  # a bare name would be searched on the library path
    manifest, digest = Manifest.read(manifest_path(library))
    try:
        content = library.read_bytes()
    except OSError as error:
        raise ArtefactError(f"{library}: cannot read the library ({error.strerror}).") from None
    if hashlib.sha256(content).hexdigest() != digest:
        raise ArtefactError(f"{library}: truncated, or not the library its manifest describes (checksums differ).")
    if manifest.target == "cuda":
        from im2win.cuda_runtime import CudaOp

        return CudaOp(manifest, library)
    flags = cpu_flags()
    if flags and manifest.isa and manifest.isa not in flags:
        raise ArtefactError(f"{library}: built for {manifest.isa} ({manifest.machine}), which this CPU lacks; build it for this machine.")
    return Op(manifest, library)


@functools.cache
def cpu_flags() -> frozenset[str]:
    """The CPU's features as Linux lists them; empty where it does not (then nothing is checked)."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    return frozenset(next((line.split(":")[1] for line in text.splitlines() if line.startswith(("flags", "Features"))), "").split())
