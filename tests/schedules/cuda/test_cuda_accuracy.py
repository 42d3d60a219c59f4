"""How far CUDA kernels are from float64 for normally distributed inputs, on the emulator.

The emulator cuts TF32 inputs off as the hardware does, and the sums of tensor cores, too.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from emulated import Emulated, Kernel, expected, typed
from oracle import Array, normal_tensors

from im2win.device.gpu import H200
from im2win.numerics.reference import error, reference
from im2win.numerics.tolerance import tolerance
from im2win.schedules.cuda.arithmetic import PRODUCTS
from im2win.schedules.cuda.space.multistage import products
from im2win.schedules.cuda.tiles.multistage import MultistageTile, promoted
from im2win.spec.conv2d import Conv2d

# Sums of 576 products, the everyday depth, and of 2304, where float32 itself has drifted.
KEYS = ("n1-c64x7x7-k32x3x3-p1", "n1-c256x6x6-k16x3x3-p1-NHWC-bias")
LONG = ("n1-c512x5x5-k16x3x3-p1", "n1-c2048x3x3-k16x3x3-p1-NHWC")  # beyond the proven depth: 4608 and 18432 products


def kernels(conv: Conv2d) -> list[Kernel]:
    """A gather and a halo tile for every arithmetic."""
    halo_tile, made = (1, *conv.output_size), []
    for product in products(conv, H200):
        windows, stages = (64, 3) if PRODUCTS[product].unit == "warpgroup" else (32, 2)
        made.append(("implicit_gemm/tiled", MultistageTile(product, 16, 64, 16, windows, 1, stages, "uvc")))
        made.append(("direct/tiled", MultistageTile(product, 16, 64, 16, windows, 1, stages, "Cuvc", *halo_tile)))
    return made


def errors(conv: Conv2d, scale: float = 1.0, seed: int = 0) -> dict[tuple[str, str], float]:
    """(algorithm, arithmetic) -> error relative to the largest output; inputs are normally distributed times `scale`."""
    tensors = typed(conv, {name: array * np.float32(scale) for name, array in normal_tensors(conv, seed).items()})
    right = reference(conv, tensors["data"], tensors["filter"], tensors.get("bias"))
    found = Emulated(conv, rows := kernels(conv))(tensors)
    return {(name, tile.product): error(y, right) for (name, tile), y in zip(rows, found, strict=True)}


def common_error(y: Array, right: Array) -> float:
    """The part of the relative error that all outputs share: the factor that brings `right` nearest to `y`, less one."""
    y, right = y.astype(np.float64), right.astype(np.float64)
    return float((y * right).sum() / (right * right).sum() - 1)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("key", KEYS)
def test_three_products_are_as_accurate_as_float32_and_one_is_not(key: str) -> None:
    conv = Conv2d.parse(key)
    found = errors(conv)
    for algorithm, unit in itertools.product(("implicit_gemm/tiled", "direct/tiled"), ("", "wg_")):
        fma, three, one = (found[algorithm, product] for product in ("fma", f"{unit}tf32x3", f"{unit}tf32"))
        assert fma <= tolerance(conv) and three <= tolerance(conv) < one < 2.0**-10, (algorithm, found)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("key", LONG)
def test_long_sums_go_on_in_fresh_registers(key: str) -> None:
    """What tensor cores cut off does not add up: a small part of the tolerance is left."""
    conv = Conv2d.parse(key)
    kinds = [(algorithm, tile) for algorithm, tile in kernels(conv) if tile.arithmetic.parts == 2]
    tensors = typed(conv, normal_tensors(conv, 0))
    right = reference(conv, tensors["data"], tensors["filter"])
    assert len(kinds) == 4 and all(promoted(conv, tile) for _, tile in kinds)
    for kernel, y in zip(kinds, Emulated(conv, kinds)(tensors), strict=True):
        assert error(y, right) <= 0.4 * tolerance(conv), kernel


@pytest.mark.sampled(1)
@pytest.mark.parametrize("key", (*KEYS, LONG[0]))
def test_sums_of_parts_do_not_shrink(key: str) -> None:
    """What truncation takes of all outputs alike is restored: it would add up over the layers of a network."""
    conv = Conv2d.parse(key)
    kinds = [(algorithm, tile) for algorithm, tile in kernels(conv) if tile.arithmetic.parts == 2]
    tensors = typed(conv, normal_tensors(conv, 0))
    right = reference(conv, tensors["data"], tensors["filter"], tensors.get("bias"))
    for kernel, y in zip(kinds, Emulated(conv, kinds)(tensors), strict=True):
        assert abs(common_error(y, right)) < 2e-6, kernel


@pytest.mark.parametrize("scale", [2.0**-50, 2.0**60])
def test_the_size_of_numbers_does_not_matter(scale: float) -> None:
    """TF32 has the exponents of float32, and low parts are 2^-11 of high ones: far from the smallest number there is."""
    conv = Conv2d.parse(KEYS[0])
    assert all(found <= tolerance(conv) for (_, product), found in errors(conv, scale).items() if PRODUCTS[product].accuracy != "tf32")


def test_halves_are_rounded_once() -> None:
    """Sums are kept in float32: the only error of a float16 kernel is that of its output."""
    conv = Conv2d.parse(KEYS[0]).with_(dtype="float16")
    tensors = typed(conv, normal_tensors(conv))
    right = expected(conv, tensors)
    for y in Emulated(conv, kernels(conv))(tensors):
        assert np.max(np.abs(y.astype(np.float64) - right)) <= np.spacing(np.abs(right).max())


NANS = {"numpy's": 0x7FC00000, "CUDA's": 0x7FFFFFFF}


@pytest.mark.parametrize("where", ["data", "filter"])
@pytest.mark.parametrize("pattern", ["numpy's", "CUDA's"])
def test_nan_reaches_the_output(pattern: str, where: str) -> None:
    """Whatever its bits are."""
    conv = Conv2d.parse("n1-c20x5x5-k16x3x3-p1")
    tensors = typed(conv, normal_tensors(conv))
    bits = tensors[where].reshape(-1).view(np.uint32)
    bits[bits.size // 2] = NANS[pattern]
    right = expected(conv, tensors)
    assert np.isnan(right).any() and not np.isnan(right).all()
    rows = kernels(conv)
    for (algorithm, tile), y in zip(rows, Emulated(conv, rows)(tensors), strict=True):
        assert _same_nans(y, right), f"{algorithm} {tile.product}: {np.isnan(y).sum()} outputs are NaN, not {np.isnan(right).sum()}"


def _same_nans(y: Array, right: Array) -> bool:
    return bool(np.array_equal(np.isnan(y), np.isnan(right)))
