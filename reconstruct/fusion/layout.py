"""Packed layout of a part of a tensor: offsets as digits of a mixed-radix number."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from im2win.reconstruct.parse.expressions import Expr, names, terms, total

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Layout:
    """A set of offsets that are sums of digits times strides. The packed part stores its digits densely.

    digits: (stride, extent) in elements, the fastest first; every stride is a multiple of the previous one.
    """

    digits: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, offsets: Ints) -> Layout | None:
        """The layout with exactly these offsets, given sorted and starting at 0; None if there is none."""
        digits: list[tuple[int, int]] = []
        rest = offsets
        while len(rest) > 1:
            stride = int(rest[1])
            run = int(np.argmin(np.append(rest == np.arange(len(rest)) * stride, False)))
            digits.append((stride, run))
            if len(rest) % run:
                return None
            rest = rest[::run]
        layout = cls(tuple(digits))
        if any(bigger % stride or bigger < stride * extent for (stride, extent), (bigger, _) in itertools.pairwise(digits)):
            return None
        return layout if np.array_equal(layout.offsets, offsets) else None

    @property
    def size(self) -> int:
        """Number of elements."""
        return int(np.prod([extent for _, extent in self.digits], dtype=np.int64))

    @property
    def offsets(self) -> Ints:
        """All offsets in elements, sorted."""
        found = np.zeros(1, np.int64)
        for stride, extent in self.digits:
            found = (np.arange(extent)[:, None] * stride + found).ravel()
        return found

    def spread(self) -> Layout:
        """The layout that keeps the gaps between the elements, so that the tensor's strides stay valid."""
        return Layout(((1, int(self.offsets[-1]) + 1),))

    def _parts(self) -> list[tuple[int, int, int]]:
        """For each digit: its stride, the ratio of the next stride to it (0 for the last digit), and its packed stride."""
        step, found = 1, []
        for (stride, extent), bigger in zip(self.digits, [*[stride for stride, _ in self.digits[1:]], 0], strict=True):
            found.append((stride, bigger // stride, step))
            step *= extent
        return found

    def packed(self, place: Any) -> Any:
        """Packed offset of the element at offset `place`; an integer or an array."""
        return sum((place // stride % many if many else place // stride) * step for stride, many, step in self._parts()) + place * 0

    def text(self, place: str) -> str:
        """The formula of `packed` as C source, for a non-negative offset."""
        words = []
        for stride, many, step in self._parts():
            word = place if stride == 1 else f"({place} / {stride})"
            word = f"({word} % {many})" if many else word
            words.append(word if step == 1 else f"({word} * {step})")
        return "0" if not words else words[0] if len(words) == 1 else f"({' + '.join(words)})"

    def rescaled(self, index: Expr, origin: set[str]) -> str:
        """An index as C source with each factor replaced by its packed factor.

        The result is wrong if a sum of terms carries into the next digit; the caller must check that.

        Args:
            origin: variables that determine the origin of the part. Terms of these alone are dropped.
        """
        parts: list[tuple[int, Expr | None]] = []
        for factor, rest in terms(index):
            used = names(rest) if rest is not None else set()
            if rest is None:
                parts.append((int(self.packed(factor)), None))
            elif not used or not used <= origin:
                parts.append((self._scaled(factor), rest))
        return total(parts)

    def _scaled(self, factor: int) -> int:
        for stride, _, step in reversed(self._parts()):
            if factor % stride == 0:
                return factor // stride * step
        return factor
