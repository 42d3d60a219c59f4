"""Worker process that measures on a CPU: it checks a kernel against the float64 reference before it times it (`tuner.runners.check`).

It is checked again after timing, to find intermittent errors. At last it runs on another input: the next kernel may allocate the same
memory, and must not find right values there.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from im2win.common.worker_pool import serve
from im2win.numerics.reference import Array, reference, typed_tensors
from im2win.numerics.tolerance import tolerance
from im2win.runtime.libraries import load_kernel
from im2win.runtime.tensors import argument, empty
from im2win.spec.accuracy import Accuracy
from im2win.spec.conv2d import Conv2d
from im2win.spec.symbols import SYMBOL
from im2win.tuner.runners.check import CheckedBench, Guarded, forget, verify, zone_of
from im2win.tuner.runners.tensors import Make, special

COLD_S, WARM_S = 0.5, 0.02  # seconds of warm-up, of a process's first kernel and of every other one
SAMPLE_S = 1e-3  # seconds; a sample is the mean over the calls that fit in
SETTLE_S = 20e-3  # seconds that a kernel runs before its sample, once at least, where another kernel ran in between
FEWEST = 4  # samples of a candidate before it is compared with the others of its job
BLOCK = 1 << 15  # outputs that are compared at a time: they stay in a CPU's cache


@dataclass(frozen=True)
class Candidate:
    """A library to run: its path, its filter packing, its accuracy, and the bytes of the workspace of its transform."""

    path: Path
    pack: Any
    accuracy: Accuracy = "float32"
    workspace_bytes: int = 0


@dataclass(frozen=True)
class RunJob:
    """Check and time candidates of one problem; several candidates are sampled in interleaved rounds.

    Attributes:
        samples, seconds: each candidate gets at least so many samples, over at least so many seconds that it runs.
        give_up_s: a candidate is given up after three samples that are all slower than this, in seconds.
        drop_above: of several candidates one is dropped when its median of `FEWEST` samples or more is so many times the least median.
        folder: where the next process finds the expected output that this one computed; None to compute it anew.
        probe: pixels (image, row, column) of the output whose values an outcome holds.
    """

    conv: Conv2d
    candidates: tuple[Candidate, ...]
    seed: int
    samples: int = 7
    seconds: float = 0.06
    give_up_s: float = float("inf")
    drop_above: float = float("inf")
    folder: Path | None = None
    probe: tuple[tuple[int, int, int], ...] = ()


@dataclass
class Outcome:
    """Result of one candidate: "ok" with samples in seconds, or "wrong" with a reason and no samples.

    Attributes:
        probed: the output's values of all channels at the job's `probe`, [pixels, channels] in float64; None if not ok or not asked for.
        undecided: a failure that says nothing of the candidate, since the machine is to blame. It goes into no record.
    """

    outcome: str
    message: str = ""
    error: float | None = None
    samples_s: list[float] = field(default_factory=list)
    probed: Any = None
    undecided: bool = False


def probed(output: Any, conv: Conv2d, pixels: tuple[tuple[int, int, int], ...]) -> Any:
    """The values of all channels at pixels (image, row, column) of an output, [pixels, channels]."""
    images, rows, cols = (list(places) for places in zip(*pixels, strict=True))
    return output[images, :, rows, cols] if conv.layout == "NCHW" else output[images, rows, cols]


class Bench(CheckedBench):
    """The tensors and the reference output of one problem.

    Attributes:
        special: benches of the same problem with `tuner.runners.tensors.special`.
    """

    def __init__(self, conv: Conv2d, seed: int, folder: Path | None = None, make: Make | None = None) -> None:
        """`folder`: as in `RunJob`. `make`: makes the tensors; None for random ones."""
        super().__init__(conv, (make or typed_tensors)(conv, seed))
        self.seed = seed
        kind = f"-{make.__name__}" if make else ""
        self.expected = self._expected(None if folder is None else folder / f"expected-{conv}-{seed}{kind}.npy")
        self.scale = float(np.max(np.abs(self.expected))) or 1.0
        self.special = {} if make else {name: Bench(conv, seed, folder, one) for name, one in special(conv).items()}

    def _memory(self, dtype: str, size: int) -> Array:
        return empty((size + 2 * zone_of(size),), dtype)

    def _expected(self, path: Path | None) -> Array:
        """The float64 reference, C-contiguous; it is kept in a file for the next process."""
        if path is not None and path.exists():
            held: Array = np.load(path)
            return held
        given = {name: self.inputs.get(name) for name in ("bias", "residual", "scale")}
        expected = np.ascontiguousarray(reference(self.conv, self.inputs["data"], self.inputs["filter"], **given))
        if path is not None:
            partial = path.with_suffix(".partial.npy")
            with contextlib.suppress(OSError):  # a full disk: the next process computes it again
                np.save(partial, expected)
                partial.replace(path)
        return expected

    def error(self) -> float:
        """As `numerics.reference.error`, of the output, in one pass over memory."""
        y, expected = self.output.reshape(-1), self.expected.reshape(-1)
        wide = np.float32 if y.dtype == np.float32 else np.float64
        places = range(0, y.size, BLOCK)
        worst = [np.max(np.abs(y[at : at + BLOCK].astype(wide, copy=False) - expected[at : at + BLOCK])) for at in places]
        return float(np.max(worst)) / self.scale  # NaN if any is

    def missing(self) -> int:
        return int(np.isnan(self.output).sum())


class Kernel:
    """A loaded candidate with its arguments. `own`: its packed tensors, between guard zones."""

    def __init__(self, bench: Bench, candidate: Candidate) -> None:
        conv, pack, inputs = bench.conv, candidate.pack, bench.inputs
        self.own: dict[str, Guarded] = {"packed filter": bench.guarded(pack.filter(conv, inputs["filter"]))}
        if conv.bias:
            self.own["packed bias"] = bench.guarded(pack.bias(conv, inputs["bias"]))
        packed = {name.removeprefix("packed "): buffer.tensor for name, buffer in self.own.items()}
        self._arrays = [*{**inputs, **packed}.values(), bench.output]
        self._arguments = [argument(array) for array in self._arrays]
        self._module = load_kernel(candidate.path)
        self._function = self._module[SYMBOL]

    def __call__(self) -> None:
        self._function(*self._arguments)


def checked(bench: Bench, kernel: Kernel) -> tuple[str, float | None]:
    """Checks a kernel with a bench's tensors. Returns what is wrong, "" if nothing, and the error, None if it is not a number."""
    return verify(bench, kernel, tolerance(bench.conv), kernel.own)


def checked_fully(bench: Bench, candidate: Candidate, kernel: Kernel) -> tuple[str, float | None]:
    """As `checked`, and with the tensors of `Bench.special`; the error is that of random tensors. No memory holds right values then."""
    message, error = checked(bench, kernel)
    forget(bench, kernel)
    for name, other in bench.special.items():
        if not message:
            again = Kernel(other, candidate)
            said, worst = checked(other, again)
            forget(other, again)
            message, error = (f"with {name}: {said}", worst) if said else (message, error)
    return message, error


def _sample(kernel: Kernel, calls: int) -> float:
    """Mean seconds of a call over `calls` calls."""
    start = time.perf_counter()
    for _ in range(calls):
        kernel()
    return (time.perf_counter() - start) / calls


def _calls(kernel: Kernel, warm_s: float, least: int = 2) -> int:
    """Warms a kernel up for `warm_s` seconds and `least` calls. Returns how many calls make a sample."""
    start, count = time.perf_counter(), 0
    while time.perf_counter() - start < warm_s or count < least:
        kernel()
        count += 1
    once = (time.perf_counter() - start) / count
    return max(1, round(SAMPLE_S / once))


class Measurer:
    """Handles jobs. It keeps the bench of the last problem, so that each reference is computed once."""

    def __init__(self) -> None:
        self._bench: Bench | None = None
        self._cold = True

    def __call__(self, job: RunJob) -> list[Outcome]:
        if self._bench is None or (self._bench.conv, self._bench.seed) != (job.conv, job.seed):
            self._bench = Bench(job.conv, job.seed, job.folder)
        bench = self._bench
        kernels: list[Kernel | None] = []
        outcomes: list[Outcome] = []
        for candidate in job.candidates:
            kernel = Kernel(bench, candidate)
            message, measured = checked_fully(bench, candidate, kernel)
            outcomes.append(Outcome("wrong" if message else "ok", message, measured))
            kernels.append(None if message else kernel)
        self._time(job, [(kernel, out) for kernel, out in zip(kernels, outcomes, strict=True) if kernel is not None])
        for tried, out in zip(kernels, outcomes, strict=True):
            if tried is not None:
                self._check_again(bench, tried, out)
                if job.probe and out.outcome == "ok":
                    out.probed = probed(bench.output, job.conv, job.probe).astype(np.float64)
                forget(bench, tried)
        return outcomes

    def _time(self, job: RunJob, kernels: list[tuple[Kernel, Outcome]]) -> None:
        """Samples the kernels in interleaved rounds.

        Another kernel leaves its own filters and workspace in the caches, and what is read once does not stay in a last-level cache that
        takes what the second level gives up: a Winograd kernel with 19 MB of transformed filters is a fifth slower for several calls.
        """
        calls = {}
        for kernel, _ in kernels:
            calls[id(kernel)] = _calls(kernel, COLD_S if self._cold else WARM_S)
            self._cold = False
        spent = {id(kernel): 0.0 for kernel, _ in kernels}
        open_ = list(kernels)
        while open_:
            for kernel, out in list(open_):
                start = time.perf_counter()
                if len(open_) > 1:
                    _calls(kernel, SETTLE_S, least=1)
                out.samples_s.append(_sample(kernel, calls[id(kernel)]))
                spent[id(kernel)] += time.perf_counter() - start
                enough = len(out.samples_s) >= job.samples and spent[id(kernel)] >= job.seconds
                hopeless = len(out.samples_s) >= 3 and min(out.samples_s) > job.give_up_s
                if enough or hopeless:
                    open_.remove((kernel, out))
            medians = {id(kernel): median(out.samples_s) for kernel, out in kernels if len(out.samples_s) >= FEWEST}
            behind = {key for key, found in medians.items() if found > job.drop_above * min(medians.values())}
            open_ = [one for one in open_ if id(one[0]) not in behind]

    def _check_again(self, bench: Bench, kernel: Kernel, out: Outcome) -> None:
        message, _ = checked(bench, kernel)
        if message:
            out.outcome, out.message, out.samples_s = "wrong", f"after timing: {message}", []


def main(job_fd: int, result_fd: int) -> None:
    """Entry point of the worker process."""
    measurer: Any = Measurer()
    serve(measurer, job_fd, result_fd)
