"""Leaves to ONNX Runtime what im2win does not compute faster there, by measurement: layer by layer, and the model as a whole.

Both sides run in sessions of ONNX Runtime, in a process of their own (`timing`): a model of the layer's own nodes, which ONNX Runtime fuses
as it does, and the same model with im2win's operator. Results are kept beside the built operators, for the same layer, kernel, version of
ONNX Runtime, threads and device.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import logging
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from im2win.common.files import default_folder, replace_text
from im2win.common.json_text import parsed
from im2win.device.cpu import Machine
from im2win.export.c_abi.operators import DOMAIN
from im2win.frontends.onnxruntime.extraction import layer_model
from im2win.frontends.onnxruntime.rewriting import Replacement, rewrite
from im2win.frontends.onnxruntime.timing import QUANTISED_TOLERANCE, TOLERANCE, Found, Pair

if TYPE_CHECKING:
    from onnx import ModelProto

_log = logging.getLogger("im2win")
WHOLE_S = 0.3  # of sampling, for a whole model
_TIMEOUT_S = 120.0  # for each pair
_DIGITS = 16


def missing() -> str:
    """Why nothing can be compared here; "" if it can."""
    if importlib.util.find_spec("onnxruntime") is None:
        return "onnxruntime is not installed, so nothing was compared with it"
    return ""


@dataclass(frozen=True)
class Layer:
    """A layer to compare: what replaces it, the model it lies in, and the word for the kernel that im2win built."""

    replacement: Replacement
    kernel: str


def of_layers(
    model: ModelProto, layers: Sequence[Layer], library: Path, machine: Machine, step: Callable[[int, int], object]
) -> list[Found]:
    """What comparisons of layers find, in their order; equal problems are compared once.

    Args:
        library: of the operators.
        step: called with the number of layers done and the total.
    """
    cut = {id(one): layer_model(model, one.replacement.replaced) for one in layers}
    keys = [_key(cut[id(one)], one, machine) for one in layers]
    folder = default_folder() / machine.name / "comparisons"
    found = {key: kept for key in dict.fromkeys(keys) if (kept := _read(folder / f"{key}.json")) is not None}
    new = {key: one for key, one in zip(keys, layers, strict=True) if key not in found}
    with tempfile.TemporaryDirectory(prefix="im2win-compared-") as place:
        pairs = {key: _pair(cut[id(one)], one.replacement, Path(place) / key) for key, one in new.items()}
        for key, one in zip(pairs, compared(list(pairs.values()), library, machine.threads, step), strict=True):
            found[key] = one
            if not (one.failed or one.disturbed):
                _write(folder / f"{key}.json", one)
    return [found[key] for key in keys]


def _pair(original: ModelProto, replacement: Replacement, path: Path) -> Pair:
    ours = type(original)()
    ours.CopyFrom(original)
    rewrite(ours, [replacement], DOMAIN)
    names = path.with_suffix(".theirs.onnx"), path.with_suffix(".ours.onnx")
    for name, one in zip(names, (original, ours), strict=True):
        name.write_bytes(one.SerializeToString())
    return Pair(str(names[0]), str(names[1]), share=0.0)


def _key(original: ModelProto, one: Layer, machine: Machine) -> str:
    """Digest of what decides a comparison: the problem, ONNX Runtime's operators for it, the kernel, versions, threads."""
    operators = [(node.op_type, sorted(str(each) for each in node.attribute)) for node in original.graph.node]
    version = importlib.metadata.version("onnxruntime")
    what = [str(one.replacement.replaced.convolution.conv), operators, one.kernel, version, machine.threads, machine.isa]
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:_DIGITS]


def of_models(
    original: Path, ours: Path, library: Path, machine: Machine, batch: int, inputs: str = "", *, quantised: bool = False
) -> Found:
    """What a comparison of whole models finds, on the inputs of an .npz file or on random ones. It is kept as those of layers are.

    Args:
        quantised: whether layers of ours compute with integers.
    """
    pair = Pair(str(original), str(ours), batch, WHOLE_S, inputs, QUANTISED_TOLERANCE if quantised else TOLERANCE)
    path = default_folder() / machine.name / "comparisons" / f"{_whole_key(pair, library, machine)}.json"
    if (kept := _read(path)) is not None:
        return kept
    [found] = compared([pair], library, machine.threads, lambda done, of: None)
    if not (found.failed or found.disturbed):
        _write(path, found)
    return found


def _whole_key(pair: Pair, library: Path, machine: Machine) -> str:
    """Digest of what decides a comparison of models: every file that takes part, with weights beside it, versions, threads."""
    files = [Path(one) for one in (pair.original, pair.ours, library, pair.inputs) if one]
    files += [beside for one in files[:2] if (beside := one.with_name(one.name + ".data")).exists()]
    settings = [pair.batch, pair.tolerance, pair.share, pair.seconds]
    what = [*map(_content, files), settings, importlib.metadata.version("onnxruntime"), machine.threads, machine.isa]
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:_DIGITS]


def _content(path: Path) -> str:
    """Digest of a file, of which a part is read at a time."""
    made = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(1 << 24):
            made.update(part)
    return made.hexdigest()


def compared(pairs: Sequence[Pair], library: Path, threads: int, step: Callable[[int, int], object]) -> list[Found]:
    """What comparisons of pairs of models find. A pair at which the process dies is one that failed; the others go on in a new one."""
    found: list[Found] = []
    while len(found) < len(pairs):
        ended = _in_process(pairs[len(found) :], library, threads, found, lambda: step(len(found), len(pairs)))
        if len(found) < len(pairs):
            found.append(Found(failed=ended))
    return found


def _in_process(pairs: Sequence[Pair], library: Path, threads: int, found: list[Found], step: Callable[[], object]) -> str:
    """Adds what a process finds until it ends. Returns how it ended."""
    job = {"threads": threads, "library": str(library.resolve()), "pairs": [asdict(pair) for pair in pairs]}
    with tempfile.TemporaryDirectory(prefix="im2win-compared-") as folder:
        path = Path(folder) / "job.json"
        path.write_text(json.dumps(job), encoding="utf-8")
        command = [sys.executable, "-m", "im2win.frontends.onnxruntime.timing", str(path)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(each or os.getcwd() for each in sys.path)}
        nothing = subprocess.DEVNULL
        with subprocess.Popen(command, stdin=nothing, stdout=subprocess.PIPE, stderr=nothing, text=True, env=environment) as process:
            assert process.stdout is not None
            limit = threading.Timer(_TIMEOUT_S * len(pairs), process.kill)
            limit.start()
            try:
                for line in process.stdout:
                    found.append(Found(**json.loads(line)))
                    step()
                status = process.wait()
            finally:
                limit.cancel()
                process.kill()
    return f"ONNX Runtime's process ended with status {status}"


def _read(path: Path) -> Found | None:
    try:
        return Found(**parsed(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def _write(path: Path, found: Found) -> None:
    try:
        replace_text(path, json.dumps(asdict(found)) + "\n")
    except OSError as error:
        _log.info("a comparison is not kept (%s): the next run compares again", error)
