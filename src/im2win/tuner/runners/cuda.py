"""Worker process that measures on a GPU: it checks a kernel against the float64 reference before it times it (`tuner.runners.check`).

Times are GPU times between two events. The level-2 cache is overwritten before every call, which is close to what a layer finds in a
network. PyTorch computes the reference on the GPU in float64 as a product of unfolded windows, a few images at a time.
"""

from __future__ import annotations

import functools
import math
import time
from typing import Any

import numpy as np

from im2win.common.worker_pool import MachineError, serve
from im2win.numerics.reference import random_tensors, scaled_factor
from im2win.numerics.tolerance import tolerance
from im2win.runtime.cuda import Kernels
from im2win.runtime.libraries import cuda_runtime_library, load_kernel
from im2win.runtime.manifest import ArtefactError
from im2win.runtime.tensors import torch_tensor, torch_values
from im2win.spec.accuracy import Accuracy
from im2win.spec.activations import activation_of, torch_function
from im2win.spec.conv2d import Conv2d
from im2win.spec.dtypes import ELEMENT_TYPES
from im2win.tuner.runners.check import CheckedBench, verify, zone_of
from im2win.tuner.runners.cpu import Candidate, Outcome, RunJob, probed
from im2win.tuner.runners.tensors import Make, special

SPREAD = 32  # standard deviation of random integers
WARM_S = 0.02
FLUSH_BYTES = 256 << 20  # more than any level-2 cache
FLUSHES = 4  # they run long enough for a slow host to issue the timed call meanwhile
REFERENCE_BYTES = 4 << 30  # bytes of unfolded windows at a time


def reference(conv: Conv2d, tensors: dict[str, Any]) -> tuple[Any, float]:
    """The convolution in float64 on the device, and the magnitude that errors are relative to.

    The magnitude is the largest one before the activation, since an activation may cut off large sums but not their rounding errors. For an
    activation that squashes its input it is the largest output, as in `tolerance`.

    Returns:
        The output of `conv.output_shape`, and the magnitude.
    """
    import torch

    x = tensors["data"] if conv.layout == "NCHW" else tensors["data"].permute(0, 3, 1, 2)
    top, left, bottom, right = conv.padding
    w = tensors["filter"].double().reshape(conv.groups, conv.out_channels // conv.groups, -1)
    window_bytes = 8 * conv.in_channels * math.prod(conv.kernel) * math.prod(conv.output_size)
    count = max(1, REFERENCE_BYTES // window_bytes)
    parts = []
    for first in range(0, conv.batch, count):
        padded = torch.nn.functional.pad(x[first : first + count].double(), (left, right, top, bottom))
        windows = torch.nn.functional.unfold(padded, conv.kernel, conv.dilation, 0, conv.stride)
        windows = windows.reshape(len(padded), conv.groups, -1, windows.shape[-1])
        parts.append(torch.matmul(w, windows).reshape(len(padded), conv.out_channels, *conv.output_size))
    y = torch.cat(parts)
    late = ELEMENT_TYPES[conv.dtype].scaled  # whether the bias is added to scaled sums
    if conv.bias and not late:
        y += tensors["bias"].double()[:, None, None]
    if conv.requantised:
        y = y.float().mul_(tensors["scale"][:, None, None])
    if conv.bias and late:
        y += tensors["bias"][:, None, None]
    y = y if conv.layout == "NCHW" else y.permute(0, 2, 3, 1).contiguous()
    if conv.residual:
        y += tensors["residual"].to(y.dtype)
    scale = float(y.abs().max()) or 1.0
    y = torch_function(conv.activation)(y)
    scale = float(y.abs().max()) or 1.0 if activation_of(conv.activation).squashes else scale
    return (_converted(conv, y) if conv.requantised else y), scale


def _converted(conv: Conv2d, y: Any) -> Any:
    """float32 values rounded to the output's dtype, in float64."""
    import torch

    limits = ELEMENT_TYPES[conv.out_dtype].limits
    return (_cast(y, conv.out_dtype) if limits is None else torch.round(y).clamp_(*limits)).double()


def _cast(tensor: Any, dtype: str) -> Any:
    """Values in a floating-point type, saturated where it has a largest value for that."""
    import torch

    largest = ELEMENT_TYPES[dtype].largest
    return (tensor.clamp(-largest, largest) if largest else tensor).to(getattr(torch, dtype))


def device_tensors(conv: Conv2d, seed: int, device: str = "cuda") -> dict[str, Any]:
    """Normally distributed tensors for every argument but the output; for int8 problems, integers with a standard deviation of 32.

    The values of `scale` make the spread of the outputs about the same, so that some outputs exceed the range of int8. float8_e4m3fn
    tensors are those of `numerics.reference.typed_tensors`.
    """
    import torch


    sums = SPREAD * math.sqrt(math.prod(conv.filter_shape[1:]))
    made = {}
    for name, array in random_tensors(conv, seed).items():
        dtype, tensor = getattr(torch, conv.dtypes[name]), torch.from_numpy(array).to(device)
        if ELEMENT_TYPES[conv.dtype].scaled:
            made[name] = _cast(tensor * scaled_factor(conv, name), conv.dtypes[name])
            continue
        if name == "scale":
            tensor = tensor / sums
        elif (limits := ELEMENT_TYPES[conv.dtype].limits) is not None:
            tensor = torch.clamp(torch.round(tensor * SPREAD), -limits[1], limits[1])
        made[name] = tensor.to(dtype)
    return made


class Bench(CheckedBench):
    """The tensors and the reference output of one problem, on the device."""

    device = "cuda"

    def __init__(self, conv: Conv2d, seed: int, make: Make | None = None) -> None:
        """`make`: makes the tensors; None for random ones."""
        import torch

        made = make(conv, seed) if make else {}
        given = {name: torch_tensor(array).to(self.device) for name, array in made.items()}
        super().__init__(conv, given or device_tensors(conv, seed, self.device))
        self.seed = seed
        self.expected, self.scale = reference(conv, self.inputs)
        self.flush = torch.empty(0 if make else FLUSH_BYTES, dtype=torch.uint8, device=self.device)

    @functools.cached_property
    def special(self) -> dict[str, Bench]:
        """Benches of the same problem with `tuner.runners.tensors.special`."""
        return {name: type(self)(self.conv, self.seed, make) for name, make in special(self.conv).items()}

    def _memory(self, dtype: str, size: int) -> Any:
        import torch

        return torch.empty(size + 2 * zone_of(size), dtype=getattr(torch, dtype), device=self.device)

    def wait(self) -> None:
        import torch

        torch.cuda.synchronize()

    def error(self) -> float:
        return float((self.output.double() - self.expected).abs().max()) / self.scale

    def missing(self) -> int:
        import torch

        return int(torch.isnan(self.output.float()).sum())


class Kernel:
    """A loaded candidate with its arguments. `own`: its packed filter and its workspace, between guard zones."""

    def __init__(self, bench: Bench, candidate: Candidate) -> None:
        import torch

        conv, inputs = bench.conv, dict(bench.inputs)
        packed: np.ndarray[Any, Any] = candidate.pack.filter(conv, torch_values(inputs["filter"].cpu()))
        self.own = {"packed filter": bench.guarded(torch_tensor(packed).to(bench.device))}
        inputs["filter"] = self.own["packed filter"].tensor
        self._module = load_kernel(candidate.path)
        self._kernels = Kernels(self._module, bool(candidate.workspace_bytes), bool(ELEMENT_TYPES[conv.dtype].storage))
        data, count = inputs.pop("data"), candidate.workspace_bytes // conv.itemsize
        if count:
            self.own["workspace"] = bench.guarded(torch.empty(count, dtype=data.dtype, device=bench.device), given=False)
        made = self.own["workspace"].tensor if count else None
        self._arguments = [data, made, *inputs.values(), bench.output]

    def __call__(self) -> None:
        self._kernels(*self._arguments)


def checked(bench: Bench, kernel: Kernel, accuracy: Accuracy) -> tuple[str, float | None]:
    """Checks a kernel with a bench's tensors. Returns what is wrong, "" if nothing, and the error, None if it is not a number."""
    return verify(bench, kernel, tolerance(bench.conv, accuracy), kernel.own)


def checked_fully(bench: Bench, candidate: Candidate, kernel: Kernel) -> tuple[str, float | None]:
    """As `checked`, and with the tensors of `Bench.special`; the error is that of random tensors.

    Winograd's form in integers rounds: its tolerance is for random tensors.
    """
    message, error = checked(bench, kernel, candidate.accuracy)
    for name, other in bench.special.items() if candidate.accuracy != "winograd" and not message else ():
        said, worst = checked(other, Kernel(other, candidate), candidate.accuracy)
        if said:
            return f"with {name}: {said}", worst
    return message, error


def sample(bench: Bench, kernel: Any) -> float:
    """Seconds of one call after the level-2 cache was overwritten. The host issues all work before the device reaches the call."""
    import torch

    events: Any = torch.cuda.Event
    start, end = events(enable_timing=True), events(enable_timing=True)
    for _ in range(FLUSHES):
        bench.flush.zero_()
    start.record()
    kernel()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e-3


class Measurer:
    """Handles jobs. It keeps the bench of the last problem, so that each reference is computed once."""

    def __init__(self) -> None:
        self._bench: Bench | None = None

    def _prepared(self, conv: Conv2d, seed: int) -> Bench:
        """The bench of a problem."""
        import torch

        if not torch.cuda.is_available():
            raise MachineError("there is no GPU that PyTorch can use: see if `nvidia-smi` lists it, and if PyTorch is built for CUDA.")
        try:
            cuda_runtime_library()
        except ArtefactError as error:
            raise MachineError(str(error)) from None
        if self._bench is None or (self._bench.conv, self._bench.seed) != (conv, seed):
            self._bench = None
            torch.cuda.empty_cache()
            self._bench = Bench(conv, seed)
        return self._bench

    def __call__(self, job: RunJob) -> list[Outcome]:
        bench = self._prepared(job.conv, job.seed)
        kernels: list[Kernel | None] = []
        outcomes: list[Outcome] = []
        for candidate in job.candidates:
            kernel = Kernel(bench, candidate)
            message, measured = checked_fully(bench, candidate, kernel)
            outcomes.append(Outcome("wrong" if message else "ok", message, measured))
            kernels.append(None if message else kernel)
        verified = [(kernel, out) for kernel, out in zip(kernels, outcomes, strict=True) if kernel is not None]
        self._time(job, bench, verified)
        for tried, out, candidate in zip(kernels, outcomes, job.candidates, strict=True):
            if tried is not None:
                message, _ = checked(bench, tried, candidate.accuracy)
                if message:
                    out.outcome, out.message, out.samples_s = "wrong", f"after timing: {message}", []
                elif job.probe:
                    out.probed = probed(bench.output, job.conv, job.probe).double().cpu().numpy()
        return outcomes

    @staticmethod
    def _time(job: RunJob, bench: Bench, verified: list[tuple[Kernel, Outcome]]) -> None:
        """Samples the kernels in interleaved rounds."""
        for kernel, _ in verified:
            start, calls = time.perf_counter(), 0
            while time.perf_counter() - start < WARM_S or calls < 2:
                sample(bench, kernel)
                calls += 1
        open_ = list(verified)
        while open_:
            for kernel, out in list(open_):
                out.samples_s.append(sample(bench, kernel))
                hopeless = len(out.samples_s) >= 3 and min(out.samples_s) > job.give_up_s
                if len(out.samples_s) >= job.samples or hopeless:
                    open_.remove((kernel, out))


def main(job_fd: int, result_fd: int) -> None:
    """Entry point of the worker process."""
    measurer: Any = Measurer()
    serve(measurer, job_fd, result_fd)
