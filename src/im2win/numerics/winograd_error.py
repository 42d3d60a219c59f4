"""How far Winograd's form is from the exact convolution: measured in numpy, in the arithmetic of a kernel, against float64.

And the rule that follows from it: which F(m, r) keep the project's tolerance, for sums of which length.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from im2win.numerics.matvec_program import program
from im2win.numerics.reference import Accuracy, error, tolerance
from im2win.numerics.winograd_matrices import Matrix, Transform, transform
from im2win.packing.winograd import floats
from im2win.packing.winograd_int8 import FORMS, LARGEST, STEP, quantised
from im2win.spec.conv2d import Conv2d

Array = npt.NDArray[Any]

TRUSTED = 0.8  # of the tolerance: a form of greater `expected` error is refused
HALVES = {3: (2, 4), 5: (2,)}
"""By taps of the kernel: m of the forms whose transformed tiles float16 may hold. F(6x6, 3x3) and F(4x4, 5x5) would be off by 1 to
2 % of the largest output, and make inputs up to 225 times as large: of those above 291 some tile may be infinite. F(4x4, 3x3) and
F(2x2, 5x5) make them up to 33 times as large, F(2x2, 3x3) 4 times."""
HALF_LIMIT = 2.0**-3  # a float16 form of greater `expected` error is refused: only relu6 behind long sums is, which cuts off outputs
HALF_MARGIN = 2.0  # `half_tolerance` and `quantised_tolerance` over `expected`
SPREAD = 32.0  # of int8 tensors, a standard deviation: those that kernels are checked with (`tuner.cuda_runner.device_tensors`)
FILTERS = 16  # of a measurement: enough that the largest of their outputs and the largest error are steady


@dataclass(frozen=True)
class Measured:
    """A row of the table: the largest error relative to the largest output, and what the project's tolerance for such sums is."""

    outputs: int
    taps: int
    channels: int
    dtype: str
    noise: float
    error: float
    tolerance: float

    @property
    def share(self) -> float:
        """error / tolerance: above 1 a kernel would be refused."""
        return self.error / self.tolerance


def _applied(matrix: Matrix, values: Sequence[Array]) -> list[Array]:
    """matrix * values by the straight-line program, in the arithmetic of the arrays."""

    def step(left: Array | None, factor: Fraction, right: Array) -> Array:
        term = right if factor == 1 else right.dtype.type(float(factor)) * right
        return np.asarray(term if left is None else left + term)

    return program(matrix).run(values, step)


def _both_ways(matrix: Matrix, tiles: Array) -> Array:
    """matrix * tile * matrix^T over the first two axes."""
    down = np.stack(_applied(matrix, list(tiles)))
    return np.stack(_applied(matrix, list(np.moveaxis(down, 1, 0))), axis=1)


def _in_winograds_form(form: Transform, tiles: Array, filters: Array, dtype: str) -> Array:
    """Outputs [m, m, tile, filter] of tiles [t, t, tile, channel] and filters [r, r, channel, filter]; sums, then `dtype`."""
    g = floats(form.g)
    kernels = np.einsum("iu,uvck,jv->ijck", g, filters.astype(np.float64), g).astype(dtype).astype(np.float32)
    inputs = _both_ways(form.bt, tiles.astype(np.float32)).astype(dtype).astype(np.float32)
    if dtype == "float16":  # float32 sums are as good
        products = np.matmul(inputs.astype(np.float64), kernels.astype(np.float64)).astype(dtype).astype(np.float32)
    else:
        products = _one_by_one(inputs, kernels)
    return _both_ways(form.at, products).astype(dtype)


def _one_by_one(inputs: Array, kernels: Array) -> Array:
    """inputs @ kernels in float32, one channel after the other, as kernels with fused products do; a library's order differs by machine."""
    sums = np.zeros((*inputs.shape[:-1], kernels.shape[-1]), np.float32)
    for channel in range(inputs.shape[-1]):
        sums = (sums + inputs[..., channel, None].astype(np.float64) * kernels[..., None, channel, :]).astype(np.float32)
    return sums


def measure(
    outputs: int, taps: int, channels: int, dtype: str = "float32", *, tiles: int = 64, seed: int = 0, points: Any = None
) -> Measured:
    """The error of F(outputs x outputs, taps x taps) on normally distributed tensors.

    Args:
        channels: products a sum has, times taps * taps.
        dtype: float32 or float16: what inputs, filters, their transforms, products and outputs are rounded to. Arithmetic and sums are
            float32.
        tiles: how many tiles of outputs are computed, 16 filters each.
        points: see `numerics.winograd_matrices.transform`.

    Raises:
        ValueError: a dtype that is neither. WinogradError: see `numerics.winograd_matrices.transform`.
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
    """A problem of so many tiles."""
    side = math.isqrt(tiles) * outputs + taps - 1
    return Conv2d(1, channels, side, side, FILTERS, taps, dtype=dtype)


def _quantised_form(form: Transform, tiles: Array, filters: Array, scales: str) -> Array:
    """As `_in_winograds_form`, in the arithmetic of `packing.winograd_int8`; a step of inputs is what they may grow by at a position."""
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
    """The error of F(outputs x outputs, taps x taps) in int8, on normally distributed whole numbers.

    Args:
        channels: products a sum has, times taps * taps.
        scales: what of the filters has a scale of its own, one of `packing.winograd_int8.SCALES`.
        spread: of the inputs; filters have one of `SPREAD`.
        tiles: how many tiles of outputs are computed, 16 filters each.

    Raises:
        ValueError: an unknown `scales`. WinogradError: see `numerics.winograd_matrices.transform`.
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


def _quantising() -> float:
    """What rounding does to a transformed input and its filter in int8, relative to them: a root mean square, for tensors of `SPREAD`.

    Inputs: of the integers from 0 to STEP - 1, to the nearest multiple; B^T d B of F(2x2, 3x3) adds up four inputs. Filters: a step is the
    largest of a channel's over `LARGEST`, and that about four times their spread.
    """
    inputs = math.sqrt(sum(min(rest, STEP - rest) ** 2 for rest in range(STEP)) / STEP) / (2 * SPREAD)
    return math.hypot(inputs, 4 / LARGEST / math.sqrt(12))


_QUANTISING = _quantising()


@functools.lru_cache(maxsize=256)
def expected(conv: Conv2d, outputs: int) -> float:
    """An estimate of the error, relative to the largest output, that Winograd's form with m = `outputs` has on a problem.

    float32: eps * noise^2, as `Transform.noise` amplifies rounding, times 1.3 + sqrt(K) / 20 for windows of K elements, or, if that is
    more, 1.1 + 0.26 sqrt(C) for sums over C channels one by one: above what was measured. float16: transformed inputs and filters are
    rounded to 2^-11, which is amplified in the same way; int8: `_quantising`. relu6 cuts off outputs, not errors: of normally distributed
    tensors the largest sum would be about 4 sqrt(K).
    """
    noise = math.prod(transform(outputs, taps).noise for taps in conv.kernel)
    root, channels = math.sqrt(math.prod(conv.filter_shape[1:])), math.sqrt(conv.filter_shape[1])
    single = float(np.finfo(np.float32).eps) * max(1.3 + root / 20, 1.1 + 0.26 * channels)
    rounding = {"float16": 2.0**-11, "int8": _QUANTISING}.get(conv.dtype, single)
    return rounding * noise * (max(4 * root / 6, 1) if conv.activation == "relu6" else 1)


def trusted(conv: Conv2d, outputs: int, accuracy: Accuracy = "float32") -> bool:
    """Whether Winograd's form with m = `outputs` is sure to keep the tolerance of a problem. Integers have none to spare."""
    return conv.dtype != "int8" and expected(conv, outputs) <= TRUSTED * tolerance(conv, accuracy)


def quantised_forms(conv: Conv2d) -> tuple[int, ...]:
    """m of the forms in which int8 holds the transformed tiles of a problem with a square kernel: none with relu6."""
    return () if conv.activation == "relu6" else FORMS.get(conv.kernel[0], ())


def quantised_tolerance(conv: Conv2d) -> float:
    """What an int8 kernel in Winograd's form may be off by, relative to the largest output; 0.0 where there is no form.

    `HALF_MARGIN` times the `expected` error of the largest form. Over channels of 1 to 1024 it measures 0.3 to 0.7 times this.
    """
    return max((HALF_MARGIN * expected(conv, m) for m in quantised_forms(conv)), default=0.0)


def half_forms(conv: Conv2d) -> tuple[int, ...]:
    """m of the forms in which float16 holds the transformed tiles of a problem with a square kernel."""
    return tuple(m for m in HALVES.get(conv.kernel[0], ()) if expected(conv, m) <= HALF_LIMIT)


def half_tolerance(conv: Conv2d) -> float:
    """What a float16 kernel in Winograd's form may be off by, relative to the largest output; 0.0 where there is no form.

    `HALF_MARGIN` times the `expected` error of the largest form, for transformed inputs, filters and products rounded to float16. Over
    channels of 1 to 512 that form measures 0.3 to 0.6 times this. A sum that lacks one of 512 channels is off by three times this and more.
    """
    return max((HALF_MARGIN * expected(conv, m) for m in half_forms(conv)), default=0.0)
