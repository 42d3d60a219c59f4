"""Shared parts of studies on a GPU: the facts of a run, subjects, and entries with times."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from im2win.bench.cuda import new_result
from im2win.bench.cuda_builds import Library, load
from im2win.bench.cuda_harness import Subject, WrongError, cudnn_subjects, op_subject, torch_subject
from im2win.bench.results import Spread
from im2win.bench.source import SOURCE
from im2win.device.gpu import Gpu
from im2win.spec.conv2d import LAYOUTS
from im2win.spec.suites import Layer
from im2win.studies.entries import SCHEMA
from im2win.tuner.runners.cuda import Bench

Entry = TypeVar("Entry")


def head(study: str, layers: Sequence[Layer], gpu: Gpu) -> dict[str, Any]:
    """A study's name, device, libraries, commit, date and digests of the source, as they are written to JSON."""
    facts = new_result(study, layers, gpu, {})
    names = ("device", "brand", "versions", "commit", "date", "digests")
    return {"study": study, "schema": SCHEMA, **{name: getattr(facts, name) for name in names}}


def same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two studies are of the same device, libraries and kernels; the system's version and the rest of the source do not count."""
    heads = (
        {**head, "versions": {**head.get("versions", {}), "system": None}, "digests": {**head.get("digests", {}), SOURCE: None}}
        for head in (one, other)
    )
    first, second = ([head.get(name) for name in ("study", "device", "versions", "digests")] for head in heads)
    return first == second


def timed(entry: Entry, spread: Spread | None, subject: Subject | None, failed: str | None) -> Entry:
    """The entry (a dataclass with these fields) with milliseconds, samples and error, or with the reason why it has none."""
    made: Any = entry
    if spread is None or subject is None or failed is not None:
        found: Entry = replace(made, failed=failed or "not timed")
        return found
    times = {"ms": spread.median, "p10_ms": spread.p10, "p90_ms": spread.p90, "samples": spread.samples}
    found = replace(made, **times, error=subject.error)
    return found


def kernel_subject(bench: Bench, library: Library | str, allowed: float) -> Subject:
    """A kernel that was built for the problem, as a subject.

    Raises:
        BuildError: the kernel was not built, with the reason.
        WrongError: its error exceeds `allowed`.
    """
    return op_subject(bench, load(library), allowed)


@contextlib.contextmanager
def every_peer(bench: Bench) -> Iterator[list[tuple[str, Callable[[], Subject]]]]:
    """PyTorch in both layouts and cuDNN's algorithms by name, or the reason why there are none, such as a workspace larger than memory."""
    layouts = [(f"torch_{layout.lower()}", partial(torch_subject, bench, layout)) for layout in LAYOUTS]
    with contextlib.ExitStack() as stack:
        try:
            named = list(stack.enter_context(cudnn_subjects(bench, "float32")))
        except RuntimeError as error:
            named = [("cudnn_all", partial(_refuse, str(error)))]
        yield [*layouts, *named]


def _refuse(reason: str) -> Subject:
    raise WrongError(reason)
