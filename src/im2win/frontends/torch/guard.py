"""Keeps PyTorch's own path where im2win's kernel is not faster, by measurement on the example.

A conv call site is timed as the module runs it: its convolution, normalisation, addition and activation by PyTorch's operators, as the
module has them, against the one kernel of im2win, on the tensors that the example brings there. On a CPU both run in this process, on
PyTorch's threads. On a GPU both are captured in a CUDA graph, so that their work on the device is compared: a kernel that is faster there
also has fewer launches, which counts where a program is not captured.

Results are kept beside the built operators, for the same kernel, path, version of PyTorch, threads and device, and for calls that pass
through Python or not (`native`).
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from im2win.common.comparison import Comparison, compare
from im2win.common.files import replace_text
from im2win.common.json_text import parsed
from im2win.frontends.torch import native
from im2win.frontends.torch.bound import log

WHOLE_S = 0.3  # of sampling, for a whole module
_CALLS = 8  # in a CUDA graph, so that a replay is long beside its launch
_DIGITS = 16

Call = Callable[[], object]


@dataclass(frozen=True)
class Times:
    """Times of im2win's way and of PyTorch's, in seconds per call, and what they say.

    Attributes:
        faster: whether im2win's is faster by more than the noise of the measurement.
        slower: whether it is slower by more than that.
    """

    ours_s: float
    theirs_s: float
    faster: bool
    slower: bool

    @classmethod
    def of(cls, found: Comparison, calls: int = 1) -> Times:
        """Those of a comparison whose samples hold so many calls."""
        return cls(found.ours_s / calls, found.theirs_s / calls, found.faster, found.slower)

    def __str__(self) -> str:
        return f"{self.ours_s * 1e3:.3f} ms, PyTorch {self.theirs_s * 1e3:.3f} ms"


class Guard:
    """Comparisons of one call of `optimize`.

    Args:
        folder: where results are kept.

    Attributes:
        made: comparisons that were measured; the others were kept from before.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[str, Times] = {}
        self.made = 0

    def of_site(self, device: str, name: str, path: str, ours: Call, theirs: Call, like: torch.Tensor) -> Times:
        """Times of a conv call site.

        Args:
            device: slug of the device.
            name: of the artefact that im2win's way runs.
            path: PyTorch's way, in words that tell different ones apart.
            like: a tensor on the device of the calls.
        """
        return self._of(device, [name, path], like, lambda: timed(ours, theirs, like))

    def of_whole(
        self, device: str, names: Sequence[str], path: str, ours: torch.nn.Module, theirs: torch.nn.Module, example: tuple[Any, ...]
    ) -> Times | None:
        """Times of a whole optimised module and of the one that it replaces, on the example; None if the example has no tensor.

        Args:
            device: slug of the device.
            names: of the artefacts that im2win's way runs.
            path: what the module runs, in words; "" where it is not known, so that the result is not kept.
        """
        tensors = [one for one in tree_leaves(example) if isinstance(one, torch.Tensor)]
        if not tensors:
            return None
        if not path:
            return of_modules(ours, theirs, example)[0]
        given = [str([one.shape, one.stride(), one.dtype] if isinstance(one, torch.Tensor) else one) for one in tree_leaves(example)]
        return self._of(device, [*names, path, *given], tensors[0], lambda: of_modules(ours, theirs, example))

    def _of(self, device: str, what: list[str], like: torch.Tensor, measure: Callable[[], tuple[Times, bool]]) -> Times:
        """The kept result of a comparison, or a new one, which is kept if nothing disturbed it."""
        cudnn: Any = torch.backends.cudnn
        runs_with = (cudnn.version(), cudnn.benchmark) if like.is_cuda else (torch.get_num_threads(),)
        text = json.dumps([device, *what, torch.__version__, *runs_with, native.site is native.in_python])
        key = hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]
        file = self._folder / device / "comparisons" / f"{key}.json"
        found = self._known.get(key) or _read(file)
        if found is None:
            self.made += 1
            found, disturbed = measure()
            if not disturbed:
                _write(file, found)
        self._known[key] = found
        return found


def timed(ours: Call, theirs: Call, like: torch.Tensor, **how: Any) -> tuple[Times, bool]:
    """Times of two calls on a tensor's device, and whether other work disturbed the measurement."""
    if not like.is_cuda:
        found = compare(ours, theirs, **how)
        return Times.of(found), found.disturbed
    try:
        captured = _captured(ours, like), _captured(theirs, like)
    except RuntimeError as error:  # a path that waits for the device, or allocates outside PyTorch
        log.info("not captured in a CUDA graph, timed call by call: %s", error)
        return _one_by_one(ours, theirs, like, **how)
    return _one_by_one(*captured, like, calls=_CALLS, **how)


def _one_by_one(ours: Call, theirs: Call, like: torch.Tensor, calls: int = 1, **how: Any) -> tuple[Times, bool]:
    """As `timed`, of calls on a GPU that are not captured, or hold several calls each."""
    found = compare(ours, theirs, synchronize=functools.partial(torch.cuda.synchronize, like.device), **how)
    return Times.of(found, calls), found.disturbed


def _captured(call: Call, like: torch.Tensor) -> Call:
    """Some calls in a CUDA graph, which the result replays."""
    side: Any = torch.cuda.Stream(like.device)  # type: ignore[no-untyped-call,unused-ignore]
    side.wait_stream(torch.cuda.current_stream(like.device))
    with torch.cuda.stream(side):
        for _ in range(2):
            call()
    torch.cuda.current_stream(like.device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_CALLS):
            call()
    replay: Call = graph.replay
    return replay


def _read(path: Path) -> Times | None:
    try:
        values = parsed(path.read_text(encoding="utf-8"))
        return Times(float(values["ours_s"]), float(values["theirs_s"]), values["faster"] is True, values["slower"] is True)
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _write(path: Path, times: Times) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, json.dumps(asdict(times)) + "\n")
    except OSError as error:
        log.info("a comparison is not kept (%s): the next process compares again", error)


def of_modules(ours: torch.nn.Module, theirs: torch.nn.Module, example: tuple[Any, ...]) -> tuple[Times, bool]:
    """Times of two modules on the example, which has a tensor, and whether other work disturbed the measurement.

    On a GPU they are called one by one, and captured; of these two comparisons the one counts that is worse for im2win.
    """
    like = next(one for one in tree_leaves(example) if isinstance(one, torch.Tensor))
    given = _copied(example)
    before = _versions(given)
    theirs(*given)
    writes = before != _versions(given)

    def call(module: torch.nn.Module) -> Call:
        return lambda: module(*(_copied(example) if writes else given))

    calls = call(ours), call(theirs)
    found = [timed(*calls, like, seconds=WHOLE_S)]
    if like.is_cuda:
        found.append(_one_by_one(*calls, like, seconds=WHOLE_S))
    return max((times for times, _ in found), key=lambda times: times.ours_s / times.theirs_s), any(disturbed for _, disturbed in found)


def _copied(example: tuple[Any, ...]) -> tuple[Any, ...]:
    copies: tuple[Any, ...] = tree_map(lambda one: one.clone() if isinstance(one, torch.Tensor) else one, example)
    return copies


def _versions(example: tuple[Any, ...]) -> list[int]:
    return [one._version for one in tree_leaves(example) if isinstance(one, torch.Tensor) and not one.is_inference()]
