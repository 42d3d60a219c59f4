"""Compiles CUDA to machine code with NVRTC, NVIDIA's compiler library, on machines with a driver and no toolkit."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_PACKAGES = "cuda-bindings, nvidia-cuda-nvrtc, nvidia-cuda-runtime and nvidia-cuda-cccl"
_TRAITS = "cuda/std/type_traits"


def _folders(pattern: str) -> list[Path]:
    """Folders of NVIDIA's Python packages that match a pattern."""
    found = importlib.util.find_spec("nvidia")
    roots = found.submodule_search_locations if found is not None else None
    return [path for root in roots or () for path in sorted(Path(root).glob(pattern))]


def available() -> bool:
    """Whether the packages of `pip install 'im2win[cuda]'` are installed: the compiler, its binding and the headers."""
    try:
        binding = importlib.util.find_spec("cuda.bindings.nvrtc")
    except ModuleNotFoundError:
        return False
    return binding is not None and bool(_folders("*/include/cuda_fp16.h")) and bool(_folders("*/include/cccl/cuda/std/cstdint"))


def cubin(source: str, arch: str) -> bytes:
    """Machine code of a CUDA source for an architecture such as "sm_90a".

    Of `cuda/std/type_traits` the source gets the few traits of `nvrtc_type_traits.hpp`: NVIDIA's header takes one to two seconds to read,
    more than most kernels take to compile, and no instruction depends on which of the two it is. A source that does not compile so is
    compiled with NVIDIA's.

    Raises:
        RuntimeError: the source does not compile (the message is the compiler's), or a package is missing.
    """
    if not available():
        raise RuntimeError(f"nvrtc: {_PACKAGES} must be installed: pip install 'im2win[cuda]'.")
    for library in _folders("*/lib/libnvrtc.so*"):
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    try:
        return _compiled(source, arch, {_TRAITS: _traits()})
    except _DoesNotCompile:
        return _compiled(source, arch, {})


class _DoesNotCompile(RuntimeError):
    """A source with errors. The message is the compiler's."""


@functools.cache
def _traits() -> str:
    return Path(__file__).with_name("nvrtc_type_traits.hpp").read_text(encoding="utf-8")


def _compiled(source: str, arch: str, headers: Mapping[str, str]) -> bytes:
    """Machine code of a source. `headers`: texts of headers by the names that they are included by, in place of files.

    Raises:
        _DoesNotCompile: the source has errors. RuntimeError: NVRTC fails otherwise.
    """
    from cuda.bindings import nvrtc

    def checked(answer: tuple[Any, ...]) -> Any:
        error, *values = answer
        if error != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise RuntimeError(f"nvrtc: {nvrtc.nvrtcGetErrorString(error)[1].decode()}")
        return values[0] if values else None

    def text(size: Any, get: Any) -> bytes:
        buffer = bytearray(checked(size(program)))
        checked(get(program, buffer))
        return bytes(buffer)

    includes = [f"-I{path}" for path in (*_folders("*/include"), *_folders("*/include/cccl"))]
    options = [option.encode() for option in (f"--gpu-architecture={arch}", "--std=c++17", "--disable-warnings", *includes)]
    texts, names = [one.encode() for one in headers.values()], [one.encode() for one in headers]
    program = checked(nvrtc.nvrtcCreateProgram(source.encode(), b"kernel.cu", len(headers), texts, names))
    try:
        if nvrtc.nvrtcCompileProgram(program, len(options), options)[0] != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            log = text(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog).rstrip(b"\0").decode(errors="replace")
            raise _DoesNotCompile(f"nvrtc: {log.strip()[:2000]}")
        return text(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN)
    finally:
        nvrtc.nvrtcDestroyProgram(program)
