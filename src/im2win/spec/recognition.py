"""Which activation of the table a function is that another framework computes node by node: the one with the same values.

Exporters take activations apart, and each in its own way: GELU is Div, Erf, Add, Mul, Mul in one graph and has its factors in another
order in the next. So nodes are not compared with patterns. The function is computed at `POINTS` in float64, and so is every row's formula.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from im2win.spec.activations import ACTIVATIONS, reference
from im2win.spec.dtypes import ELEMENT_TYPES

Array = npt.NDArray[Any]

POINTS: Array = np.concatenate([np.linspace(-12.3, 12.1, 200), [-1000.0, -100.0, -41.0, -1e-3, -1e-5, 1e-5, 1e-3, 37.0, 90.0, 1000.0]])
"""Arguments that functions are compared at: 210 float64, of different magnitudes and not symmetric."""
LONGEST = 12  # nodes that one activation may be taken apart to
_LEAST = 1e-5  # tolerance of functions in float32


def recognised(values: Array, numbers: Iterable[float], dtype: str) -> str | None:
    """The activation, as a word of a problem's key, that has these values at `POINTS`; None if it is none of the table's.

    Args:
        values: of the shape of `POINTS`.
        numbers: constants in the function, one of which a parameter must be.
        dtype: of the graph's constants. They are rounded: the values may differ from an activation's by two epsilons of the argument,
            and by 1e-5 at least, or by as much where the argument is below 1. The nearest activation counts.
    """
    keys = [row.key() for row in ACTIVATIONS.values() if row.parameter is None and row.name != "none"]
    keys += [row.key(number) for row in ACTIVATIONS.values() if row.parameter is not None for number in numbers]
    errors = {key: float(np.max(np.abs(values - _values(key)) / np.maximum(np.abs(POINTS), 1))) for key in keys if key is not None}
    nearest = min(errors, key=lambda key: errors[key])
    return nearest if errors[nearest] <= max(_LEAST, 2 * ELEMENT_TYPES[dtype].epsilon) else None


@functools.lru_cache(maxsize=256)
def _values(key: str) -> Array:
    values: Array = reference(key, POINTS)
    return values
