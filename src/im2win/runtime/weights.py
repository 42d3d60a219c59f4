"""Stores a layer's packed filters in a file beside its library, for programs that do not pack (see export/include/im2win/layer.hpp)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from im2win.spec.conv2d import Conv2d

ALIGNMENT = 64  # bytes, of every tensor's data in the file


def weights_path(library: Path) -> Path:
    """The path of a layer's packed filters: the library's path with .weights appended."""
    return library.with_name(library.name + ".weights")


def checksum(content: bytes) -> int:
    """64-bit FNV-1a of a library. It detects filters that were packed for another library, which would silently give wrong numbers."""
    value = 0xCBF29CE484222325
    for byte in content:
        value = (value ^ byte) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    return value


def weights_file(conv: Conv2d, packed: Mapping[str, npt.NDArray[Any]], library: bytes) -> bytes:
    """The file's content: lines of text up to "data", then the data, each tensor at a multiple of `ALIGNMENT` bytes.

        im2win-weights 1
        library 9a3c...                     checksum of the library, in hexadecimal digits
        tensor data float32 1 64 28 28      a line for every argument of the kernel, in order: name, type, shape
        packed filter float32 1 576 64      "packed" where the data is in this file
        tensor output float32 1 64 28 28
        data

    Args:
        packed: filters, and bias and scale where the problem has them, as the kernel reads them.
    """
    shapes = {"data": conv.input_shape, "residual": conv.output_shape, "output": conv.output_shape}
    lines = ["im2win-weights 1", f"library {checksum(library):016x}"]
    for name in conv.arguments:
        shape = packed[name].shape if name in packed else shapes[name]
        lines.append(" ".join(map(str, ("packed" if name in packed else "tensor", name, conv.dtypes[name], *shape))))
    content = "\n".join([*lines, "data", ""]).encode()
    for name in conv.arguments:
        if name in packed:
            content += b"\0" * (-len(content) % ALIGNMENT) + np.ascontiguousarray(packed[name]).astype(conv.dtypes[name]).tobytes()
    return content
