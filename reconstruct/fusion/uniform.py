"""Reduction of a pair of kernels to a few blocks along x, if all blocks along x do the same work on pieces of the tensor.

Enumerating a pair takes memory in proportion to its tensor, which may be larger than the host's memory. The blocks are uniform if every
address is a sum of ``blockIdx.x * piece`` and terms without ``blockIdx.x``, and no condition depends on ``blockIdx.x``. A trace with
unknown blockIdx proves this (`Pointer.block_terms`). The step between blocks must equal the size of a piece.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from im2win.reconstruct.fusion.pairs import Pair
from im2win.reconstruct.parse.expressions import parse, size_of
from im2win.reconstruct.parse.unit import Kernel
from im2win.reconstruct.trace.events import Access, NotShown
from im2win.reconstruct.trace.trace import Trace
from im2win.reconstruct.trace.values import evaluate

FEW = 3


def few(found: Pair) -> Pair:
    """The pair with `FEW` blocks along x, if they represent all blocks; otherwise the pair itself."""
    extents = {kernel.launch.grid[0] for kernel in (found.producer, found.consumer)}
    blocks = min(extents)
    if len(extents) > 1 or blocks <= FEW or found.elements % blocks:
        return found
    piece = found.elements // blocks
    for kernel, parameter in ((found.producer, found.written), (found.consumer, found.read)):
        if _step(kernel, parameter.name) != piece:
            return found
    return replace(found, producer=_fewer(found.producer), consumer=_fewer(found.consumer), elements=FEW * piece)


def _fewer(kernel: Kernel) -> Kernel:
    [launch] = kernel.launches
    return replace(kernel, launches=(replace(launch, grid=(FEW, *launch.grid[1:])),))


def _step(kernel: Kernel, name: str) -> int | None:
    """Elements between the accesses of neighbouring blocks along x; None if the blocks are not shown to be uniform."""
    try:
        trace = Trace(kernel, {name})
        if not all(event.certain for event in trace if isinstance(event, Access)):
            return None
    except NotShown:
        return None
    element = next(parameter.element for parameter in kernel.parameters if parameter.name == name)
    return _linear(kernel, trace.block_terms.get(name, ""), element)


def _linear(kernel: Kernel, block_terms: str, element: str) -> int | None:
    """The factor of blockIdx.x in the block terms, in elements; None if the terms are not linear in blockIdx.x for all blocks."""
    x, y, z = (np.arange(extent) for extent in kernel.launch.grid)
    scope = {"blockIdx.x": x[:, None, None], "blockIdx.y": y[:, None], "blockIdx.z": z}
    value, size = evaluate(parse(block_terms), scope) if block_terms else None, size_of(element)
    if value is None or not size:
        return None
    value = np.broadcast_to(value, kernel.launch.grid)
    step = int(value[1, 0, 0] - value[0, 0, 0])
    same = np.array_equal(value, value[:1] + step * x[:, None, None])
    return step // size if same and step % size == 0 else None
