"""Expected error of Winograd's forms against the exact convolution, and the forms that float16 and int8 support.

See `winograd_measured` for measured errors.
"""

from __future__ import annotations

import functools
import math

import numpy as np

from im2win.numerics.winograd_int8 import FORMS, LARGEST, STEP
from im2win.numerics.winograd_matrices import transform
from im2win.spec.activations import activation_of
from im2win.spec.conv2d import Conv2d
from im2win.spec.dtypes import ELEMENT_TYPES

HALVES: dict[str, dict[int, tuple[int, ...]]] = {"float16": {3: (2, 4), 5: (2,)}}
"""By element type and taps of the kernel: m of the forms whose transformed tiles that type may hold. F(6x6, 3x3) and F(4x4, 5x5) would be
off by 1 to 2 % of the largest output in float16, and make inputs up to 225 times as large: of those above 291 some tile may be infinite.
F(4x4, 3x3) and F(2x2, 5x5) make them up to 33 times as large, F(2x2, 3x3) 4 times. bfloat16, whose errors are eight times as large, may
hold none."""
HALF_LIMIT = 2.0**-3  # a float16 form with a larger `expected` error is refused: it has long sums whose outputs an activation cuts off
HALF_MARGIN = 2.0  # `half_tolerance` and `quantised_tolerance` over `expected`
SPREAD = 32.0  # standard deviation of the int8 tensors that kernels are checked with (`tuner.runners.cuda.device_tensors`)


def _quantising() -> float:
    """Root mean square of the relative rounding errors of a transformed int8 input and of its filter, for tensors of `SPREAD`.

    Inputs are rounded to the nearest multiple of STEP, and B^T d B of F(2x2, 3x3) adds up four inputs. The step of a filter is the largest
    magnitude of its channel over `LARGEST`, and that is about four times the standard deviation.
    """
    inputs = math.sqrt(sum(min(rest, STEP - rest) ** 2 for rest in range(STEP)) / STEP) / (2 * SPREAD)
    return math.hypot(inputs, 4 / LARGEST / math.sqrt(12))


_QUANTISING = _quantising()


@functools.lru_cache(maxsize=256)
def expected(conv: Conv2d, outputs: int) -> float:
    """An estimate of the error, relative to the largest output, of Winograd's form with m = `outputs` on a problem.

    float32: eps * noise^2, since `Transform.noise` amplifies rounding, times 1.3 + sqrt(K) / 20 for windows of K elements, or, if that is
    more, 1.1 + 0.26 sqrt(C) for sums over C channels one by one. This is above all measured errors. float16: transformed inputs and filters
    are rounded to 2^-11, which is amplified in the same way. int8: `_quantising`. An activation with a bound (relu6, say) cuts off outputs,
    not errors: for normally distributed tensors the largest sum would be about 4 sqrt(K).
    """
    noise = math.prod(transform(outputs, taps).noise for taps in conv.kernel)
    root, channels = math.sqrt(math.prod(conv.filter_shape[1:])), math.sqrt(conv.filter_shape[1])
    single = float(np.finfo(np.float32).eps) * max(1.3 + root / 20, 1.1 + 0.26 * channels)
    element = ELEMENT_TYPES[conv.dtype]
    rounding = _QUANTISING if element.integer else element.epsilon / 2 if element.narrow else single
    row = activation_of(conv.activation)
    return rounding * noise * (1 if row.bound is None else max(4 * root * row.slope / row.bound, 1))


def quantised_forms(conv: Conv2d) -> tuple[int, ...]:
    """Values of m of the forms in which int8 represents the transformed tiles of a problem with a square kernel.

    There are none for an activation with a bound.
    """
    return () if activation_of(conv.activation).bound is not None else FORMS.get(conv.kernel[0], ())


def quantised_tolerance(conv: Conv2d) -> float:
    """Tolerance of an int8 kernel in Winograd's form, relative to the largest output; 0.0 where there is no form.

    It is `HALF_MARGIN` times the `expected` error of the largest form. Measured errors over 1 to 1024 channels are 0.3 to 0.7 times this.
    """
    return max((HALF_MARGIN * expected(conv, m) for m in quantised_forms(conv)), default=0.0)


def half_forms(conv: Conv2d) -> tuple[int, ...]:
    """Values of m of the forms in which float16 represents the transformed tiles of a problem with a square kernel."""
    return tuple(m for m in HALVES.get(conv.dtype, {}).get(conv.kernel[0], ()) if expected(conv, m) <= HALF_LIMIT)


def half_tolerance(conv: Conv2d) -> float:
    """Tolerance of a float16 kernel in Winograd's form, relative to the largest output; 0.0 where there is no form.

    It is `HALF_MARGIN` times the `expected` error of the largest form, for transformed inputs, filters and products rounded to float16.
    Measured errors of that form over 1 to 512 channels are 0.3 to 0.6 times this. A sum that lacks one of 512 channels has an error of
    three times this or more.
    """
    return max((HALF_MARGIN * expected(conv, m) for m in half_forms(conv)), default=0.0)
