"""Events of a trace: memory accesses, and the synchronisation that orders them."""

from __future__ import annotations

from dataclasses import dataclass

from im2win.reconstruct.parse.statements import Span
from im2win.reconstruct.text_rules import ReconstructError
from im2win.reconstruct.trace.values import Values


class NotShown(ReconstructError):
    """Code that the index analysis does not cover; the message says which line and why."""


@dataclass(frozen=True, eq=False)
class Access:
    """Bytes of a buffer that threads read or write.

    width: bytes of one access.
    start: byte offsets of the accesses, shape (loops..., blocks, threads).
    mask: which of them are executed; None for all.
    certain: False if a condition on data decides whether they are executed.
    pending: an asynchronous copy, complete only after a `WaitGroup`.
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
    """A barrier is executed; `number` is its index among the kernel's barriers in source order."""

    number: int
    scope: str


@dataclass(frozen=True)
class CommitGroup:
    """A group of asynchronous copies is committed (`cp.async.commit_group`)."""


@dataclass(frozen=True)
class WaitGroup:
    """The thread waits until at most `left` committed groups are pending (`cp.async.wait_group`)."""

    left: int


@dataclass(frozen=True)
class Fence:
    """A memory fence, an atomic operation or a spin wait: synchronisation with other blocks."""

    span: Span
    text: str


Event = Access | BarrierReached | CommitGroup | WaitGroup | Fence
