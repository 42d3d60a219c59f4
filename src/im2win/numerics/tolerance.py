"""The tolerance of kernels against the float64 reference, and the Winograd forms that are sure to keep it."""

from __future__ import annotations

import math

import numpy as np

from im2win.numerics.winograd_error import expected, half_tolerance, quantised_tolerance
from im2win.spec.accuracy import Accuracy, allows
from im2win.spec.activations import activation_of
from im2win.spec.conv2d import Conv2d
from im2win.spec.dtypes import ELEMENT_TYPES

CHAINED = 2.0**-8  # error of sums of float8_e4m3fn products that tensor cores add up in chains, relative to the largest output
LARGEST_SCALED = 16  # the largest output of such layers before an activation, in standard deviations: of sums times normal scales
TRUSTED = 0.8  # share of the tolerance; a form with a larger `expected` error is refused


def tolerance(conv: Conv2d, accuracy: Accuracy = "float32") -> float:
    """Largest error that rounding alone explains, relative to the largest output, for normally distributed inputs.

    int8 products and their int32 sums are exact. Requantised outputs are exact too, since every operation rounds as the reference does,
    except for activations that round (silu, say), which differ by a few units in the last place.

    A float16 output differs by half a unit in its last place, 2^-11, a bfloat16 output by 2^-8; sums of their products are kept in float32.
    TF32 inputs have 10 bits of fraction, so a product differs by up to 2^-10, and a sum by less than that of its largest.

    The K rounding errors of a float32 sum of K products form a random walk. Each is up to eps/2 of a partial sum of size about sqrt(k).
    That gives about eps * K / 3 in all, on outputs of size sqrt(K), and relative to the largest output well under eps * sqrt(K). The
    tolerance is four times that plus a few eps for the epilogue, which allows any order of summation. A wrong kernel has a far larger
    error.

    An activation that squashes maps sums of about sqrt(K) to outputs of at most 1, and multiplies errors by its slope. Errors relative to
    the largest output grow by the quotient.

    Products of float8_e4m3fn are exact, but tensor cores add them with 13 bits of fraction below the largest term; see
    `schedules.cuda.arithmetic.Multiplier`. Of the 33 terms of an instruction each loses up to 2^-13 of the largest one, in the mean 0.6 of
    that and of either sign. After a chain of four instructions these 132 errors are a random walk of 0.6 * sqrt(132) * 2^-13 = 2^-10.2 of
    the largest term or partial sum, which is about the spread of the chain's sum. Chains add up in float32, whose rounding is nothing
    beside this. Relative to the largest output the error of most outputs is far smaller, and the largest of many about this; `CHAINED` is
    four times as much. Outputs may be rounded to the neighbour of the right number, which differs by up to epsilon of their type.

    With accuracy "winograd" a float16 or int8 output may differ by what the rounding of transformed tiles explains:
    `winograd_error.half_tolerance` and `quantised_tolerance`. int8 tensors are normally distributed with a standard deviation of 32.
    """
    element, row = ELEMENT_TYPES[conv.dtype], activation_of(conv.activation)
    if element.scaled:
        steep = max(row.slope * LARGEST_SCALED / (row.bound or 1), 1) if row.squashes else 1
        return ELEMENT_TYPES[conv.out_dtype].epsilon + CHAINED * steep
    if element.integer:
        if conv.requantised:
            eps = ELEMENT_TYPES[conv.out_dtype].epsilon if row.rounds else 0.0
            return eps + 16 * float(np.finfo(np.float32).eps) if eps else 0.0
        return quantised_tolerance(conv) if accuracy == "winograd" else 0.0
    if element.narrow:
        direct = 0.75 * element.epsilon
        return max(direct, half_tolerance(conv)) if accuracy == "winograd" else direct
    root = math.sqrt(math.prod(conv.filter_shape[1:]))
    shrunk = max(row.slope * root / (row.bound or 1), 1) if row.squashes else 1
    if allows(accuracy, "tf32"):
        return 2.0**-10 * shrunk
    return float(np.finfo(np.float32).eps * (4 * root + 16)) * shrunk


def trusted(conv: Conv2d, outputs: int, accuracy: Accuracy = "float32") -> bool:
    """Whether Winograd's form with m = `outputs` is sure to keep the tolerance of a problem. Integers have no tolerance for it."""
    return not ELEMENT_TYPES[conv.dtype].integer and expected(conv, outputs) <= TRUSTED * tolerance(conv, accuracy)
