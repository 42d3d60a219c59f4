"""Two kernels whose blocks along x all do the same, each with its own piece of the tensor between them: a few blocks stand for all.

What is enumerated of a pair grows with its tensor, which may be larger than memory. If of every place that a kernel touches in it the part
that depends on the block is that of ``blockIdx.x * piece`` and of other axes, and nothing else depends on ``blockIdx.x``, not even whether
the place is touched, then blocks differ by where their pieces begin. That is shown for each kernel with no block given (`Trace` keeps terms
of the block apart, and refuses what is no such sum); then pieces are compared for all blocks.
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
    """The pair with so few blocks along x that they stand for all; the pair itself where that is not shown."""
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
    """Elements by which a block's places in a tensor lie behind those of the block before it along x; None if that is not shown."""
    try:
        trace = Trace(kernel, {name})
        if not all(event.certain for event in trace if isinstance(event, Access)):
            return None
    except NotShown:
        return None
    element = next(parameter.element for parameter in kernel.parameters if parameter.name == name)
    return _linear(kernel, trace.block_terms.get(name, ""), element)


def _linear(kernel: Kernel, block_terms: str, element: str) -> int | None:
    """The factor of blockIdx.x in a sum of terms of the block, in elements, if for every block it is only that."""
    x, y, z = (np.arange(extent) for extent in kernel.launch.grid)
    scope = {"blockIdx.x": x[:, None, None], "blockIdx.y": y[:, None], "blockIdx.z": z}
    value, size = evaluate(parse(block_terms), scope) if block_terms else None, size_of(element)
    if value is None or not size:
        return None
    value = np.broadcast_to(value, kernel.launch.grid)
    step = int(value[1, 0, 0] - value[0, 0, 0])
    same = np.array_equal(value, value[:1] + step * x[:, None, None])
    return step // size if same and step % size == 0 else None
