"""Measures the error of Winograd's forms against float64 convolution, in numpy with the arithmetic of a kernel."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from im2win.numerics.matvec_program import program
from im2win.numerics.reference import error
from im2win.numerics.tolerance import tolerance
from im2win.numerics.winograd_error import SPREAD
from im2win.numerics.winograd_int8 import LARGEST, quantised
from im2win.numerics.winograd_matrices import Matrix, Transform, floats, transform
from im2win.spec.conv2d import Conv2d

Array = npt.NDArray[Any]

FILTERS = 16  # filters of a measurement: enough for a stable largest output and a stable largest error


@dataclass(frozen=True)
class Measured:
    """A row of the table: the largest error relative to the largest output, and the project's tolerance."""

    outputs: int
    taps: int
    channels: int
    dtype: str
    noise: float
    error: float
    tolerance: float

    @property
    def share(self) -> float:
        """error / tolerance; a kernel above 1 would be refused."""
        return self.error / self.tolerance


def _applied(matrix: Matrix, values: Sequence[Array]) -> list[Array]:
    """matrix * values by the matvec program, in the arithmetic of the arrays."""

    def step(left: Array | None, factor: Fraction, right: Array) -> Array:
        term = right if factor == 1 else right.dtype.type(float(factor)) * right
        return np.asarray(term if left is None else left + term)

    return program(matrix).run(values, step)


def _both_ways(matrix: Matrix, tiles: Array) -> Array:
    """matrix * tile * matrix^T over the first two axes."""
    down = np.stack(_applied(matrix, list(tiles)))
    return np.stack(_applied(matrix, list(np.moveaxis(down, 1, 0))), axis=1)


def _in_winograds_form(form: Transform, tiles: Array, filters: Array, dtype: str) -> Array:
    """Outputs [m, m, tile, filter] of tiles [t, t, tile, channel] and filters [r, r, channel, filter], rounded to `dtype`."""
    g = floats(form.g)
    kernels = np.einsum("iu,uvck,jv->ijck", g, filters.astype(np.float64), g).astype(dtype).astype(np.float32)
    inputs = _both_ways(form.bt, tiles.astype(np.float32)).astype(dtype).astype(np.float32)
    if dtype == "float16":  # float32 accumulators are accurate enough
        products = np.matmul(inputs.astype(np.float64), kernels.astype(np.float64)).astype(dtype).astype(np.float32)
    else:
        products = _one_by_one(inputs, kernels)
    return _both_ways(form.at, products).astype(dtype)


def _one_by_one(inputs: Array, kernels: Array) -> Array:
    """inputs @ kernels in float32, one channel after the other, like kernels with fused products.

    A library's order differs between machines.
    """
    sums = np.zeros((*inputs.shape[:-1], kernels.shape[-1]), np.float32)
    for channel in range(inputs.shape[-1]):
        sums = (sums + inputs[..., channel, None].astype(np.float64) * kernels[..., None, channel, :]).astype(np.float32)
    return sums


def measure(
    outputs: int, taps: int, channels: int, dtype: str = "float32", *, tiles: int = 64, seed: int = 0, points: Any = None
) -> Measured:
    """The error of F(outputs x outputs, taps x taps) on normally distributed tensors.

    Args:
        channels: a sum has channels * taps * taps products.
        dtype: float32 or float16, to which inputs, filters, their transforms, products and outputs are rounded. Arithmetic and accumulators
            are float32.
        tiles: number of tiles of outputs to compute, with 16 filters each.
        points: see `numerics.winograd_matrices.transform`.

    Raises:
        ValueError: another dtype.
        WinogradError: see `numerics.winograd_matrices.transform`.
    """
    if dtype not in ("float32", "float16"):
        raise ValueError(f"measure: `dtype` (={dtype!r}) must be float32 or float16.")
    form = transform(outputs, taps, points)
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((form.size, form.size, tiles, channels)).astype(dtype)
    w = rng.standard_normal((taps, taps, channels, FILTERS)).astype(dtype)
    found = error(_in_winograds_form(form, x, w, dtype), _direct(x, w))
    return Measured(outputs, taps, channels, dtype, form.noise**2, found, tolerance(_problem(outputs, taps, channels, dtype, tiles)))


def _direct(tiles: Array, filters: Array) -> Array:
    """The same outputs in float64, from the formula."""
    taps, outputs = len(filters), len(tiles) - len(filters) + 1
    sums = np.zeros((outputs, outputs, tiles.shape[2], filters.shape[3]))
    for u in range(taps):
        for v in range(taps):
            sums += tiles[u : u + outputs, v : v + outputs].astype(np.float64) @ filters[u, v].astype(np.float64)
    return sums


def _problem(outputs: int, taps: int, channels: int, dtype: str, tiles: int) -> Conv2d:
    """A problem with this number of tiles."""
    side = math.isqrt(tiles) * outputs + taps - 1
    return Conv2d(1, channels, side, side, FILTERS, taps, dtype=dtype)


def _quantised_form(form: Transform, tiles: Array, filters: Array, scales: str) -> Array:
    """As `_in_winograds_form`, in the arithmetic of `numerics.winograd_int8`.

    The step of inputs is the factor by which they may grow at a position.
    """
    b, g = floats(form.bt), floats(form.g)
    growth = np.abs(b).sum(axis=1)
    step = np.outer(growth, growth)[:, :, None, None]
    inputs = np.clip(np.rint(np.einsum("iu,uvnc,jv->ijnc", b, tiles, b) / step), -LARGEST - 1, LARGEST)
    kernels, scale = quantised(np.einsum("iu,uvck,jv->kcij", g, filters, g), scales)
    products = np.matmul(inputs, kernels.transpose(2, 3, 1, 0).astype(np.float64))
    return np.rint(_both_ways(form.at, products * scale.transpose(1, 2, 0)[:, :, None] * step))


def measure_quantised(
    outputs: int, taps: int, channels: int, *, scales: str = "channel", spread: float = SPREAD, tiles: int = 64, seed: int = 0
) -> Measured:
    """The error of F(outputs x outputs, taps x taps) in int8, on normally distributed integers.

    Args:
        channels: a sum has channels * taps * taps products.
        scales: the parts of the filters with a scale each, one of `packing.winograd_int8.SCALES`.
        spread: standard deviation of the inputs; that of filters is `SPREAD`.
        tiles: number of tiles of outputs to compute, with 16 filters each.

    Raises:
        ValueError: an unknown `scales`.
        WinogradError: see `numerics.winograd_matrices.transform`.
    """
    form = transform(outputs, taps)
    rng = np.random.default_rng(seed)
    shapes = (form.size, form.size, tiles, channels), (taps, taps, channels, FILTERS)
    x, w = (
        np.clip(np.rint(size * rng.standard_normal(shape)), -LARGEST, LARGEST) for size, shape in zip((spread, SPREAD), shapes, strict=True)
    )
    found = error(_quantised_form(form, x, w, scales), _direct(x, w))
    allowed = tolerance(_problem(outputs, taps, channels, "int8", tiles), "winograd")
    return Measured(outputs, taps, channels, "int8", form.noise**2, found, allowed)


def table(sizes: Iterable[tuple[int, int]], channels: Iterable[int], dtype: str = "float32", **how: Any) -> list[Measured]:
    """A measurement for every (outputs, taps) and number of channels."""
    depths = list(channels)
    return [measure(outputs, taps, depth, dtype, **how) for outputs, taps in sizes for depth in depths]
