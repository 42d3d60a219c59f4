"""What a trace is made of: accesses to memory, and what orders them."""

from __future__ import annotations

from dataclasses import dataclass

from im2win.reconstruct.parse.statements import Span
from im2win.reconstruct.text_rules import ReconstructError
from im2win.reconstruct.trace.values import Values


class NotShown(ReconstructError):
    """Code that the argument by indices does not cover; the message says which line and why."""


@dataclass(frozen=True, eq=False)
class Access:
    """Bytes of a buffer that threads read or write.

    start: offsets of the first byte, (loops..., blocks, threads). mask: where it happens, None for everywhere. certain: whether it does
    happen there, rather than only may. pending: an asynchronous copy, under way until it is waited for.
    """

    buffer: str
    write: bool
    width: int
    start: Values
    mask: Values | None
    certain: bool
    span: Span
    pending: bool = False


@dataclass(frozen=True)
class BarrierReached:
    """A barrier that is reached; `number` counts the kernel's barriers in the order of the text."""

    number: int
    scope: str


@dataclass(frozen=True)
class CommitGroup:
    """Closes a group of asynchronous copies."""


@dataclass(frozen=True)
class WaitGroup:
    """All groups but the newest `left` have landed."""

    left: int


@dataclass(frozen=True)
class Fence:
    """A fence, an atomic operation or a wait that other blocks take part in."""

    span: Span
    text: str


Event = Access | BarrierReached | CommitGroup | WaitGroup | Fence
