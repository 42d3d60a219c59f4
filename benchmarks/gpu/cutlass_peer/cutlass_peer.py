"""CUTLASS as a peer on a GPU of compute capability 9.0: our kernels, PyTorch and the fastest right one of CUTLASS's variants on each layer.

    python benchmarks/gpu/cutlass_peer/cutlass_peer.py papers12 --batch 128 --cutlass DIR --json OUT/papers12-cutlass-nhwc-float16-b128.json

DIR holds the headers of a public release of CUTLASS (version 4.7 was used): `include/` and `tools/util/include/` of its source. The nvcc on
PATH compiles conv.cu against them, once for each variant, on all CPUs. The variants are plain convolutions of float16 tensors in NHWC with
float32 sums, whose channels are multiples of 8. The result is a file as `im2win bench` writes it, in which `cutlass` is a peer and
`peers_chosen` names its variant. `--resume` goes on where a run was stopped.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import ctypes
import os
import shutil
import subprocess
import tempfile
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from im2win.bench import cuda as cuda_bench
from im2win.bench.cuda_harness import Subject, measured_error
from im2win.bench.cuda_peers import PLAN_S, plan_tolerance
from im2win.bench.peers.plans import PlanError, fastest
from im2win.bench.peers.subject import PeerError
from im2win.bench.results import Result, ResultError, Row
from im2win.cli.commands import workload
from im2win.codegen.llvm import ToolchainError
from im2win.common.messages import brief
from im2win.device.gpu import NoGpuError, device_gpu
from im2win.spec.conv2d import Conv2d
from im2win.tuner.runners.cuda import Bench, sample

SOURCE = Path(__file__).with_name("conv.cu")
INCLUDES = ("include", "tools/util/include")
BUILD_S = 580.0


@dataclass(frozen=True)
class Variant:
    """A tile of the output (pixels by filters, and channels of a step), and a cluster of thread blocks along both."""

    tile_m: int
    tile_n: int
    tile_k: int
    cluster_m: int
    cluster_n: int

    def __str__(self) -> str:
        return f"tile {self.tile_m}x{self.tile_n}x{self.tile_k}, cluster {self.cluster_m}x{self.cluster_n}"

    @property
    def defines(self) -> list[str]:
        """As options of nvcc."""
        return [f"-D{name.upper()}={value}" for name, value in vars(self).items()]


VARIANTS = (
    Variant(128, 128, 64, 2, 1),
    Variant(128, 128, 64, 1, 2),
    Variant(128, 128, 64, 1, 1),
    Variant(128, 192, 64, 2, 1),
    Variant(128, 64, 64, 2, 1),
    Variant(64, 256, 64, 2, 1),
    Variant(256, 64, 64, 1, 1),
    Variant(64, 64, 64, 1, 1),
)
"""One consumer warp group holds all sums of a tile in registers, so that a tile has 24576 elements at most."""


class Sizes(ctypes.Structure):
    """`Sizes` of conv.cu."""

    _fields_ = [
        (name, ctypes.c_int)
        for name in (
            "batch", "height", "width", "in_channels", "out_channels", "kernel_h", "kernel_w", "pad_top", "pad_left", "pad_bottom",
            "pad_right", "stride_h", "stride_w", "dilation_h", "dilation_w",
        )
    ]  # fmt: skip

    @classmethod
    def of(cls, conv: Conv2d) -> Sizes:
        """Those of a layer."""
        size = (conv.batch, conv.height, conv.width, conv.in_channels, conv.out_channels)
        return cls(*size, *conv.kernel, *conv.padding, *conv.stride, *conv.dilation)


def unsupported(conv: Conv2d) -> str | None:
    """Why conv.cu does not compute a layer; None if it does."""
    if (conv.types, conv.layout) != ("float16", "NHWC"):
        return f"`dtype` and `layout` (={conv.types}, {conv.layout}) must be float16 and NHWC"
    if conv.groups != 1:
        return f"`groups` (={conv.groups}) must be 1"
    if conv.bias or conv.residual or conv.activation != "none":
        return "it has an epilogue, and this is the plain convolution"
    if conv.in_channels % 8 or conv.out_channels % 8:
        return f"`in_channels` (={conv.in_channels}) and `out_channels` (={conv.out_channels}) must be multiples of 8 for TMA"
    return None


def includes(cutlass: Path) -> list[str]:
    """nvcc's options for CUTLASS's headers.

    Raises:
        ValueError: the folder does not hold them.
    """
    for folder, header in zip(INCLUDES, ("cutlass/cutlass.h", "cutlass/util/packed_stride.hpp"), strict=True):
        if not (cutlass / folder / header).is_file():
            raise ValueError(f"`--cutlass` (={str(cutlass)!r}) must be a folder with CUTLASS's {folder}/{header}.")
    return [option for folder in INCLUDES for option in ("-I", str(cutlass / folder))]


def command(variant: Variant, cutlass: Path, out: Path) -> list[str]:
    """nvcc's call that makes a shared library, or an object file if `out` ends in .o."""
    how = ["-O3", "-DNDEBUG", "-std=c++17", "--expt-relaxed-constexpr", "-diag-suppress", "20012", "-Xcompiler", "-fPIC"]
    code = ["-gencode", "arch=compute_90a,code=sm_90a"]
    kind = "-c" if out.suffix == ".o" else "-shared"
    return ["nvcc", *how, *code, *includes(cutlass), *variant.defines, kind, "-o", str(out), str(SOURCE)]


def build(variant: Variant, cutlass: Path, out: Path) -> str:
    """Compiles a variant, unless `out` is there. Returns why it could not be compiled, "" if it could."""
    if out.exists():
        return ""
    made = out.with_name(f"new-{out.name}")
    try:
        done = subprocess.run(command(variant, cutlass, made), capture_output=True, text=True, timeout=BUILD_S)
    except subprocess.TimeoutExpired:
        return f"nvcc took more than {BUILD_S:.0f} s"
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error" in line]
        return (errors or done.stderr.splitlines() or ["nvcc failed"])[0][:300]
    made.rename(out)
    return ""


def build_all(cutlass: Path, folder: Path) -> dict[Variant, Path | str]:
    """The libraries of all variants, or why one could not be compiled, with one nvcc for each CPU."""
    if shutil.which("nvcc") is None:
        raise ValueError("nvcc must be on PATH, to compile CUTLASS.")
    includes(cutlass)
    folder.mkdir(parents=True, exist_ok=True)
    names = {variant: folder / ("-".join(map(str, vars(variant).values())) + ".so") for variant in VARIANTS}
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        failed = list(pool.map(lambda one: build(one[0], cutlass, one[1]), names.items()))
    return {variant: reason or path for (variant, path), reason in zip(names.items(), failed, strict=True)}


def runner(library: Path, conv: Conv2d, x: int, w: int, y: int, stream: int) -> Callable[[], None]:
    """Prepares a layer in a variant's library, on tensors at these device addresses. The result enqueues a call.

    Raises:
        PeerError: CUTLASS refuses the layer; or, in a call, the launch.
    """
    loaded, why, pointer = ctypes.CDLL(str(library)), ctypes.c_char_p(), ctypes.c_void_p
    prepare, run, free = loaded.cutlass_conv_prepare, loaded.cutlass_conv_run, loaded.cutlass_conv_free
    prepare.restype, prepare.argtypes = pointer, [ctypes.POINTER(Sizes), pointer, pointer, pointer, ctypes.POINTER(ctypes.c_char_p)]
    run.restype, run.argtypes = ctypes.c_char_p, [pointer, pointer]
    free.restype, free.argtypes = None, [pointer]
    handle = prepare(ctypes.byref(Sizes.of(conv)), x, w, y, ctypes.byref(why))
    if not handle:
        raise PeerError((why.value or b"CUTLASS gave no reason").decode())

    def call() -> None:
        if (reason := run(handle, stream)) is not None:
            raise PeerError(f"CUTLASS: {reason.decode()}")

    weakref.finalize(call, free, handle)
    return call


def subject(bench: Bench, built: Mapping[Variant, Path | str]) -> Subject:
    """The fastest right variant on a layer.

    Raises:
        PeerError: no variant computes such a layer.
        PlanError: no variant was right.
    """
    import torch

    conv = bench.conv
    if (reason := unsupported(conv)) is not None:
        raise PeerError(f"cutlass: {reason}.")
    w = bench.inputs["filter"].permute(0, 2, 3, 1).contiguous()  # [K, R, S, C]
    out = torch.empty(conv.output_shape, dtype=torch.float16, device="cuda")
    stream, allowed = torch.cuda.current_stream().cuda_stream, plan_tolerance(conv, "float32", bench.scale)
    measured = 0.0

    def ready(library: Path | str) -> Callable[[], None]:
        if isinstance(library, str):
            raise PlanError(library)
        call = runner(library, conv, bench.inputs["data"].data_ptr(), w.data_ptr(), out.data_ptr(), stream)

        def keeping(held: Any = (w, out)) -> None:  # the tensors live as long as the call
            call()

        return keeping

    def check(call: Callable[[], object]) -> str:
        nonlocal measured
        out.fill_(float("nan"))
        call()
        try:
            measured = measured_error(bench, out, allowed)
        except RuntimeError as error:
            return brief(error, 200)
        return ""

    best = fastest(((str(variant), library) for variant, library in built.items()), ready, check, partial(sample, bench), PLAN_S)
    call = ready(best.plan)
    if wrong := check(call):
        raise PlanError(f"{best.name}: {wrong}")
    return Subject(call, 0, measured, best.said)


def show(done: int, total: int, row: Row) -> None:
    """A line for a layer."""
    peers = ", ".join(f"{name} {ms:.4f}" for name, ms in row.peers.items())
    ours = "failed" if row.ours_ms is None else f"{row.ours_ms:.4f}"
    said = row.peers_chosen.get("cutlass") or row.peers_failed.get("cutlass", "")
    print(f"{done}/{total} {row.layer}: ours {ours}, {peers} ms; {said}", flush=True)


def main() -> None:
    """Reads the command line, compiles, measures, writes the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("what", help="a suite, or a file of layers")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--layers", help="only these, by name, with commas between them")
    parser.add_argument("--cutlass", type=Path, required=True, help="folder with CUTLASS's include/ and tools/util/include/")
    parser.add_argument("--build", type=Path, help="keep the compiled variants in this folder")
    parser.add_argument("--logs", type=Path, help="tuning records, for our kernels")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--resume", action="store_true", help="keep the layers of --json that would be timed alike today")
    options = parser.parse_args()
    try:
        layers = workload.read(options.what, options.batch, options.layers, "float16", "NHWC", deployed=True)[0]
        device_gpu()  # before minutes of compilation, raises NoGpuError
        with tempfile.TemporaryDirectory(prefix="im2win-cutlass-") as folder:
            built = build_all(options.cutlass, options.build or Path(folder))
            for variant, library in built.items():
                print(f"{variant}: {library if isinstance(library, str) else 'compiled'}", flush=True)
            before = Result.load(options.json) if options.resume and options.json.exists() else None
            result = cuda_bench.run(
                layers, against=("torch",), logs=options.logs, rounds=options.rounds, suite=Path(options.what).stem, progress=show,
                keep=lambda result: result.save(options.json), before=before, extra={"cutlass": partial(subject, built=built)},
            )  # fmt: skip
        result.save(options.json)
    except (ValueError, NoGpuError, ToolchainError, ResultError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
