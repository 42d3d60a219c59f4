"""Where the elements of a part of a tensor lie once it is held by itself: mixed radices, found from the elements' offsets."""

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
    """Places that are sums of digits times strides; held by itself, the part has its digits one after the other.

    digits: (stride, extent), the fastest first; every stride is a multiple of the one before it.
    """

    digits: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, offsets: Ints) -> Layout | None:
        """The layout whose offsets are exactly these, sorted and beginning at 0; None if they are no such sums."""
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
        """Elements."""
        return int(np.prod([extent for _, extent in self.digits], dtype=np.int64))

    @property
    def offsets(self) -> Ints:
        """All offsets, sorted."""
        found = np.zeros(1, np.int64)
        for stride, extent in self.digits:
            found = (np.arange(extent)[:, None] * stride + found).ravel()
        return found

    def spread(self) -> Layout:
        """The same part with the gaps between its elements, which whoever goes through it by the tensor's strides needs."""
        return Layout(((1, int(self.offsets[-1]) + 1),))

    def _parts(self) -> list[tuple[int, int, int]]:
        """(stride, how many of it make the next stride or 0 for the last, stride when held by itself)"""
        step, found = 1, []
        for (stride, extent), bigger in zip(self.digits, [*[stride for stride, _ in self.digits[1:]], 0], strict=True):
            found.append((stride, bigger // stride, step))
            step *= extent
        return found

    def packed(self, place: Any) -> Any:
        """Where the element at a place lies when the part is held by itself."""
        return sum((place // stride % many if many else place // stride) * step for stride, many, step in self._parts()) + place * 0

    def text(self, place: str) -> str:
        """The same as C, of a place that is not negative."""
        words = []
        for stride, many, step in self._parts():
            word = place if stride == 1 else f"({place} / {stride})"
            word = f"({word} % {many})" if many else word
            words.append(word if step == 1 else f"({word} * {step})")
        return "0" if not words else words[0] if len(words) == 1 else f"({' + '.join(words)})"

    def rescaled(self, index: Expr, origin: set[str]) -> str:
        """An index with its factors changed, term by term: right where no term carries into the next digit, which must be checked.

        Args:
            origin: names that only say where the part begins: terms of these alone are left out.
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
