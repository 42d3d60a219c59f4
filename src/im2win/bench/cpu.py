"""The CPU benchmark: im2win and every peer on the same layers, in one run, in interleaved rounds.

Every subject has its own process, the same inputs and the same number of threads, and is checked against one float64 reference before it is
timed. harness.py explains the interleaved rounds and the separate processes. Filter packing, session creation and layout conversion of the
input are never timed. Everything that a caller waits for is timed, im2win's transform included.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import im2win
from im2win.bench import ceilings
from im2win.bench.harness import Prepared, Worker, WorkerError, interleaved
from im2win.bench.memory import MeasureError, peak_bytes
from im2win.bench.peers.cpu import Array, peers
from im2win.bench.peers.quantised import allowed
from im2win.bench.peers.subject import PeerError, Subject, Tensors, Trial
from im2win.bench.results import OURS, UNTUNED, Result, Row, Spread, roofline_fraction, suite_of
from im2win.bench.resume import highest_ceilings, in_order, kept
from im2win.bench.source import digests
from im2win.builder.build import build_tile, looked_up
from im2win.common.comparison import judged
from im2win.device.cpu import Machine
from im2win.numerics.reference import error as error_of
from im2win.numerics.tolerance import tolerance
from im2win.runtime.op import Op
from im2win.runtime.tensors import empty_like
from im2win.spec.accuracy import Accuracy
from im2win.spec.conv2d import Conv2d
from im2win.spec.dtypes import ELEMENT_TYPES
from im2win.spec.suites import Layer

MOST_SLOWER = 1 / 0.97  # than the default tile: what a record's tile may be, by noise of the machine that recorded it
PROCESSES_DIFFER = 0.05  # by so much the same kernel may be faster or slower in another process
SEED = 0

Progress = Callable[[int, int, Row], None]


@dataclass(frozen=True)
class Ours:
    """The operator that `im2win.build` returns, with filters bound and output preallocated.

    Args:
        logs: folder of tuning records; None for the packaged ones.
        algorithm: one name, or "auto".
        tuned: None uses a record where there is one; True refuses a layer without a record; False always uses the default tile.
        accuracy: see `im2win.build`.
    """

    logs: Path | None = None
    algorithm: str = "auto"
    tuned: bool | None = None
    name: str = OURS
    accuracy: Accuracy = "float32"

    def build(self, conv: Conv2d, threads: int) -> Op:
        """The operator that is timed.

        Raises:
            PeerError: `tuned` is True and the layer has no record.
        """
        return self._build(conv, threads)[0]

    def _build(self, conv: Conv2d, threads: int) -> tuple[Op, str]:
        """The operator, and the tier of the look-up that chose it."""
        machine, tier = Machine.host(threads), "default"
        if self.tuned is False:
            name, tile = im2win.default_tile(conv, self.algorithm, machine, self.accuracy)
        else:
            name, tile, tier = looked_up(conv, machine, self.logs, self.algorithm, self.accuracy)
        if self.tuned and tier != "exact":
            raise PeerError(f"{self.name}: no tuning record for {conv}; tune it first.")
        return build_tile(conv, name, tile, machine, tuned=tier == "exact"), tier

    def prepare(self, conv: Conv2d, tensors: Tensors, threads: int) -> Trial:
        op, tier = self._build(conv, threads)
        layer = op.bind(tensors.filter, tensors.bias, tensors.scale)
        output = empty_like(tensors.data, conv.output_shape, conv.out_dtype)
        output.fill(ELEMENT_TYPES[conv.out_dtype].poisons[0])
        call = partial(layer, tensors.data, residual=tensors.residual, out=output)
        return Trial(call, lambda: output, op.method, op.tuned, op.extra_bytes, op.tile, tier)


def run(
    layers: Sequence[Layer],
    *,
    against: Sequence[str] = ("torch", "onnxruntime"),
    batch: int | None = None,
    threads: int | None = None,
    logs: Path | str | None = None,
    algorithm: str = "auto",
    tuned: bool | None = None,
    accuracy: Accuracy = "float32",
    untuned: bool = False,
    rounds: int = 15,
    seconds_warmup: float = 0.5,
    memory: bool = False,
    tvm_trials: int = 64,
    tvm_cache: Path | None = None,
    suite: str = "custom",
    progress: Progress | None = None,
    keep: Callable[[Result], object] | None = None,
    subjects: Sequence[Subject] | None = None,
    before: Result | None = None,
) -> Result:
    """Times the layers. The result has one row for each.

    Args:
        layers: what to run (`im2win.spec.suites`).
        against: names in `im2win.bench.peers.cpu.PEERS`; "torch" stands for NCHW and channels-last.
        batch: replaces the batch of every layer; None keeps it.
        threads: of every subject; None: all CPUs that this process may use.
        logs, algorithm, tuned, accuracy: see `Ours`.
        untuned: time the default tile too, in the same rounds.
        rounds: samples of each subject; calls under 1 ms are repeated within a sample. There are up to four times as many, of as many
            processes each, where they do not say whether im2win's choice is slower than 0.97 of the default tile's speed.
        seconds_warmup: of each subject before the first round.
        memory: measure im2win's peak memory, each layer in a separate process (`im2win.bench.memory`).
        tvm_trials, tvm_cache: see `im2win.bench.peers.cpu.TvmDefault`.
        suite: name of the result.
        progress: called with (layers done, layers in all, row) after each layer.
        keep: called with the partial result after each layer, so that an interrupted run keeps its layers.
        subjects: subjects in place of im2win and the peers (the first one is "ours"); for tests and experiments.
        before: an earlier run, whose rows are kept where they would be timed with the same kernels (`im2win.bench.resume`).

    Raises:
        ValueError: an unknown peer, no layers, or `rounds` below 1. A subject that fails is a message in its row instead.
        ResultError: `before` was measured on another device, of other layers or with other libraries.
    """
    if not layers:
        raise ValueError("`layers` must name at least one layer.")
    if rounds < 1:
        raise ValueError(f"`rounds` (={rounds}) must be at least 1.")
    folder = None if logs is None else Path(logs)
    ours = Ours(folder, algorithm, tuned, accuracy=accuracy)
    field = list(subjects) if subjects is not None else _field(ours, untuned)
    field += peers(list(against), tvm_trials, tvm_cache)
    wanted = [layer if batch is None else Layer(layer.name, layer.conv.with_(batch=batch), layer.count) for layer in layers]
    machine = Machine.host(threads)
    types = list(dict.fromkeys(layer.conv.dtype for layer in wanted))
    limits = ceilings.measure(machine.threads, seconds_warmup=seconds_warmup, dtypes=types)
    result = new_result(suite, [layer.conv for layer in wanted], machine, limits, accuracy)
    rows: dict[int, Row] = {}
    if before is not None:
        names = [one.name for one in field if one.name not in (OURS, UNTUNED)]
        rows = kept(before, result, wanted, machine, accuracy=accuracy, peers=names, untuned=untuned, logs=folder, algorithm=algorithm)
        result.ceilings = highest_ceilings(before, result)
    with ExitStack() as stack:
        workers = {one.name: stack.enter_context(Worker(one, machine.threads)) for one in field}
        for done, layer in enumerate(wanted, 1):
            row = rows.get(done - 1) or time_layer(layer, workers, limits, rounds=rounds, seconds_warmup=seconds_warmup)
            if memory and row.ours_ms is not None and row.peak_bytes is None:
                try:
                    row.peak_bytes = peak_bytes(ours.build(layer.conv, machine.threads))
                except MeasureError as error:
                    row.peak_failed = str(error)
            rows[done - 1] = row
            result.layers = in_order(rows)
            if keep is not None:
                keep(result)
            if progress is not None:
                progress(done, len(wanted), row)
    return result


def _field(ours: Ours, untuned: bool) -> list[Subject]:
    return [ours, replace(ours, tuned=False, name=UNTUNED)] if untuned else [ours]


def time_layer(
    layer: Layer, workers: Mapping[str, Worker], limits: ceilings.Ceilings, *, rounds: int, seconds_warmup: float
) -> Row:
    """Checks and times every worker on one layer. The first worker is im2win's."""
    conv, ours = layer.conv, next(iter(workers))
    row = Row(layer.name, str(conv), layer.count)
    expected = Tensors.random(conv, SEED).expected(conv)
    ready: dict[str, Worker] = {}
    failed: dict[str, str] = {}
    for name, worker in workers.items():
        try:
            prepared = worker.prepare(conv, SEED)
            error = checked(prepared.output, expected, tolerance(conv) if name in (ours, UNTUNED) else allowed(conv, expected))
        except WorkerError as refused:
            failed[name] = str(refused)
            continue
        ready[name] = worker
        if name == ours:
            _note(row, prepared, error)
        elif name == UNTUNED:
            row.untuned_algorithm, row.untuned_tile = prepared.algorithm, prepared.tile
    differ = (row.algorithm, row.tile) != (row.untuned_algorithm, row.untuned_tile)
    samples, late = interleaved(ready, rounds, seconds_warmup, unclear=lambda samples: differ and _unclear(ours, samples))
    failed.update(late)
    row.failed = failed.pop(ours, None)
    row.peers_failed = failed
    row.spread = spreads(samples)
    _compare(row, conv, {name: spread.median for name, spread in row.spread.items()}, ours, limits)
    return row


def _unclear(ours: str, samples: Mapping[str, Sequence[float]]) -> bool:
    """Whether samples of more processes are needed to say if im2win's choice is slower than its default tile by more than is allowed."""
    if ours not in samples or UNTUNED not in samples:
        return False
    ratio, noise = judged(zip(samples[ours], samples[UNTUNED], strict=False))
    return abs(ratio - MOST_SLOWER) < max(noise, PROCESSES_DIFFER)


def checked(output: Array, expected: Array, allowed: float) -> float:
    """The error of an output. WorkerError if it exceeds the tolerance or is NaN."""
    if output.shape != expected.shape:
        raise WorkerError(f"wrong result: its shape is {output.shape} instead of {expected.shape}.")
    found = error_of(output, expected)
    if not found <= allowed:
        raise WorkerError(f"wrong result: relative error {found:.2g} is above {allowed:.2g}.")
    return found


def _note(row: Row, prepared: Prepared, error: float) -> None:
    row.algorithm, row.tuned, row.extra_bytes, row.error = prepared.algorithm, prepared.tuned, prepared.extra_bytes, error
    row.tile, row.tier = prepared.tile, prepared.tier


def spreads(samples: Mapping[str, Sequence[float]]) -> dict[str, Spread]:
    """Samples in seconds per call, by subject, as a result stores them."""
    points = {name: (np.percentile(values, [10, 50, 90]) * 1e3, len(values)) for name, values in samples.items()}
    return {name: Spread(float(median), float(low), float(high), count) for name, ((low, median, high), count) in points.items()}


def _compare(row: Row, conv: Conv2d, medians: dict[str, float], ours: str, limits: ceilings.Ceilings) -> None:
    row.ours_ms = medians.pop(ours, None)
    row.untuned_ms = medians.pop(UNTUNED, None)
    row.peers = medians
    row.best_peer = min(medians, key=lambda name: medians[name], default=None)
    if row.ours_ms is not None:
        row.gflops = conv.flops / row.ours_ms / 1e6
        row.roofline_fraction = roofline_fraction(row, ["exact"], limits.by_name)
    if row.best_peer is not None:
        best = medians[row.best_peer]
        row.ratio = best / row.ours_ms if row.ours_ms is not None else None
        row.untuned_ratio = best / row.untuned_ms if row.untuned_ms is not None else None


def new_result(
    suite: str, convs: Sequence[Conv2d], machine: Machine, limits: ceilings.Ceilings, accuracy: Accuracy = "float32"
) -> Result:
    """A result without rows: what was run, where, when and with which versions."""
    batches = {conv.batch for conv in convs}
    return Result(
        suite=suite_of(suite, convs, accuracy),
        dtype="+".join(sorted({conv.types for conv in convs})),
        batch=batches.pop() if len(batches) == 1 else None,
        device=machine.name,
        brand=machine.brand,
        threads=machine.threads,
        versions=versions(),
        commit=commit(),
        date=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        ceilings=limits.by_name,
        digests=digests("cpu"),
    )


def versions() -> dict[str, str]:
    """Versions of Python, the system and every installed library that takes part."""
    found = {"python": platform.python_version(), "system": f"{platform.system()} {platform.release()}"}
    for package in ("im2win", "apache-tvm", "numpy", "torch", "onnxruntime", "openvino"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """The commit of the checkout that contains this file, with "+" if there are changes.

    Outside a checkout, as in a copy of the source without its history, what the environment variable IM2WIN_COMMIT says, or "".
    """

    def git(*words: str) -> str:
        command: list[Any] = ["git", "-C", Path(__file__).resolve().parent, *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "--short=12", "HEAD") + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("IM2WIN_COMMIT", "")
