"""Machine code of CUDA kernels."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from im2win.codegen import cuda as cuda_codegen
from im2win.codegen.llvm import ToolchainError
from im2win.device.gpu import H200


def disassembler() -> Path:
    """nvdisasm, of a CUDA toolkit or of the package `nvidia-cuda-nvdisasm`."""
    if found := shutil.which("nvdisasm"):
        return Path(found)
    spec = importlib.util.find_spec("nvidia")
    for folder in spec.submodule_search_locations or () if spec else ():
        for found_path in Path(folder).glob("*/bin/nvdisasm"):
            return found_path
    pytest.skip("needs nvdisasm: pip install nvidia-cuda-nvdisasm")


def disassembled(source: str, folder: Path) -> dict[str, list[str]]:
    """The instructions and labels of each kernel of a source, compiled for an H200, by the kernel's name."""
    path = folder / "kernel.cubin"
    try:
        path.write_bytes(cuda_codegen.cubin(source, H200))
    except ToolchainError as error:
        pytest.skip(str(error))
    text = subprocess.run([disassembler(), "-c", path], capture_output=True, text=True, check=True).stdout
    _, *parts = re.split(r"\n\.text\.(\w+):", text)
    plain = ([re.sub(r"/\*[^*]*\*/", "", line).strip() for line in code.splitlines()] for code in parts[1::2])
    return {name: [line for line in lines if line] for name, lines in zip(parts[::2], plain, strict=True)}
