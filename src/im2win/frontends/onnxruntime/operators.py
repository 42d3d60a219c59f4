"""Rewrites an ONNX model for ONNX Runtime: im2win's kernels compute the convolutions, from a library of operators beside the model."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from im2win.common.progress import Reporter, reporting
from im2win.device.cpu import Machine
from im2win.export.c_abi.cpu import compiler_on_path
from im2win.export.c_abi.operators import DOMAIN, workspace_of
from im2win.frontends.models.convolutions import build_all
from im2win.frontends.models.kept_kernels import Built, Job, symbol_of
from im2win.frontends.models.source import read
from im2win.frontends.onnx.coverage import Covered, coverage, share_left
from im2win.frontends.onnx.layers import ModelError
from im2win.frontends.onnxruntime.guard import missing
from im2win.frontends.onnxruntime.rewriting import Replaceable, replaceable
from im2win.frontends.onnxruntime.timing import Found
from im2win.frontends.onnxruntime.writing import Work, operators_of
from im2win.frontends.tuning import checked_trials, tune_untuned
from im2win.records.folders import Logs, named_folders
from im2win.records.lookup import search
from im2win.records.tiers import NO_RECORD, TUNED, Untuned, checked_untuned, tier_for
from im2win.registry.backends import device_for
from im2win.registry.schedules import candidates
from im2win.runtime.manifest import ArtefactError
from im2win.runtime.model_manifest import ModelLayer
from im2win.spec.accuracy import Accuracy, checked_accuracy
from im2win.spec.conv2d import Conv2d

if TYPE_CHECKING:
    from onnx import ModelProto


@dataclass(frozen=True)
class Rewritten:
    """A model for ONNX Runtime, and the library that it needs.

    Attributes:
        layers: the convolutions that im2win computes.
        skipped: those that ONNX Runtime computes, with the reason.
        times: what comparisons with ONNX Runtime found, by convolution; empty where nothing was compared.
        whole: what the comparison of the whole model found; None where it was not compared.
        note: why layers or the whole were not compared, or why the written model is the original; "" otherwise.
        operators: every convolution and product of the model: who computes it, its flops, what is fused and what is not.
        growth: bytes by which packed filters exceed the model's own.
        workspace: bytes that the library holds for each concurrent call, whatever the number of layers.
    """

    path: Path
    library: Path
    layers: tuple[ModelLayer, ...]
    skipped: tuple[str, ...]
    growth: int
    workspace: int
    times: dict[str, Found] = field(default_factory=dict)
    whole: Found | None = None
    note: str = ""
    operators: tuple[Covered, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """The result as plain values, which JSON can hold; times in seconds."""
        facts = {"model": str(self.path), "library": str(self.library), "growth_bytes": self.growth, "workspace_bytes": self.workspace}
        layers = [
            {"name": one.name, "conv": one.conv, "algorithm": one.algorithm, "tier": one.tier, "tile": one.tile} for one in self.layers
        ]
        times = {name: asdict(found) for name, found in self.times.items()}
        whole = None if self.whole is None else asdict(self.whole)
        covered = {"operators": [one.as_dict() for one in self.operators], "share_left": share_left(self.operators)}
        found = {"layers": layers, "left": list(self.skipped), "times": times, "whole": whole}
        return {"schema": 1, **facts, "note": self.note, **found, **covered}


def for_onnxruntime(
    source: str | os.PathLike[str] | ModelProto,
    path: str | os.PathLike[str],
    library: str | os.PathLike[str] | None = None,
    *,
    batch: int | None = None,
    logs: Any = None,
    threads: int | None = None,
    accuracy: Accuracy = "float32",
    untuned: Untuned = "default",
    trials: int | None = None,
    guard: bool = True,
    inputs: Mapping[str, Any] | None = None,
) -> Rewritten:
    """Rewrites an ONNX model so that ONNX Runtime computes its convolutions with im2win's kernels, where they are faster.

    Each float32 Conv with fixed filters, height and width becomes a node of the domain `im2win`. The node includes the Pad before it and
    the batch normalisation, scalings, bias, residual addition and activation after it, as in `compile_model`, and its filters are packed
    now. In quantised models so does each QLinearConv, ConvInteger with constant zero points, and Conv between DequantizeLinear and
    QuantizeLinear: as one node that reads and writes integers of 8 bits. All other nodes are unchanged.

    A program then registers the library and loads the model::

        options = onnxruntime.SessionOptions()
        options.register_custom_ops_library("./model_im2win.so")
        session = onnxruntime.InferenceSession("model_im2win.onnx", options)

    If onnxruntime is installed, each layer is compared with ONNX Runtime's own operators, in a process of its own: outputs first, then
    times. It stays with ONNX Runtime where im2win is not faster by more than the noise. At the end the whole models are compared; if the
    new one is slower, the original is written instead, and `note` says so. Results of comparisons are kept in the cache.

    Kernels run on ONNX Runtime's own threads. ONNX Runtime must be 1.17 or newer, on Linux. The machine that runs the model needs no
    im2win.

    Args:
        source: path of an ONNX file, or a loaded model (not changed).
        path: of the model that is written; its weights lie in `path`.data if they are too large for one file.
        library: its path; by default `path` with the suffix .so.
        batch: images of one kernel call where the model's batch is symbolic, 1 by default; the model then runs at any multiple of it.
        logs: folders of tuning records (a path, or several), searched before the user's own (`IM2WIN_LOGS`) and those of the package.
        threads: CPUs to schedule for; all that the process may use by default.
        accuracy: the rounding that kernels may use; see `im2win.build`.
        untuned: layers without a tuning record of this device: "default" uses a neighbouring layer's tile or the analytic model's, "keep"
            leaves them to ONNX Runtime.
        trials: candidates to tune each layer with that has no record of this device, as for `im2win.tune`. The records go to the first
            folder of `logs`, else to the user's, where later calls find them. None tunes nothing.
        guard: compare with ONNX Runtime; False replaces every layer that im2win can compute.
        inputs: tensors by name for the comparison of the whole models; None makes up random numbers, and zeros for integers.

    Raises:
        LogError: with `trials`, the records cannot be written.
        ModelError: the model cannot be read, or none of its convolutions can be replaced; the message says why.
        ArtefactError: the files cannot be written.
        ToolchainError: there is no C compiler, or the system is not Linux.
        ValueError: an argument out of range; the message names argument, value and rule.
    """
    accuracy, untuned = checked_accuracy(accuracy), checked_untuned(untuned)
    if batch is not None and (isinstance(batch, bool) or not isinstance(batch, int) or batch < 1):
        raise ValueError(f"`batch` (={batch!r}) must be an integer, at least 1.")
    written, linked = _files(source, path, library)
    compiler_on_path()
    machine = device_for("cpu", threads)
    assert isinstance(machine, Machine)
    label, model = read(source)
    given = _checked_inputs(model, inputs)
    if any(node.domain == DOMAIN for node in model.graph.node):
        raise ModelError(f"`source` (={label}) must be a model as it was; it has been rewritten already.")
    found, left = replaceable(model, label, batch)
    if (trials := checked_trials(trials)) is not None:
        tune_untuned([one.convolution.conv for one in found], "cpu", trials=trials, logs=logs, threads=threads, accuracy=accuracy)
    untaken = [(one, _untaken(one.convolution.conv, machine, logs, accuracy, untuned)) for one in found]
    kept = [one for one, reason in untaken if reason is None]
    reasons = [f"{one.name}: {one.reason}" for one in left]
    reasons += [f"{one.convolution.name}: {reason}" for one, reason in untaken if reason is not None]
    if not kept:
        raise ModelError(_none(label, reasons, len(model.graph.node)))
    try:
        written.parent.mkdir(parents=True, exist_ok=True)
        linked.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="im2win-objects-") as folder, reporting(f"onnxruntime {written.name}") as reporter:
            built = _built([one.convolution.conv for one in kept], machine, logs, accuracy, Path(folder), reporter)
            work = Work(model, built, machine, written, linked, Path(folder), reporter)
            made = work.guarded(kept, batch or 1, given) if guard and not missing() else work.unguarded(kept)
    except OSError as error:
        raise ArtefactError(f"{error.filename or written}: cannot be written ({error.strerror or error}).") from None
    layers = tuple(_layer(one.replaced, built[one.replaced.convolution.conv]) for one in made.replacements)
    growth = sum(one.filter.nbytes - one.replaced.convolution.filter.nbytes for one in made.replacements)
    workspace = workspace_of(list(operators_of([one.replaced for one in made.replacements], built, machine).values()), machine)
    operators = coverage(model, batch, {one.name for one in layers}, products=False)
    skipped, note = (*reasons, *made.left), made.note or (missing() if guard else "")
    return Rewritten(written, linked, layers, skipped, growth, workspace, made.times, made.whole, note, operators)


def _files(source: Any, path: str | os.PathLike[str], library: str | os.PathLike[str] | None) -> tuple[Path, Path]:
    """Paths of the model and the library, which must differ from each other and from the source."""
    written = Path(path)
    linked = written.with_suffix(".so") if library is None else Path(library)
    given = [Path(source)] if isinstance(source, (str, os.PathLike)) else []
    if len({one.resolve() for one in (*given, written, linked)}) < 2 + len(given):
        raise ValueError(f"`path` (={written}), `library` (={linked}) and the model must be different files.")
    return written, linked


def _checked_inputs(model: ModelProto, inputs: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The tensors for a model's inputs, which they must name all."""
    if inputs is None:
        return None
    stored = {tensor.name for tensor in model.graph.initializer}
    wanted = [value.name for value in model.graph.input if value.name not in stored]
    if set(inputs) != set(wanted):
        raise ValueError(f"`inputs` (={', '.join(inputs) or 'none'}) must name each input of the model once: {', '.join(wanted)}.")
    return {name: np.asarray(inputs[name]) for name in wanted}


def _none(label: str, reasons: Sequence[str], nodes: int) -> str:
    begin = f"`source` (={label}) must have a convolution that im2win can compute"
    if not reasons:
        return f"{begin}; it has none among its {nodes} nodes."
    more = f", and {len(reasons) - 1} more" if len(reasons) > 1 else ""
    return f"{begin}; it has {reasons[0]}{more}."


def _untaken(conv: Conv2d, machine: Machine, logs: Logs, accuracy: Accuracy, untuned: Untuned) -> str | None:
    """The reason why a problem is left to ONNX Runtime; None if it is not."""
    try:
        names = [row.key for row in candidates("auto", conv, "cpu", accuracy)]
    except ValueError as error:  # no algorithm computes it
        return str(error)
    if untuned == "default":
        return None
    found = search(conv, machine, names, logs, accuracy)
    tier = tier_for(conv, found.tier, found.record.conv2d if found.record else None)
    return None if tier in TUNED else NO_RECORD


def _built(
    convs: Sequence[Conv2d], machine: Machine, logs: Logs, accuracy: Accuracy, folder: Path, reporter: Reporter
) -> dict[Conv2d, Built]:
    """The kernels of all distinct problems, as object files in a folder."""
    distinct = list(dict.fromkeys(convs))
    folders = named_folders(logs)
    jobs = [Job(conv, symbol_of(conv), machine, folders, accuracy, folder / f"conv_{i}.o") for i, conv in enumerate(distinct)]
    return dict(zip(distinct, build_all(jobs, machine.threads, reporter), strict=True))


def _layer(one: Replaceable, built: Built) -> ModelLayer:
    convolution = one.convolution
    return ModelLayer(convolution.name, str(convolution.conv), built.algorithm, built.tile.as_dict(), built.tier)
