"""Process that compares models in ONNX Runtime: a model as it was, and with im2win's operators, in sessions on one thread pool.

A process of its own keeps ONNX Runtime's threads, which spin between calls, away from the caller. One pool for all sessions keeps the pool
of the one from disturbing the other. Every output is compared before anything is timed.

    python -m im2win.frontends.onnxruntime.timing JOB.json

The job holds the number of threads, the library and the pairs of models. The process prints a line of JSON for each pair.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from im2win.common.comparison import SECONDS, compare
from im2win.common.exact_sums import exact_sums

TOLERANCE = 1e-3  # of an output's largest magnitude, for whole models; layers are checked more closely when they are built
# The same where a whole model computes with integers of 8 bits. Where ONNX Runtime rounds a sum in another way, an element differs by a
# step, which is 1/127 of the largest or less; the layers behind add such steps up, weighted as their filters are.
QUANTISED_TOLERANCE = 0.03
INDEX_SHARE = 0.01  # of the elements of an output without rounding, such as indices, which may differ where rounding decides a tie
_LEVELS = 255  # steps between the least and the largest integer of 8 bits
_KINDS: dict[str, Any] = {
    "tensor(float)": np.float32, "tensor(double)": np.float64, "tensor(int64)": np.int64, "tensor(int32)": np.int32,
    "tensor(bool)": np.bool_, "tensor(uint8)": np.uint8, "tensor(int8)": np.int8,
}  # fmt: skip


@dataclass(frozen=True)
class Pair:
    """Two models to compare. The first dimension of random inputs, where it is symbolic, is `batch`.

    Attributes:
        seconds: of sampling.
        inputs: path of an .npz file with the inputs by `INPUT` and their names; "" for random ones.
        tolerance: of outputs, relative to the largest. Integers of 8 bits may always differ by one.
        share: of the elements of an output of integers, which may differ by more.
    """

    original: str
    ours: str
    batch: int = 1
    seconds: float = SECONDS
    inputs: str = ""
    tolerance: float = TOLERANCE
    share: float = INDEX_SHARE


@dataclass(frozen=True)
class Found:
    """What a comparison found; times in seconds per run. `failed` says why there is none.

    Attributes:
        saturated: ONNX Runtime's sums saturate on this CPU: outputs are equal only where it is told to compute them exactly. Its time is
            that of its default.
    """

    ours_s: float = 0.0
    theirs_s: float = 0.0
    faster: bool = False
    slower: bool = False
    disturbed: bool = False
    failed: str = ""
    saturated: bool = False


INPUT = "input:"  # before names in a file, some of which numpy could not take as they are
UNKNOWN_INPUT = "its input"  # what a reason begins with that says that an input cannot be made up


class _UnknownInputError(Exception):
    """An input that cannot be made up. The message says why."""


def _feeds(session: Any, batch: int) -> dict[str, Any]:
    """Random inputs of a session, zeros for those that may be indices."""
    random, feeds = np.random.default_rng(0), {}
    made: Any
    for one in session.get_inputs():
        shape = [batch if place == 0 and not isinstance(extent, int) else extent for place, extent in enumerate(one.shape)]
        if one.type not in _KINDS or not all(isinstance(extent, int) for extent in shape):
            raise _UnknownInputError(f"{UNKNOWN_INPUT} {one.name} ({one.type}, {one.shape}) has no one shape of numbers")
        kind = _KINDS[one.type]
        if np.issubdtype(kind, np.floating):
            made = random.standard_normal(shape)
        elif kind in (np.uint8, np.int8):
            made = random.integers(np.iinfo(kind).min, np.iinfo(kind).max + 1, shape)
        else:
            made = np.zeros(shape)
        feeds[one.name] = np.asarray(made, kind)
    return feeds


def _given(path: str) -> dict[str, Any]:
    """Inputs from a file."""
    return {name.removeprefix(INPUT): value for name, value in np.load(path).items()}


def _differ(found: Any, expected: Any, tolerance: float = TOLERANCE, share: float = INDEX_SHARE) -> bool:
    a, b = np.asarray(found), np.asarray(expected)
    if a.shape != b.shape or a.dtype != b.dtype:
        return True
    if not np.issubdtype(b.dtype, np.floating):
        steps = max(1, int(tolerance * _LEVELS)) if b.dtype in (np.uint8, np.int8) else 0
        wrong = np.abs(a.astype(np.int64) - b.astype(np.int64)) > steps
        return bool(np.mean(wrong) > share) if b.size else False
    scale = float(np.abs(b[np.isfinite(b)]).max(initial=0.0))
    return not np.allclose(a, b, rtol=0, atol=tolerance * scale, equal_nan=True)


def _compared(library: str, pair: Pair, threads: int | None) -> Found:
    """What a comparison finds; `threads` are those of each session, None where all share one pool."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 4
    if threads is None:
        options.use_per_session_threads = False
    else:
        options.intra_op_num_threads = threads
    options.register_custom_ops_library(library)

    def session(path: str) -> Any:
        return ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])

    theirs, ours = session(pair.original), session(pair.ours)
    feeds = _given(pair.inputs) if pair.inputs else _feeds(theirs, pair.batch)
    outputs = ours.run(None, feeds)

    def differ(expected: Sequence[Any] | None) -> bool:
        return expected is None or any(_differ(one, due, pair.tolerance, pair.share) for one, due in zip(outputs, expected, strict=True))

    saturated = differ(theirs.run(None, feeds))
    if saturated and differ(_exact(session, options, pair.original, feeds)):
        return Found(failed="its outputs differ from ONNX Runtime's")
    found = compare(lambda: ours.run(None, feeds), lambda: theirs.run(None, feeds), seconds=pair.seconds)
    return Found(found.ours_s, found.theirs_s, found.faster, found.slower, found.disturbed, saturated=saturated)


def _exact(session: Callable[[str], Any], options: Any, path: str, feeds: Mapping[str, Any]) -> Sequence[Any] | None:
    """A model's outputs with exact sums; None where ONNX Runtime has not all of its operators in this way (QGemm of int8)."""
    exact_sums(options)
    try:
        exact = session(path)
    except Exception:  # ONNX Runtime raises its own classes
        return None
    outputs: Sequence[Any] = exact.run(None, feeds)
    return outputs


def main(job: Mapping[str, Any]) -> None:
    """Entry point of the process."""
    import onnxruntime as ort

    threads: int | None = int(job["threads"])
    if hasattr(ort, "set_global_thread_pool_sizes"):  # releases before it let each session have its own threads
        ort.set_global_thread_pool_sizes(threads, 1)
        threads = None
    for each in job["pairs"]:
        try:
            found = _compared(job["library"], Pair(**each), threads)
        except _UnknownInputError as error:
            found = Found(failed=str(error))
        except Exception as error:  # ONNX Runtime raises its own classes
            found = Found(failed=" ".join(f"{type(error).__name__}: {error}".split())[:300])
        print(json.dumps(asdict(found)), flush=True)


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
