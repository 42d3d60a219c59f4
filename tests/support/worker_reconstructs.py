"""A worker's `main` whose jobs are names of rules to reconstruct the Winograd pair with."""

from __future__ import annotations

from typing import Any

import winograd_pair
from winograd_pair import Pair

from im2win.codegen.rewritten import reconstruct_module
from im2win.common.worker_pool import serve
from im2win.device.gpu import H200


def handle(rules: tuple[str, ...]) -> Any:
    """(function, kernel, block barriers, warp barriers) of what comes out."""
    made = reconstruct_module(winograd_pair.schedule(Pair(private=True)), H200, rules)
    bodies = made.source.split('extern "C"')[1:]
    names = [body.split("(")[1].split()[-1] for body in bodies]
    counts = [(body.count("__syncthreads();"), body.count("__syncwarp();")) for body in bodies]
    return [(function, name, *count) for function in made.applied for name, count in zip(names, counts, strict=True)]


def main(job_fd: int, result_fd: int) -> None:
    serve(handle, job_fd, result_fd)
