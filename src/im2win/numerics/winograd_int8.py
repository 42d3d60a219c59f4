"""The arithmetic of Winograd's form in int8.

    V = B^T d B                                                               exact integers, at most STEP times as large as inputs
    v = V / STEP, to the nearest, ties to even, at most 127                   int8; the scale STEP is that of the tensor
    u[k] = (G g[k] G^T) / s[k], to the nearest                                int8; s[k] is the channel's largest magnitude / 127
    Y[k] = STEP s[k] (A^T [sum over channels of v u[k]] A), to the nearest    in int32 up to the scale, which is float32

No input overflows. V is between -512 and 510, so v is between -128 and 128, and 128 is cut off at 127. Sums over 14000 channels fit int32,
as those of the convolution do. Ties to even add no bias for inputs that are symmetric or positive.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

FORMS = {3: (2,)}
"""By taps of the kernel: m of the forms that are accurate enough. The inputs of F(4x4, 3x3) grow by up to 32.3, of which int8 keeps little:
outputs would be off by a fifth of the largest (`reports.winograd_error.quantised_table`)."""
STEP = 4  # the unit of v in V: the largest factor by which B^T d B of F(2x2, 3x3) grows
LARGEST = 127
SCALES = ("tensor", "channel", "position")
"""What has a scale of its own: all filters; those of an output channel; those of an output channel at one position of the tile, which gains
next to nothing, and would leave no sum behind the products an integer: it is measured, and not offered."""


def quantised(form: Array, scales: str) -> tuple[Array, Array]:
    """Transformed filters [out_channels, channels, t, t] as int8, and their float32 scales [out_channels, t, t]; zeros have the scale 0.

    Raises:
        ValueError: `scales` is none of `SCALES`.
    """
    if scales not in SCALES:
        raise ValueError(f"quantised: `scales` (={scales!r}) must be one of {', '.join(SCALES)}.")
    over: dict[str, tuple[int, ...]] = {"tensor": (0, 1, 2, 3), "channel": (1, 2, 3), "position": (1,)}
    scale = (np.abs(form).max(axis=over[scales], keepdims=True) / LARGEST).astype(np.float32)
    whole = np.rint(form / np.where(scale == 0, 1, scale).astype(np.float64))
    values = np.clip(whole, -LARGEST, LARGEST).astype(np.int8)
    return values, np.broadcast_to(scale[:, 0], (len(form), *form.shape[2:])).astype(np.float32)
