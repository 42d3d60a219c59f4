"""Jobs, answers and facts as messages. Each side reads those of the other as data that anyone may have written."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from im2win import __version__
from im2win.common.field_types import check_fields
from im2win.device.cpu import FEATURES, Machine
from im2win.device.gpu import Gpu
from im2win.numerics.tolerance import tolerance
from im2win.packing import codec
from im2win.records.record import is_device
from im2win.registry.backends import Device, backend_for
from im2win.registry.sources import target_digest
from im2win.spec.accuracy import checked_accuracy
from im2win.spec.conv2d import Conv2d
from im2win.tuner.fleet.wire import PROTOCOL
from im2win.tuner.runners.cpu import Candidate, Outcome, RunJob

MOST_CANDIDATES = 64
MOST_SAMPLES = 10_000
MOST_S = 1e6  # seconds of a sample
MESSAGE_CHARACTERS = 500
_WORD = re.compile(r"[A-Za-z0-9._+ -]{1,64}")

T = TypeVar("T")


class MessageError(ValueError):
    """A message that breaks a rule. The text says which."""


def _made(kind: type[T], values: Any, what: str) -> T:
    """A dataclass of a message's values, each of its type.

    Raises:
        MessageError: fields are missing, unknown or of another type.
    """
    names = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    if not isinstance(values, dict) or set(values) != names:
        raise MessageError(f"{what} must hold {', '.join(sorted(names))}.")
    try:
        made = kind(**values)
        check_fields(made, what)
    except (ValueError, TypeError) as error:
        raise MessageError(str(error)) from None
    return made


# --- facts -----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a worker takes and does at most.

    Attributes:
        upload_bytes: of one message, the libraries of a job.
        tensor_bytes: of a problem's tensors.
        job_s: seconds of a job's process, which is ended then.
    """

    upload_bytes: int = 256 << 20
    tensor_bytes: int = 8 << 30
    job_s: float = 600.0


@dataclasses.dataclass(frozen=True)
class Facts:
    """What a worker says of itself.

    Attributes:
        code: digest of the source that packs filters and generates kernels, which must be the tuner's.
        device: fields of its `Machine` or `Gpu`.
    """

    protocol: int
    im2win: str
    code: str
    target: str
    device: dict[str, Any]
    limits: dict[str, Any]

    @classmethod
    def of(cls, device: Device, limits: Limits) -> Facts:
        """The facts of a worker here."""
        target = backend_for(device).target
        return cls(PROTOCOL, __version__, target_digest(target), target, dataclasses.asdict(device), dataclasses.asdict(limits))

    @classmethod
    def read(cls, values: Any) -> tuple[Device, Limits]:
        """A worker's device and limits.

        Raises:
            MessageError: they are none, or those of a worker that this release cannot use.
        """
        found = _made(cls, values, "facts")
        if found.protocol != PROTOCOL or found.target not in ("cpu", "cuda"):
            raise MessageError(f"it speaks protocol {found.protocol} for target {found.target!r:.40}, this tuner {PROTOCOL}.")
        if found.code != target_digest(found.target):
            raise MessageError(f"it runs other code (im2win {found.im2win:.20}) than this tuner (im2win {__version__}): install the same.")
        device: Device = _made(Machine, found.device, "device") if found.target == "cpu" else _made(Gpu, found.device, "device")
        facts = dataclasses.asdict(device)
        features = facts.pop("features", ())
        if not set(features) <= set(FEATURES):
            raise MessageError(f"`device.features` (={features!r:.100}) must be among {', '.join(FEATURES)}.")
        for name, value in facts.items():
            if isinstance(value, str) and not (_WORD.fullmatch(value) or (name == "brand" and len(value) < 100 and value.isprintable())):
                raise MessageError(f"`device.{name}` (={value!r:.60}) must be letters, digits, dots, dashes, signs and spaces.")
            if not isinstance(value, str) and not 0 < value < 1e15:
                raise MessageError(f"`device.{name}` (={value!r}) must be above 0 and below 1e15.")
        if not is_device(device.name):
            raise MessageError(f"`device` (={device.name!r:.60}) is no name of a device.")
        return device, _made(Limits, found.limits, "limits")


def tensor_bytes(conv: Conv2d) -> int:
    """Bytes of float64 reference, inputs and output of a problem, about what measuring it takes."""
    shapes = (conv.input_shape, conv.filter_shape, conv.output_shape)
    return 4 * sum(math.prod(shape) for shape in shapes) + 8 * math.prod(conv.output_shape)


# --- jobs ------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Candidate:
    pack: dict[str, Any]
    accuracy: str
    workspace_bytes: int
    sha256: str


@dataclasses.dataclass(frozen=True)
class _Job:
    conv: str
    seed: int
    samples: int
    seconds: float
    give_up_s: float | None
    drop_above: float | None
    limit_s: float
    probe: list[list[int]]
    candidates: list[_Candidate]


def job_message(job: RunJob, libraries: Sequence[bytes], limit_s: float) -> dict[str, Any]:
    """A job's message, which the libraries follow."""
    candidates = [
        _Candidate(codec.as_dict(one.pack), one.accuracy, one.workspace_bytes, hashlib.sha256(library).hexdigest())
        for one, library in zip(job.candidates, libraries, strict=True)
    ]
    give_up, drop = (None if math.isinf(value) else value for value in (job.give_up_s, job.drop_above))
    probe = [list(pixel) for pixel in job.probe]
    sent = _Job(str(job.conv), job.seed, job.samples, job.seconds, give_up, drop, limit_s, probe, candidates)
    return {"do": "measure", **dataclasses.asdict(sent)}


def read_job(values: dict[str, Any], libraries: Sequence[bytes], folder: Path, limits: Limits) -> tuple[RunJob, float]:
    """The job of a message, and its limit in seconds. Its libraries are checked and lie in `folder` then; nothing is loaded.

    Raises:
        MessageError: a value breaks its rule, a library is not the one that the job names, or the problem is larger than `limits` allows.
    """
    listed = values.get("candidates")
    if not isinstance(listed, list) or not 1 <= len(listed) <= MOST_CANDIDATES or len(listed) != len(libraries):
        raise MessageError(f"`candidates` must be 1 to {MOST_CANDIDATES}, with a library each.")
    candidates = [_made(_Candidate, one, "candidate") for one in listed]
    found = _made(_Job, {**{name: value for name, value in values.items() if name != "do"}, "candidates": candidates}, "job")
    conv = _conv(found.conv)
    if (bytes_ := tensor_bytes(conv)) > limits.tensor_bytes:
        raise MessageError(f"the tensors of {conv} take {bytes_} bytes, and this worker takes up to {limits.tensor_bytes}.")
    if not (0 <= found.seed < 2**63 and 1 <= found.samples <= MOST_SAMPLES and 0 <= found.seconds <= limits.job_s and found.limit_s > 0):
        raise MessageError("`seed`, `samples`, `seconds` or `limit_s` is out of range.")
    sizes = (conv.batch, *conv.output_size)
    if not all(len(pixel) == 3 and all(0 <= at < size for at, size in zip(pixel, sizes, strict=True)) for pixel in found.probe):
        raise MessageError("`probe` must be pixels of the output.")
    tried = []
    for one, library in zip(candidates, libraries, strict=True):
        path = _stored(library, one.sha256, folder)
        if not 0 <= one.workspace_bytes <= limits.tensor_bytes:
            raise MessageError(f"`workspace_bytes` (={one.workspace_bytes}) must be from 0 to {limits.tensor_bytes}.")
        try:
            tried.append(Candidate(path, codec.from_dict(one.pack), checked_accuracy(one.accuracy), one.workspace_bytes))
        except (ValueError, TypeError) as error:
            raise MessageError(str(error)) from None
    give_up, drop = (math.inf if value is None else value for value in (found.give_up_s, found.drop_above))
    probe = tuple((n, y, x) for n, y, x in found.probe)
    job = RunJob(conv, tuple(tried), found.seed, found.samples, found.seconds, give_up, drop, folder, probe)
    return job, min(found.limit_s, limits.job_s)


def _conv(key: str) -> Conv2d:
    try:
        return Conv2d.parse(key)
    except ValueError as error:
        raise MessageError(str(error)) from None


def _stored(library: bytes, sha256: str, folder: Path) -> Path:
    """The library's file, once it is the one that was announced. No file is written into: a process may have mapped it."""
    if hashlib.sha256(library).hexdigest() != sha256:
        raise MessageError("a library is not the one that its job names.")
    path = folder / f"{sha256}.so"
    if not path.exists():
        path.write_bytes(library)
    return path


# --- answers ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Outcome:
    outcome: str
    message: str
    error: float | None
    samples_s: list[float]


def answer_message(outcomes: Sequence[Outcome]) -> tuple[dict[str, Any], list[bytes]]:
    """The message of a job's outcomes, and the bytes behind it: the probed values of each."""
    sent = []
    for one in outcomes:
        error = one.error if one.error is not None and math.isfinite(one.error) else None
        sent.append(dataclasses.asdict(_Outcome(one.outcome, one.message[:MESSAGE_CHARACTERS], error, list(one.samples_s))))
    blobs = [b"" if one.probed is None else np.ascontiguousarray(one.probed, "<f8").tobytes() for one in outcomes]
    return {"outcomes": sent}, blobs


def read_answer(values: dict[str, Any], blobs: Sequence[bytes], job: RunJob) -> list[Outcome]:
    """The outcomes of a job.

    Raises:
        MessageError: they break a rule that every runner's outcomes keep.
    """
    listed = values.get("outcomes")
    if not isinstance(listed, list) or len(listed) != len(job.candidates) or len(blobs) != len(listed):
        raise MessageError(f"an answer to a job of {len(job.candidates)} candidates must hold as many outcomes.")
    return [_outcome(one, blob, job, candidate) for one, blob, candidate in zip(listed, blobs, job.candidates, strict=True)]


def _outcome(values: Any, blob: bytes, job: RunJob, candidate: Candidate) -> Outcome:
    found = _made(_Outcome, values, "outcome")
    message = "".join(one if one.isprintable() else " " for one in found.message[:MESSAGE_CHARACTERS])
    if found.error is not None and found.error < 0:
        raise MessageError(f"`error` (={found.error!r}) must be at least 0.")
    if found.outcome == "wrong":
        return Outcome("wrong", message or "it is wrong", found.error)
    if found.outcome != "ok":
        raise MessageError(f"`outcome` (={found.outcome!r:.40}) must be ok or wrong.")
    if not 1 <= len(found.samples_s) <= MOST_SAMPLES or not all(1e-9 <= one <= MOST_S for one in found.samples_s):
        raise MessageError("`samples_s` must be times from a nanosecond up.")
    if found.error is None or not found.error <= tolerance(job.conv, candidate.accuracy):
        raise MessageError(f"`error` (={found.error!r}) of an ok outcome must be within the tolerance.")
    if len(blob) != 8 * len(job.probe) * job.conv.out_channels:
        raise MessageError("the values of the probed pixels do not have their size.")
    values_ = np.frombuffer(blob, "<f8").reshape(len(job.probe), job.conv.out_channels)
    return Outcome("ok", message, found.error, [float(one) for one in found.samples_s], values_)
