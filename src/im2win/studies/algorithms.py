"""The study of algorithms on a CPU: all of them on the same layers, in both layouts, in one run, beside im2col with a library's product.

It repeats the comparisons of the source papers: im2win over im2col and over direct convolution, channels last over channels first, MCFA
over MEC. Every subject has its own process, its choice of tile is that of `im2win.build` for the algorithm, and every output is checked
against the float64 reference before it is timed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from im2win.bench.cpu import Ours, checked, commit, spreads, versions
from im2win.bench.harness import Worker, WorkerError, interleaved
from im2win.bench.peers.subject import PeerError, Subject, Tensors, Trial
from im2win.bench.results import Spread
from im2win.bench.source import digests
from im2win.compute import im2col
from im2win.device.cpu import Machine
from im2win.numerics.tolerance import tolerance
from im2win.records.record import utc_now
from im2win.spec.conv2d import LAYOUTS, Conv2d
from im2win.spec.suites import Layer
from im2win.studies.entries import ALGORITHMS, COMPARED, LIBRARY_GEMM, SCHEMA

SEED = 0


@dataclass(frozen=True)
class LibraryGemm:
    """im2col as frameworks without convolutions of their own compute it: PyTorch's unfold, and a product of oneMKL."""

    name: str = LIBRARY_GEMM

    def prepare(self, conv: Conv2d, tensors: Tensors, threads: int) -> Trial:
        top, left, bottom, right = conv.padding
        if conv.layout != "NCHW" or conv.groups != 1 or (top, left) != (bottom, right) or conv.dtype != "float32":
            raise PeerError(f"{self.name}: unfold takes float32 in NCHW with one group and equal padding; got {conv}.")
        import torch

        torch.set_num_threads(threads)
        data, weight = torch.from_numpy(tensors.data), torch.from_numpy(tensors.filter).reshape(conv.out_channels, -1)
        output = torch.full((conv.batch, conv.out_channels, *conv.output_size), float("nan"))
        flat = output.view(conv.batch, conv.out_channels, -1)

        @torch.inference_mode()  # type: ignore[untyped-decorator,unused-ignore]
        def call() -> None:
            columns = torch.nn.functional.unfold(data, conv.kernel, conv.dilation, (top, left), conv.stride)
            torch.matmul(weight, columns, out=flat)

        return Trial(call, output.numpy, extra_bytes=im2col.transform_bytes(conv))


@dataclass
class Entry:
    """One layer: a time, or the reason why there is none, for every subject in every layout.

    Attributes:
        times: milliseconds a call by subject and layout, as in "mec/tiled NHWC".
        failed: reasons, by the same names.
        extra_bytes: what a subject allocates beside input, filter and output, by the same names.
        tiers: tiers of the look-up that chose im2win's tiles.
    """

    layer: str
    conv: str
    times: dict[str, Spread] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    extra_bytes: dict[str, int] = field(default_factory=dict)
    tiers: dict[str, str] = field(default_factory=dict)


def subjects(logs: Path | None = None) -> list[tuple[Subject, str]]:
    """Every subject with its layout."""
    ours: list[tuple[Subject, str]] = [(Ours(logs, key, name=key), layout) for layout in LAYOUTS for key in COMPARED]
    return [*ours, (LibraryGemm(), "NCHW")]


def run(
    layers: Sequence[Layer], *, threads: int | None = None, logs: Path | None = None, rounds: int = 15, seconds_warmup: float = 0.3,
    field: Sequence[tuple[Subject, str]] | None = None, progress: Callable[[int, int, Entry], None] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Times every algorithm on every layer.

    Args:
        layers: float32 problems without an epilogue, all of one batch.
        threads: of every subject; None: all CPUs that this process may use.
        logs: folder of tuning records; None for the packaged ones.
        rounds: samples of each subject. seconds_warmup: of each before the first round.
        field: subjects with their layouts in place of `subjects`, for tests.
        progress: called with (layers done, layers in all, entry) after each layer.

    Returns:
        The study, as it is written to JSON.

    Raises:
        ValueError: no layers, several batches, an epilogue or another type than float32, or `rounds` below 1.
    """
    if not layers or rounds < 1:
        raise ValueError(f"`layers` must name one at least, and `rounds` (={rounds}) must be at least 1.")
    batches = {layer.conv.batch for layer in layers}
    plain = all(layer.conv == layer.conv.with_(dtype="float32", bias=False, residual=False, activation="none") for layer in layers)
    if len(batches) != 1 or not plain:
        raise ValueError(f"`layers` must be float32, without an epilogue and of one batch; batches are {sorted(batches)}.")
    machine = Machine.host(threads)
    facts = {
        "study": ALGORITHMS, "schema": SCHEMA, "device": machine.name, "brand": machine.brand, "threads": machine.threads,
        "batch": batches.pop(), "versions": versions(), "commit": commit(), "date": utc_now(), "digests": digests("cpu"),
    }  # fmt: skip
    entries = []
    with ExitStack() as stack:
        named = {f"{one.name} {layout}": (one, layout) for one, layout in (subjects(logs) if field is None else field)}
        workers = {name: stack.enter_context(Worker(one, machine.threads)) for name, (one, _) in named.items()}
        layouts = {name: layout for name, (_, layout) in named.items()}
        for done, layer in enumerate(layers, 1):
            entries.append(time_layer(layer, workers, layouts, rounds, seconds_warmup))
            if progress is not None:
                progress(done, len(layers), entries[-1])
    return {**facts, "entries": [asdict(entry) for entry in entries]}


def time_layer(
    layer: Layer, workers: Mapping[str, Worker], layouts: Mapping[str, str], rounds: int, seconds_warmup: float
) -> Entry:
    """Checks and times every worker on one layer, in the worker's layout."""
    entry = Entry(layer.name, str(layer.conv))
    problems = {layout: layer.conv.with_(layout=layout) for layout in dict.fromkeys(layouts.values())}
    expected = {layout: np.asarray(Tensors.random(conv, SEED).expected(conv)) for layout, conv in problems.items()}
    ready: dict[str, Worker] = {}
    for name, worker in workers.items():
        conv = problems[layouts[name]]
        try:
            prepared = worker.prepare(conv, SEED)
            checked(prepared.output, expected[layouts[name]], tolerance(conv))
        except WorkerError as refused:
            entry.failed[name] = str(refused)
            continue
        ready[name], entry.extra_bytes[name] = worker, prepared.extra_bytes
        if prepared.tier:
            entry.tiers[name] = prepared.tier
    samples, late = interleaved(ready, rounds, seconds_warmup)
    entry.failed |= late
    entry.times = spreads(samples)
    return entry
