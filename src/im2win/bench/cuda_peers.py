"""The peers of a run on a GPU: their names, and what each needs once for all layers (a handle of cuDNN, worker processes, searches).

| name | what is timed |
|---|---|
| torch_nchw, torch_nhwc; torch: both | PyTorch's convolution in this layout, with cuDNN's benchmark mode |
| cudnn | every forward algorithm of cuDNN by name, each a peer of its own |
| cudnn-graph | the fastest right plan of cuDNN's graph interface, in the layer's layout; with _nchw or _nhwc behind it in this one |
| inductor_nchw, inductor_nhwc; inductor: both | PyTorch Inductor with max-autotune in this layout |
| tvm | TVM's default search |
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from im2win.bench.cuda_harness import (
    WORKSPACE_BYTES,
    Subject,
    WrongError,
    cudnn_subjects,
    measured_error,
    torch_subject,
    tvm_searched,
)
from im2win.bench.inductor_worker import Compile, Compiled, Sample
from im2win.bench.peers import cudnn_graph
from im2win.bench.peers.plans import Chosen, PlanError, fastest
from im2win.bench.peers.subject import PeerError
from im2win.common.worker_pool import Worker
from im2win.device.gpu import Gpu
from im2win.numerics.tolerance import tolerance
from im2win.spec.accuracy import Accuracy
from im2win.spec.conv2d import LAYOUTS, Conv2d
from im2win.spec.dtypes import ELEMENT_TYPES
from im2win.tuner.runners.cuda import Bench, sample

BY_NAME, GRAPH, TVM = "cudnn", "cudnn-graph", "tvm"
_IN_LAYOUT = {f"{peer}_{layout.lower()}": layout for peer in ("torch", GRAPH, "inductor") for layout in LAYOUTS}
SINGLE = ("torch_nchw", "torch_nhwc", BY_NAME, GRAPH, "cudnn-graph_nchw", "cudnn-graph_nhwc", "inductor_nchw", "inductor_nhwc", TVM)
GROUPS = {"torch": ("torch_nchw", "torch_nhwc"), "inductor": ("inductor_nchw", "inductor_nhwc")}
DEFAULT = ("torch", BY_NAME)

PLAN_S = 60.0  # seconds in which plans of cuDNN's graph interface are tried, for a layer and layout
COMPILE_S = 300.0  # that Inductor may take for a layer and layout
SAMPLE_S = 60.0


def expanded(against: Sequence[str]) -> list[str]:
    """Names in `SINGLE` for names that a user gives, each once.

    Raises:
        ValueError: one is no peer on a GPU.
    """
    names: list[str] = []
    for name in against:
        if name not in SINGLE and name not in GROUPS:
            raise ValueError(f"`against` (={name!r}) must be of {', '.join([*GROUPS, *SINGLE])}, or none, on a GPU.")
        names += GROUPS.get(name, (name,))
    return list(dict.fromkeys(names))


def plan_tolerance(conv: Conv2d, accuracy: Accuracy, scale: float) -> float:
    """The error that a right plan may have, relative to `scale`: one unit of an integer output, else four times what ours may have.

    Our tolerance and the output's rounding are for one rounding of an output. Where PyTorch's operators follow, there are up to four.
    """
    out = ELEMENT_TYPES[conv.out_dtype]
    if ELEMENT_TYPES[conv.dtype].scaled:  # whose tolerance has the output's rounding and that of sums
        return out.epsilon + 4 * (tolerance(conv, accuracy) - out.epsilon)
    return 1.01 / scale if out.integer else 4 * max(tolerance(conv, accuracy), out.epsilon)


@dataclass
class GraphPlans:
    """The peer cuDNN's graph interface in a run. It remembers the plan of each layer, so that plans of a layer are timed once.

    Args:
        limit_s: seconds in which plans are tried, for a layer and layout.
    """

    accuracy: Accuracy
    limit_s: float = PLAN_S
    _known: dict[tuple[Conv2d, str], str] = field(default_factory=dict)
    _handle: Any = None

    def subject(self, bench: Bench, layout: str | None = None) -> Subject:
        """The fastest right plan of a layer.

        Args:
            layout: of all tensors; None for the layer's.

        Raises:
            PeerError: the package is missing, the layer is not written as a graph, or cuDNN has no plan for it.
            PlanError: no plan was right.
        """
        import torch

        conv = bench.conv
        layout = layout or conv.layout
        if (reason := cudnn_graph.unsupported(conv)) is not None:
            raise PeerError(f"{GRAPH}: {reason}.")
        cudnn = cudnn_graph.frontend()
        if self._handle is None:
            self._handle = cudnn.create_handle()
        cudnn.set_stream(handle=self._handle, stream=torch.cuda.current_stream().cuda_stream)
        layer = cudnn_graph.Layer(conv, bench.inputs, layout)
        measured = 0.0  # error of the plan that was checked last
        allowed = plan_tolerance(conv, self.accuracy, bench.scale)

        def build(plan: tuple[cudnn_graph.Graph, int]) -> Callable[[], object]:
            return layer.runner(*plan, self._handle, WORKSPACE_BYTES)

        def check(call: Callable[[], object]) -> str:
            nonlocal measured
            layer.output.fill_(float("nan") if layer.output.dtype.is_floating_point else bench.poisons[0])
            call()
            try:
                measured = measured_error(bench, layer.result(), allowed)
            except WrongError as error:
                return str(error)
            return ""

        best = self._best(cudnn, conv, layout, build, check, partial(sample, bench))
        graph, index = best.plan
        call = build(best.plan)
        if wrong := check(call):
            raise PlanError(f"{best.name}: {wrong}")
        return Subject(call, layer.workspace_bytes(graph, index), measured, best.said)

    def _best(
        self, cudnn: Any, conv: Conv2d, layout: str, build: Callable[[Any], Callable[[], object]],
        check: Callable[[Callable[[], object]], str], timed: Callable[[Callable[[], object]], float],
    ) -> Chosen[tuple[cudnn_graph.Graph, int]]:
        """The fastest of all plans of a layer's graphs, or the plan that it was before."""
        plans: list[tuple[str, tuple[cudnn_graph.Graph, int]]] = []
        reason: PeerError | None = None
        for kind in cudnn_graph.kinds(conv):
            try:
                graph = cudnn_graph.planned(cudnn, conv, layout, kind, self.accuracy, handle=self._handle)
            except PeerError as error:
                reason = reason or error
                continue
            plans += [(name, (graph, index)) for index, name in enumerate(graph.names)]
        if not plans and reason is not None:
            raise reason
        known = self._known.get((conv, layout))
        tried = [one for one in plans if one[0] == known] or plans
        best = fastest(tried, build, check, timed, self.limit_s)
        self._known[conv, layout] = best.name
        return best


class Inductor:
    """The peer PyTorch Inductor in a layout: a worker process that lives as long as the run. `close` ends it."""

    def __init__(self, layout: str, accuracy: Accuracy) -> None:
        self._layout, self._accuracy = layout, accuracy
        self._worker = Worker("im2win.bench.inductor_worker")

    def subject(self, bench: Bench) -> Subject:
        """A layer, compiled and checked in the worker process.

        Raises:
            PeerError: it could not be compiled, or its output is wrong, with the reason.
            WorkerError: the process crashed or took longer than `COMPILE_S`.
        """
        answer = self._worker.call(Compile(bench.conv, bench.seed, self._layout, self._accuracy), COMPILE_S)
        if not isinstance(answer, Compiled):
            raise PeerError(f"inductor: {answer}")
        return Subject(self._sample, answer.extra_bytes, answer.error, answer.kernels, sample=self._sample)

    def _sample(self) -> float:
        seconds: float = self._worker.call(Sample(), SAMPLE_S)
        return seconds

    def close(self) -> None:
        """Ends the process."""
        self._worker.close()


class Peers:
    """The peers of a run, by name. A `with` block ends their processes.

    Args:
        against: names as `expanded` takes them.
        plan_s: see `GraphPlans`.
        tvm_trials, tvm_cache, note: as in `im2win.bench.cuda.run`.
        extra: further peers by name, each a function that prepares a subject for a layer.
    """

    def __init__(
        self, against: Sequence[str], accuracy: Accuracy, gpu: Gpu, *, plan_s: float = PLAN_S, tvm_trials: int = 0,
        tvm_cache: Path | None = None, note: Callable[[str], object] | None = None,
        extra: Mapping[str, Callable[[Bench], Subject]] | None = None,
    ) -> None:
        self._accuracy, self._gpu, self._note = accuracy, gpu, note
        self._trials, self._cache = tvm_trials, tvm_cache
        self._wanted = expanded(against)
        self._closed = contextlib.ExitStack()
        graphs = GraphPlans(accuracy, plan_s)
        self._prepare: dict[str, Callable[[Bench], Subject]] = {}
        for name in self._wanted:
            layout = _IN_LAYOUT.get(name)
            if name.startswith("torch") and layout is not None:
                self._prepare[name] = partial(torch_subject, layout=layout)
            elif name.startswith("inductor") and layout is not None:
                one = Inductor(layout, accuracy)
                self._closed.callback(one.close)
                self._prepare[name] = one.subject
            elif name.startswith(GRAPH):
                self._prepare[name] = partial(graphs.subject, layout=layout)
        self._prepare.update(extra or {})

    def __enter__(self) -> Peers:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._closed.close()

    @property
    def names(self) -> list[str]:
        """Of the peers that every row names, as timed or as failed: all but cuDNN's algorithms, which differ between layers."""
        return [*self._prepare, *([TVM] if TVM in self._wanted and TVM not in self._prepare else [])]

    @property
    def by_name(self) -> bool:
        """Whether cuDNN's algorithms are among them."""
        return BY_NAME in self._wanted

    def search(self, convs: Sequence[Conv2d]) -> None:
        """Runs the searches that are made for all layers at once, before the first one is timed."""
        if TVM in self._wanted:
            assert self._cache is not None
            self._prepare |= tvm_searched(convs, self._gpu, self._trials, self._cache, self._note)

    @contextlib.contextmanager
    def of(self, bench: Bench) -> Iterator[Iterator[tuple[str, Callable[[], Subject]]]]:
        """(name, preparation) of each peer on a layer."""
        with contextlib.ExitStack() as stack:
            named = stack.enter_context(cudnn_subjects(bench, self._accuracy)) if self.by_name else iter(())
            mine = [(name, partial(prepare, bench)) for name, prepare in self._prepare.items()]
            yield iter([*mine, *named])
