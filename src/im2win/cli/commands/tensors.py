"""Tensors from files that an option names, NAME=FILE."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

KINDS = ".npy, or .pb as ONNX stores it."


class InputError(ValueError):
    """An option that names no tensor file, or a file without a tensor."""


def named(stated: Sequence[str]) -> dict[str, Any]:
    """The tensors by name that `--input` options name."""
    given: dict[str, Any] = {}
    for text in stated:
        name, mark, file = text.partition("=")
        if not mark or not file:
            raise InputError(f"`--input` (={text!r}) must be NAME=FILE.")
        given[name] = _tensor(Path(file))
    return given


def _tensor(path: Path) -> Any:
    if path.suffix == ".npy":
        try:
            array = np.ascontiguousarray(np.load(path, allow_pickle=False))
            return array.view("bfloat16") if array.dtype == np.dtype("V2") else array  # as which numpy stores bfloat16
        except ValueError as error:
            raise InputError(f"`--input`: {path} is no array of numpy ({error}).") from None
    if path.suffix == ".pb":
        import onnx

        message = onnx.TensorProto()
        try:
            message.ParseFromString(path.read_bytes())
            return np.ascontiguousarray(onnx.numpy_helper.to_array(message))
        except OSError:
            raise
        except Exception as error:  # protobuf's DecodeError, a class without type information
            raise InputError(f"`--input`: {path} is no tensor of ONNX ({error}).") from None
    raise InputError(f"`--input`: {path} must end in .npy or .pb.")
