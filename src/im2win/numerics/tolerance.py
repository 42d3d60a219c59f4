"""How far from the float64 reference a kernel may be, and which Winograd forms are sure to keep to that."""

from __future__ import annotations

import math

import numpy as np

from im2win.numerics.winograd_error import expected, half_tolerance, quantised_tolerance
from im2win.spec.accuracy import Accuracy, allows
from im2win.spec.activations import activation_of
from im2win.spec.conv2d import Conv2d
from im2win.spec.dtypes import ELEMENT_TYPES

TRUSTED = 0.8  # of the tolerance: a form of greater `expected` error is refused


def tolerance(conv: Conv2d, accuracy: Accuracy = "float32") -> float:
    """Largest error that rounding alone explains, relative to the largest output, for normally distributed inputs.

    int8 products and their int32 sums are exact. So is what is requantised, where every operation rounds as the reference does, but for
    activations that round, silu say, which are off by some units in their last place.

    A float16 output is off by half a unit in its last place, 2^-11; sums of float16 products are kept in float32. TF32 inputs have 10 bits
    of fraction: a product is off by up to 2^-10, and sums by less than that of the largest.

    A float32 sum of K products does a random walk of K rounding errors, each up to eps/2 of a partial sum of size about sqrt(k): about
    eps * K / 3 in all, on outputs of size sqrt(K): relative to the largest of them well under eps * sqrt(K). Four times that, and a
    few eps for the epilogue, leaves room for any order of summation; a kernel that is wrong is wrong by far more.

    An activation that squashes leaves outputs of at most 1 of sums of about sqrt(K), and multiplies errors by its slope: relative to the
    largest output they are larger by the quotient.

    With accuracy "winograd" a float16 or int8 may be off by what rounding transformed tiles to it explains: `winograd_error.half_tolerance`
    and `quantised_tolerance`. int8 tensors are normally distributed with a spread of 32.
    """
    element = ELEMENT_TYPES[conv.dtype]
    if element.integer:
        if conv.requantised:
            eps = float(np.finfo(conv.out_dtype).eps) if activation_of(conv.activation).rounds else 0.0
            return eps + 16 * float(np.finfo(np.float32).eps) if eps else 0.0
        return quantised_tolerance(conv) if accuracy == "winograd" else 0.0
    if element.narrow:
        direct = 0.75 * element.epsilon
        return max(direct, half_tolerance(conv)) if accuracy == "winograd" else direct
    root, row = math.sqrt(math.prod(conv.filter_shape[1:])), activation_of(conv.activation)
    shrunk = max(row.slope * root / (row.bound or 1), 1) if row.squashes else 1
    if allows(accuracy, "tf32"):
        return 2.0**-10 * shrunk
    return float(np.finfo(np.float32).eps * (4 * root + 16)) * shrunk


def trusted(conv: Conv2d, outputs: int, accuracy: Accuracy = "float32") -> bool:
    """Whether Winograd's form with m = `outputs` is sure to keep the tolerance of a problem. Integers have none to spare."""
    return not ELEMENT_TYPES[conv.dtype].integer and expected(conv, outputs) <= TRUSTED * tolerance(conv, accuracy)
