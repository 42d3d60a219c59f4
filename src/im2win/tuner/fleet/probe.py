"""The tuner's own check of what workers say: some pixels of each output, which the worker sends, against the float64 reference.

The pixels are drawn anew for every job, after the candidates are built. A worker whose outputs are wrong everywhere is always found out,
one whose outputs are wrong in a share p of all pixels with probability 1 - (1 - p)^`PIXELS`. One that computes right outputs by other means
than the candidate is not: nothing that it says can be known to be of the candidate.
"""

from __future__ import annotations

import math
import secrets
from typing import Any

import numpy as np
import numpy.typing as npt

from im2win.numerics.reference import random_tensors, reference
from im2win.numerics.tolerance import tolerance
from im2win.spec.accuracy import Accuracy
from im2win.spec.conv2d import Conv2d

PIXELS = 16
SLACK = 4  # times the tolerance, which is relative to the largest output of all: that of some pixels alone is smaller, by less than this

Array = npt.NDArray[Any]
Pixels = tuple[tuple[int, int, int], ...]


def draw(conv: Conv2d) -> Pixels:
    """Pixels (image, row, column) of a problem's output that nobody can know before."""
    sizes = (conv.batch, *conv.output_size)
    count = min(PIXELS, math.prod(sizes))
    return tuple((secrets.randbelow(sizes[0]), secrets.randbelow(sizes[1]), secrets.randbelow(sizes[2])) for _ in range(count))


class Probe:
    """The tensors of one problem, of which a worker's outputs are checked.

    Args:
        target: "cpu" or "cuda", whose runners differ in the tensors of int8 problems.
    """

    def __init__(self, conv: Conv2d, seed: int, target: str) -> None:
        self.conv, self.seed = conv, seed
        self._tensors = random_tensors(conv, seed) if target == "cpu" else _as_on_gpu(conv, seed)

    def wrong(self, pixels: Pixels, values: Any, accuracy: Accuracy) -> str | None:
        """What is wrong with an output's values, [pixels, channels]; None if nothing is."""
        expected, scale = self._expected(pixels)
        if not isinstance(values, np.ndarray) or values.shape != expected.shape:
            return f"values of {len(pixels)} pixels of the output were asked for, and others came"
        error = float(np.max(np.abs(values - expected))) / scale
        allowed = SLACK * tolerance(self.conv, accuracy)
        return None if error <= allowed else f"its output differs from the reference by {error:.2e}, and {allowed:.2e} is allowed"

    def _expected(self, pixels: Pixels) -> tuple[Array, float]:
        """The reference at the pixels, [pixels, channels], and the largest magnitude that errors are relative to."""
        conv, given = self.conv, self._tensors
        images, rows, cols = (np.array(places) for places in zip(*pixels, strict=True))
        small = conv.with_(batch=len(pixels), height=conv.window[0], width=conv.window[1], stride=(1, 1), padding=(0, 0, 0, 0))
        others: dict[str, Array] = {name: given[name] for name in ("bias", "scale") if name in given}
        if conv.residual:
            planes = given["residual"] if conv.layout == "NCHW" else given["residual"].transpose(0, 3, 1, 2)
            values = planes[images, :, rows, cols][:, :, None, None]
            others["residual"] = values if conv.layout == "NCHW" else values.transpose(0, 2, 3, 1)
        windows = self._windows(images, rows, cols)
        expected = reference(small, windows, given["filter"], **others).reshape(len(pixels), -1)
        linear = reference(small.with_(activation="none"), windows, given["filter"], **others)
        return expected, float(max(np.max(np.abs(expected)), np.max(np.abs(linear)))) or 1.0

    def _windows(self, images: Array, rows: Array, cols: Array) -> Array:
        """The input that each pixel depends on, [pixels, channels, rows, columns] or channels last, zeros where padding is."""
        conv = self.conv
        planes = self._tensors["data"] if conv.layout == "NCHW" else self._tensors["data"].transpose(0, 3, 1, 2)
        top, left, _, _ = conv.padding
        found = np.zeros((len(images), conv.in_channels, *conv.window), planes.dtype)
        for place, (image, row, col) in enumerate(zip(images, rows, cols, strict=True)):
            y, x = row * conv.stride[0] - top, col * conv.stride[1] - left
            y0, y1 = max(y, 0), min(y + conv.window[0], conv.height)
            x0, x1 = max(x, 0), min(x + conv.window[1], conv.width)
            if y0 < y1 and x0 < x1:
                found[place, :, y0 - y : y1 - y, x0 - x : x1 - x] = planes[image, :, y0:y1, x0:x1]
        return found if conv.layout == "NCHW" else np.ascontiguousarray(found.transpose(0, 2, 3, 1))


def _as_on_gpu(conv: Conv2d, seed: int) -> dict[str, Array]:
    """The tensors that a GPU's runner makes, as numpy's: float32 holds every value of the narrower types of floats."""
    import torch

    from im2win.tuner.runners.cuda import device_tensors

    tensors = device_tensors(conv, seed, "cpu")
    return {name: (one.float() if one.dtype in (torch.float16, torch.bfloat16) else one).numpy() for name, one in tensors.items()}
