"""A model as a program: kernels to call, views and copies, after every operator has been compiled."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Shape = tuple[int, ...]
Arguments = list[tuple[Shape, str]]


@dataclass(frozen=True)
class Call:
    """A call of one kernel with its inputs and outputs by name, passed in that order."""

    kernel: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class Copy:
    """A tensor, or part of one, to be written into `output` from element `begin` of `axis` on."""

    source: str
    output: str
    axis: int
    begin: int


@dataclass
class Program:
    """Kernels and values of a model at one batch.

    Attributes:
        shapes, dtypes: of every value.
        constants: values that lie in the file.
        views: output -> source with the same elements.
        cuts: output -> source that holds its elements side by side, and the first one's offset in bytes.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    shapes: dict[str, Shape] = field(default_factory=dict)
    dtypes: dict[str, str] = field(default_factory=dict)
    constants: dict[str, np.ndarray[Any, Any]] = field(default_factory=dict)
    views: dict[str, str] = field(default_factory=dict)
    cuts: dict[str, tuple[str, int]] = field(default_factory=dict)
    calls: list[Call | Copy] = field(default_factory=list)

    def declare(self, name: str, shape: Shape, dtype: str) -> None:
        """Adds a value."""
        self.shapes[name], self.dtypes[name] = tuple(int(extent) for extent in shape), dtype

    def constant(self, name: str, array: np.ndarray[Any, Any]) -> str:
        """Adds a constant."""
        self.declare(name, array.shape, str(array.dtype))
        self.constants[name] = array
        return name

    def bytes(self, name: str) -> int:
        """Size of a value in bytes."""
        return math.prod(self.shapes[name]) * np.dtype(self.dtypes[name]).itemsize


def tensors_of(function: Any) -> Arguments:
    """Shape and dtype of every tensor that a function takes."""
    types = (parameter.ty for parameter in function.params)
    return [(tuple(int(extent) for extent in one.shape), str(one.dtype)) for one in types]
