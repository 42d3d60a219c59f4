"""The check of a kernel before it is timed, the same on CPUs and GPUs.

Every tensor of a call lies between two guard zones: inputs, packed filters, the workspace if the caller allocates it, and the output. A
kernel runs `ROUNDS` times. In the first round the zones hold NaN, in the second one the largest number; of integers the least and the
largest. So what lies beside a tensor shows in the output if the kernel reads it, even if an activation swallows one of the two, and a
value that the kernel writes there is not that of both rounds. Before each round the kernel runs on an input of NaN (or of other integers),
so that none of its memory holds right values. It is wrong if

- a guard zone or an input changed,
- an element of the output is still as before, or its error exceeds the tolerance,
- or the outputs of the rounds are not equal bit by bit.

A read beside a tensor that changes no output, and one that goes further than a zone, are not seen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from im2win.spec.conv2d import Conv2d
from im2win.spec.dtypes import ELEMENT_TYPES

ROUNDS = 2
PAGE = 4096  # elements; zones are multiples of it, so that tensors start where they would without zones, as far as caches can tell
MOST = 1 << 18  # elements of a zone


def zone_of(size: int) -> int:
    """Elements of the guard zones of a tensor: as many as it has, since a wrong index is off by a row or an image; at most `MOST`."""
    return min(-(-size // PAGE) * PAGE, MOST)


def guard_values(dtype: str) -> tuple[float, float]:
    """What guard zones hold, in each round."""
    kind = np.dtype(dtype)
    if kind.kind in "iu":
        return int(np.iinfo(kind).min), int(np.iinfo(kind).max)
    return math.nan, float(ml_dtypes.finfo(kind).max)  # type: ignore[no-untyped-call]


def _dtype(array: Any) -> str:
    return str(array.dtype).removeprefix("torch.")


def copied(array: Any) -> Any:
    """A copy of an array of numpy or PyTorch."""
    return array.copy() if isinstance(array, np.ndarray) else array.clone()


def same(one: Any, other: Any) -> bool:
    """Whether two contiguous arrays of numpy or PyTorch hold the same bytes: NaN is NaN, and 0 is not -0."""
    if isinstance(one, np.ndarray):
        return bool(np.array_equal(one.reshape(-1).view(np.uint8), other.reshape(-1).view(np.uint8)))
    import torch

    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


class Guarded:
    """A tensor between two guard zones.

    Attributes:
        tensor: what lies between the zones, C-contiguous.
        zones: what lies before and behind it, [elements].
        given: the values that a kernel may not change; None for what it may.
    """

    def __init__(self, memory: Any, shape: tuple[int, ...], given: Any = None) -> None:
        """`memory`: uninitialised, [elements of `shape` and of two zones]. `given`: values of the tensor that no kernel may change."""
        zone = zone_of(math.prod(shape))
        self.zones = (memory[:zone], memory[-zone:])
        self.tensor = memory[zone:-zone].reshape(shape)
        self.given = given
        self._armed: Any = None
        self.restore()

    def restore(self) -> None:
        """Writes the given values again."""
        if self.given is not None:
            self.tensor[...] = self.given

    def arm(self, value: float) -> None:
        """Fills the zones."""
        for zone in self.zones:
            zone[...] = value
        self._armed = copied(self.zones[0])

    def changed(self) -> str:
        """What changed since it was armed: "zone", "tensor" or ""; the tensor has its values again."""
        if not all(same(zone, self._armed) for zone in self.zones):
            return "zone"
        if self.given is not None and not same(self.tensor, self.given):
            self.restore()
            return "tensor"
        return ""


class CheckedBench:
    """Tensors, expected output and guard zones of one problem. Subclasses know where memory lies and how outputs are compared.

    Attributes:
        buffers: the guarded tensors of every call, by name; the last one is the output.
        inputs: the tensors of `buffers` but the output.
        poisons: values that mark unwritten outputs: one that no output takes, or two, of which an output takes one at most.
    """

    def __init__(self, conv: Conv2d, inputs: Mapping[str, Any]) -> None:
        self.conv = conv
        self.buffers = {name: self.guarded(tensor) for name, tensor in inputs.items()}
        self.inputs = {name: buffer.tensor for name, buffer in self.buffers.items()}
        self.buffers["output"] = Guarded(self._memory(conv.out_dtype, math.prod(conv.output_shape)), conv.output_shape)
        self.output = self.buffers["output"].tensor
        self.poisons = ELEMENT_TYPES[conv.out_dtype].poisons

    def guarded(self, tensor: Any, *, given: bool = True) -> Guarded:
        """Memory of a tensor's shape and type between guard zones, with its values if they are given: no kernel may change these."""
        shape = tuple(tensor.shape)
        return Guarded(self._memory(_dtype(tensor), math.prod(shape)), shape, tensor if given else None)

    def _memory(self, dtype: str, size: int) -> Any:
        """Uninitialised memory of a tensor of `size` elements and its guard zones, [elements]; the tensor starts at a cache line."""
        raise NotImplementedError

    def wait(self) -> None:
        """Returns when the device has done all work."""

    def error(self) -> float:
        """The output's largest difference from the expected one, relative to the magnitude that errors are relative to; NaN if one is."""
        raise NotImplementedError

    def missing(self) -> int:
        """How many elements of the output are NaN."""
        raise NotImplementedError


def forget(bench: CheckedBench, kernel: Callable[[], Any]) -> None:
    """Runs a kernel on another input (NaN, or other integers), so that no memory holds what it stored for its own. The output changes."""
    data = bench.inputs["data"]
    data[...] = ~data if ELEMENT_TYPES[bench.conv.dtype].integer else math.nan
    kernel()
    bench.wait()
    bench.buffers["data"].restore()


def verify(
    bench: CheckedBench, kernel: Callable[[], Any], allowed: float, own: Mapping[str, Guarded] | None = None
) -> tuple[str, float | None]:
    """Runs a kernel `ROUNDS` times and checks what it did, as this module's text says.

    Args:
        allowed: the largest error of a right output.
        own: guarded tensors of the kernel alone, by name: packed ones, and its workspace, in which values count as right if it wrote them.

    Returns:
        What is wrong ("" if nothing), and the error, None if it is not a number.
    """
    buffers = {**bench.buffers, **(own or {})}
    first, measured = None, None
    for number in range(ROUNDS):
        forget(bench, kernel)
        for buffer in buffers.values():
            values = guard_values(_dtype(buffer.tensor))
            buffer.arm(values[number])
            if buffer.given is None:
                buffer.tensor[...] = values[number]
        bench.output[...] = bench.poisons[number % len(bench.poisons)]
        kernel()
        bench.wait()
        message, measured = _wrong(bench, buffers, allowed)
        if message:
            return message, measured
        if first is not None and not same(bench.output, first):
            return "its output is another one in a second run, with other values beside its tensors", None
        first = copied(bench.output)
    return "", measured


def _wrong(bench: CheckedBench, buffers: Mapping[str, Guarded], allowed: float) -> tuple[str, float | None]:
    """What is wrong after a run ("" if nothing), and the error, None if it is not a number."""
    for name, changed in [(name, buffer.changed()) for name, buffer in buffers.items()]:
        if changed:
            return f"wrote outside its {name}" if changed == "zone" else f"wrote into its input {name}", None
    measured = bench.error()
    if not measured <= allowed:  # also true of NaN
        count = 0 if ELEMENT_TYPES[bench.conv.out_dtype].integer else bench.missing()
        if count:
            return f"{count} elements of {math.prod(bench.conv.output_shape)} are NaN", None
        return f"error {measured:.2e} exceeds {allowed:.2e}", measured
    return "", measured
