"""Worker process of the peer PyTorch Inductor: it compiles one layer at a time, checks it, and takes samples when it is asked to.

A process of its own, because compilation loads compilers and starts processes, and a Triton kernel that fails may leave the GPU unusable
for its process. The samples of both processes are taken in turn; the process that waits leaves the GPU to the other one.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from im2win.bench.cuda_harness import PEER_TOLERANCE, measured_error, set_up_peers
from im2win.bench.peers import inductor
from im2win.bench.peers.cuda import call_bytes
from im2win.common.messages import brief
from im2win.common.worker_pool import serve
from im2win.spec.accuracy import Accuracy
from im2win.spec.conv2d import Conv2d
from im2win.tuner.runners.cuda import Bench, sample


@dataclass(frozen=True)
class Compile:
    """Compile a layer, on the tensors of this seed, in this layout."""

    conv: Conv2d
    seed: int
    layout: str
    accuracy: Accuracy


@dataclass(frozen=True)
class Compiled:
    """A layer that is ready: its error against the reference, the bytes that a call takes beside its output, and the kernels it runs."""

    error: float
    extra_bytes: int
    kernels: str


@dataclass(frozen=True)
class Sample:
    """Time a call of the layer that was compiled last."""


class Handler:
    """Answers jobs: `Compiled` or the reason of a failure, and seconds."""

    def __init__(self) -> None:
        self._bench: Bench | None = None
        self._call: Callable[[], Any] | None = None

    def __call__(self, job: Compile | Sample) -> Compiled | str | float:
        if isinstance(job, Sample):
            assert self._bench is not None and self._call is not None, "sampled before anything was compiled"
            return sample(self._bench, self._call)
        try:
            return self._compiled(job)
        except Exception as error:
            return brief(error, 300)

    def _compiled(self, job: Compile) -> Compiled:
        import torch
        from torch._inductor.utils import run_and_get_code

        self._bench = self._call = None
        torch._dynamo.reset()
        gc.collect()
        torch.cuda.empty_cache()
        set_up_peers(job.accuracy)
        self._bench = bench = Bench(job.conv, job.seed)
        call = inductor.compiled(job.conv, bench.inputs, job.layout)
        _, codes = run_and_get_code(call)
        held, y = call_bytes(call)
        error = measured_error(bench, y if job.conv.layout == "NCHW" else y.permute(0, 2, 3, 1), PEER_TOLERANCE)
        self._call = call
        return Compiled(error, max(0, held - y.numel() * y.element_size()), inductor.chosen(codes))


def main(job_fd: int, result_fd: int) -> None:
    """Entry point of the worker process."""
    serve(Handler(), job_fd, result_fd)
