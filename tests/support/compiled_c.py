"""What tests of exported C need: a compiler, constants of a header, tensors as arguments."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from oracle import Array

COMPILER = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
WARNINGS = ("-Wall", "-Wextra", "-Wpedantic", "-Werror")
PROGRAMS = Path(__file__).parent / "c"

needs_compiler = pytest.mark.skipif(not COMPILER or not shutil.which("objcopy"), reason="needs a C compiler and objcopy on PATH")


def run(folder: Path, *words: object) -> str:
    """Runs a command in a folder and returns what it prints; it must succeed."""
    done = subprocess.run([str(word) for word in words], cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"{' '.join(map(str, words))}: {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


def sanitizing(folder: Path, sanitizer: str) -> list[str]:
    """The compiler's option for a sanitizer; none where the compiler or the system does not have it."""
    (folder / "empty.c").write_text("int main(void) { return 0; }\n")
    try:
        run(folder, COMPILER, f"-fsanitize={sanitizer}", "empty.c", "-o", "empty")
        run(folder, "./empty")
    except AssertionError:
        return []
    return [f"-fsanitize={sanitizer}"]


def constant(header: Path, name: str) -> int:
    """A constant of an exported header."""
    found = re.search(rf"^#define \w+?_{name} (\d+)$", header.read_text(), re.MULTILINE)
    assert found, name
    return int(found[1])


def pointer(array: Array | None) -> Any:
    """An array as an argument of a C function."""
    return None if array is None else ctypes.c_void_p(array.ctypes.data)


def empty(shape: Any, dtype: Any, alignment: int = 64) -> Array:
    """An array that begins at a multiple of `alignment` bytes."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.empty(size + alignment, np.uint8)
    start = -raw.ctypes.data % alignment
    return raw[start : start + size].view(dtype).reshape(shape)
