"""Recognises the activation that a subgraph of another framework computes, by its values.

Exporters decompose activations into several nodes, each in its own way: GELU is Div, Erf, Add, Mul, Mul in one graph and has another order
of factors in the next. Nodes are therefore not compared with patterns. The subgraph is evaluated at `POINTS` in float64, and so is every
row's formula.
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
LONGEST = 12  # most nodes of a decomposed activation
_LEAST = 1e-5  # tolerance of functions in float32


def recognised(values: Array, numbers: Iterable[float], dtype: str) -> str | None:
    """The activation, as a word of a problem's key, that has these values at `POINTS`; None if the table has none.

    Args:
        values: of the shape of `POINTS`.
        numbers: constants in the subgraph; a parameter must be one of them.
        dtype: of the graph's constants. They are rounded, so values may differ from an activation's by two epsilons of the argument, or of
            1 where the argument is smaller, and by 1e-5 at least. The nearest activation wins.
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
