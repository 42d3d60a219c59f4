"""Fingerprints of emitted kernels: the kernel that today's code generates for a layer, an algorithm and a tile.

A record keeps the fingerprint of the kernel that was timed. It stays valid as long as the same candidate emits the same kernel, even if the
code that generates it is moved, renamed or rewritten. On a CPU the fingerprint covers the lowered program that LLVM compiles, which is the
same for every CPU. On a GPU it covers the canonical form of the CUDA source and the launches.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping

from im2win.codegen import cuda, llvm
from im2win.common.messages import brief
from im2win.device.gpu import H200, KNOWN, Gpu
from im2win.records.record import Record, TileValue, parse_key
from im2win.registry import cuda_lowering
from im2win.registry.backends import backend_for
from im2win.registry.schedules import schedule_of
from im2win.spec.conv2d import Conv2d


class EmissionError(ValueError):
    """A candidate that emits no kernel. The message says why."""


def emitted(conv: Conv2d, algorithm: str, tile: Mapping[str, TileValue], target: str, gpu: Gpu = H200) -> str:
    """The fingerprint of the kernel that a candidate emits. The legality of the tile is not checked.

    Args:
        algorithm: with its schedule, such as "direct/tiled".
        target: "cpu" or "cuda".
        gpu: the GPU to generate for; some kernels depend on its number of multiprocessors.

    Raises:
        EmissionError: unknown algorithm, no schedule for the target, or a tile for which no kernel can be generated.
    """
    try:
        schedule_of(algorithm)
    except ValueError as error:
        raise EmissionError(str(error).rstrip(".")) from error
    try:
        return _of_cpu(conv, algorithm, tile) if target == "cpu" else _of_cuda(conv, algorithm, tile, gpu)
    except Exception as error:  # a tile recorded by other code may fail anywhere
        raise EmissionError(f"its tile makes no kernel any more: {brief(error)}") from error


def _of_cpu(conv: Conv2d, algorithm: str, values: Mapping[str, TileValue]) -> str:
    row = schedule_of(algorithm)
    return llvm.fingerprint(row.scheduler.module(conv, row, row.scheduler.tile(values)))


def _of_cuda(conv: Conv2d, algorithm: str, values: Mapping[str, TileValue], gpu: Gpu) -> str:
    row = schedule_of(algorithm)
    if row.cuda is None:
        raise EmissionError(f"{algorithm} has no CUDA schedule")
    tile = backend_for(gpu).tile(row, values)
    module = cuda_lowering.emit(conv, row, tile, gpu)
    return cuda.fingerprint(cuda.generate_source(module, gpu))


@functools.lru_cache(maxsize=1 << 14)
def _cached(key: str, algorithm: str, tile: str, target: str, gpu: Gpu) -> str | EmissionError:
    try:
        return emitted(parse_key(key), algorithm, json.loads(tile), target, gpu)
    except EmissionError as error:
        return error


def emitted_now(record: Record) -> str:
    """The fingerprint of the kernel that a record's candidate emits today. The result is cached.

    Raises:
        EmissionError: as `emitted`.
    """
    gpu = KNOWN.get(record.device, H200)
    found = _cached(record.conv, record.method, json.dumps(record.tile), record.target, gpu)
    if isinstance(found, EmissionError):
        raise found
    return found
