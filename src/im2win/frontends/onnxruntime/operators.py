"""ONNX models for ONNX Runtime, with their convolutions on im2win's kernels: the graph rewritten, the kernels in a library beside it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from im2win.device.cpu import Machine
from im2win.export.c_abi.cpu import compiler_on_path
from im2win.export.c_abi.operators import DOMAIN, OPERATOR, Operator, link, workspace_of
from im2win.frontends.models.convolutions import Built, Job, build_all
from im2win.frontends.models.source import read
from im2win.frontends.onnx.layers import ModelError, import_onnx
from im2win.frontends.onnxruntime.rewriting import Replaceable, Replacement, replaceable, rewrite
from im2win.records.lookup import search
from im2win.records.tiers import NO_RECORD, TUNED, Untuned, checked_untuned, rung_for
from im2win.registry.backends import device_for
from im2win.registry.schedules import candidates
from im2win.runtime.manifest import ArtefactError
from im2win.runtime.model_manifest import ModelLayer
from im2win.spec.accuracy import Accuracy, checked_accuracy
from im2win.spec.conv2d import Conv2d

if TYPE_CHECKING:
    from onnx import ModelProto

_MOST_WEIGHTS = 2**31 - 2**26  # bytes beside which protobuf can write the rest of a model into one file
_SMALL = 1024  # bytes of a tensor that stays in the model's file, whatever becomes of the others


@dataclass(frozen=True)
class Rewritten:
    """A model for ONNX Runtime, and the library that it needs.

    layers: the convolutions that im2win computes.
    skipped: those that ONNX Runtime does, with the reason.
    growth: bytes that packed filters take more than the model's own did.
    workspace: bytes that the library holds for each call at the same time, whatever the number of layers.
    """

    path: Path
    library: Path
    layers: tuple[ModelLayer, ...]
    skipped: tuple[str, ...]
    growth: int
    workspace: int


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
) -> Rewritten:
    """Rewrites an ONNX model so that ONNX Runtime computes its convolutions with im2win's kernels. Never tunes.

    Each Conv of float32 with fixed filters, height and width becomes a node of the domain `im2win`, with the Pad before it and the batch
    normalisation, scalings, bias, residual addition and activation behind it, as in `compile_model`; its filters are packed now. All else
    stays as it is. A program then registers the library and loads the model::

        options = onnxruntime.SessionOptions()
        options.register_custom_ops_library("./model_im2win.so")
        session = onnxruntime.InferenceSession("model_im2win.onnx", options)

    Kernels run on ONNX Runtime's own threads. It must be 1.17 or newer, on Linux; where it runs, nothing of im2win is needed.

    Args:
        source: path of an ONNX file, or a loaded model (left as it is).
        path: of the model that is written; its weights lie in `path`.data where they are too many for one file.
        library: its path; by default `path` with the suffix .so.
        batch: images of one call of a kernel where the model's batch is symbolic, 1 by default: of its multiples any number can be run.
        logs: a folder of tuning records looked up before those that ship with the package; None for these only.
        threads: CPUs to schedule for; all that the process may use by default.
        accuracy: what kernels may round; see `im2win.build`.
        untuned: layers that no record of this device is about: "default" takes a neighbour's tile or the model's, "keep" leaves them to
            ONNX Runtime.

    Raises:
        ModelError: the model cannot be read, or none of its convolutions can be taken; the message says why.
        ArtefactError: the files cannot be written. ToolchainError: no C compiler, or a system other than Linux.
        ValueError: an argument out of range; the message names argument, value and rule.
    """
    accuracy, untuned = checked_accuracy(accuracy), checked_untuned(untuned)
    if batch is not None and (isinstance(batch, bool) or not isinstance(batch, int) or batch < 1):
        raise ValueError(f"for_onnxruntime: `batch` (={batch!r}) must be an integer, at least 1.")
    written, linked = _files(source, path, library)
    compiler_on_path()
    machine = device_for("cpu", threads)
    assert isinstance(machine, Machine)
    label, model = read(source)
    if any(node.domain == DOMAIN for node in model.graph.node):
        raise ModelError(f"for_onnxruntime: `source` (={label}) must be a model as it was; it has been rewritten already.")
    found, left = replaceable(model, label, batch)
    reasons = [f"{one.name}: {one.reason}" for one in left]
    kept: list[Replaceable] = []
    for one in found:
        reason = _untaken(one.convolution.conv, machine, logs, accuracy, untuned)
        if reason is None:
            kept.append(one)
        else:
            reasons.append(f"{one.convolution.name}: {reason}")
    if not kept:
        raise ModelError(_none(label, reasons, len(model.graph.node)))
    try:
        written.parent.mkdir(parents=True, exist_ok=True)
        linked.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="im2win-objects-") as folder:
            built = _built([one.convolution.conv for one in kept], machine, logs, accuracy, Path(folder))
            operators = {conv: Operator(conv, made.tile.pack, made.symbol, made.path, made.workspace) for conv, made in built.items()}
            growth = _rewrite(model, kept, operators)
            link(list(operators.values()), machine, linked)
        _save(model, written)
    except OSError as error:
        raise ArtefactError(f"{error.filename or written}: cannot be written ({error.strerror or error}).") from None
    layers = tuple(_layer(one, built[one.convolution.conv]) for one in kept)
    return Rewritten(written, linked, layers, tuple(reasons), growth, workspace_of(list(operators.values()), machine))


def _files(source: Any, path: str | os.PathLike[str], library: str | os.PathLike[str] | None) -> tuple[Path, Path]:
    """The model's file and the library's, of which neither is the other or the source."""
    written = Path(path)
    linked = written.with_suffix(".so") if library is None else Path(library)
    given = [Path(source)] if isinstance(source, (str, os.PathLike)) else []
    if len({one.resolve() for one in (*given, written, linked)}) < 2 + len(given):
        raise ValueError(f"for_onnxruntime: `path` (={written}), `library` (={linked}) and the model must be different files.")
    return written, linked


def _none(label: str, reasons: Sequence[str], nodes: int) -> str:
    begin = f"for_onnxruntime: `source` (={label}) must have a convolution that im2win can compute"
    if not reasons:
        return f"{begin}; it has none among its {nodes} nodes."
    more = f", and {len(reasons) - 1} more" if len(reasons) > 1 else ""
    return f"{begin}; it has {reasons[0]}{more}."


def _untaken(conv: Conv2d, machine: Machine, logs: Any, accuracy: Accuracy, untuned: Untuned) -> str | None:
    """Why a problem is left to ONNX Runtime."""
    try:
        names = [row.key for row in candidates("auto", conv, "cpu", accuracy)]
    except ValueError as error:  # no algorithm computes it
        return str(error)
    if untuned == "default":
        return None
    found = search(conv, machine, names, logs, accuracy)
    rung = rung_for(conv, found.rung, found.record.conv2d if found.record else None)
    return None if rung in TUNED else NO_RECORD


def _built(convs: Sequence[Conv2d], machine: Machine, logs: Any, accuracy: Accuracy, folder: Path) -> dict[Conv2d, Built]:
    """The kernels of all problems, each once, as object files in a folder."""
    distinct = list(dict.fromkeys(convs))
    place = None if logs is None else str(Path(logs).resolve())
    jobs = [Job(conv, f"conv_{i}", machine, place, accuracy, folder / f"conv_{i}.o") for i, conv in enumerate(distinct)]
    return dict(zip(distinct, build_all(jobs, machine.threads), strict=True))


def _rewrite(model: ModelProto, kept: Sequence[Replaceable], operators: dict[Conv2d, Operator]) -> int:
    """Rewrites the graph; the bytes that its filters grow by."""
    replacements = []
    for one in kept:
        operator = operators[one.convolution.conv]
        packed = operator.pack.filter(operator.conv, one.convolution.filter)
        replacements.append(Replacement(one, {"kernel": operator.name}, packed))
    rewrite(model, replacements, DOMAIN, OPERATOR)
    return sum(one.filter.nbytes - one.replaced.convolution.filter.nbytes for one in replacements)


def _layer(one: Replaceable, built: Built) -> ModelLayer:
    convolution = one.convolution
    return ModelLayer(convolution.name, str(convolution.conv), built.algorithm, built.tile.as_dict(), built.rung)


def _save(model: ModelProto, path: Path) -> None:
    """Writes the model whole; its weights beside it where protobuf could not write them."""
    onnx = import_onnx()
    partial = path.with_name(path.name + ".partial")
    if sum(len(tensor.raw_data) for tensor in model.graph.initializer) < _MOST_WEIGHTS:
        onnx.save_model(model, partial)
    else:
        place = path.with_name(path.name + ".data")
        place.unlink(missing_ok=True)  # onnx would append to it
        onnx.save_model(model, partial, save_as_external_data=True, location=place.name, size_threshold=_SMALL)
    os.replace(partial, path)
