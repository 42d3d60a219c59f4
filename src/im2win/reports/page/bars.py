"""Cards of an HTML page: a title, a badge and horizontal bars, each with its number as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Bar:
    """One line of a card.

    Attributes:
        name, value: what is shown, and its number with the unit.
        share: of the card's longest bar, in percent from 0 to 100; None where there is no number.
        kind: "ours", "untuned", "im2col" or "peer", which choose the colour.
        note: shown when pointed at.
    """

    name: str
    value: str
    share: float | None
    kind: str = "peer"
    note: str = ""


@dataclass(frozen=True)
class Card:
    """One layer.

    Attributes:
        key: of the layer; "" where the title is the key.
        wide: whether the bars' numbers are long.
        badge: a short verdict; verdict: "good", "bad" or "even", or "" without a badge.
        lines: sentences below the bars.
    """

    title: str
    key: str
    what: str
    bars: Sequence[Bar]
    badge: str = ""
    verdict: str = ""
    lines: Sequence[str] = field(default_factory=tuple)
    wide: bool = False


def share(value: float | None, most: float) -> float | None:
    """`value` in percent of `most`, which is not less."""
    return None if value is None else round(100 * value / most, 1) if most else 0.0


def speed(rate: float) -> str:
    """GFLOPS as text, in TFLOPS from ten thousand on."""
    return f"{rate / 1e3:.1f} TFLOPS" if rate >= 1e4 else f"{rate:.0f} GFLOPS"


def verdict(ratio: float | None) -> str:
    """What a ratio of times says: "good" from 1.03 on, "bad" below 0.97, in between "even"; "" without one."""
    return "" if ratio is None else "good" if ratio >= 1.03 else "bad" if ratio < 0.97 else "even"
