"""Any definition of `compute` as one product of matrices, which is what all of them are to a GPU.

    sums[block, channel, p] = sum over k of filter[block, k, channel] * windows[k, p]        p over (image, row, column), k over the taps

The definition stays as it is: TVM moves each operand's indices into a stage of its own and fuses the loops. The algorithms differ in what
the stage of windows reads: the input, padded by conditions, or a tensor of windows in global memory that a kernel before has stored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tvm import te
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import SBlockRV
from tvm.tirx import IndexMap

from im2win.compute import nest
from im2win.spec.conv2d import Conv2d

FILTER, BIAS, SCALE, RESIDUAL = "filter", "bias", "scale", "residual"


@dataclass(frozen=True)
class Stage:
    """How a schedule treats an algorithm's transform.

    name: of its block in the definition, where the problem has one. stored: whether a kernel of its own stores it in global memory;
        otherwise each step of the sum copies its elements from the input to shared memory.
    order: of a sum in which the elements of a stored window are neighbours in memory; "" where there is none.
    apart: elements between the same element of neighbouring windows in the stored tensor; None: they are neighbours.
    """

    name: str
    stored: bool = False
    order: str = ""
    apart: Callable[[Conv2d], int] | None = None


@dataclass(frozen=True)
class Gemm:
    """A definition in the form of a product of matrices.

    sch: the schedule. product, windows, filters, out: its blocks; `windows` and `filters` copy a step's operands.
    stage: the block that stores a tensor of windows in global memory; None if there is none.
    """

    sch: Schedule
    product: SBlockRV
    windows: SBlockRV
    filters: SBlockRV
    out: SBlockRV
    stage: SBlockRV | None


def gemm(conv: Conv2d, tensors: Sequence[te.Tensor], stage: Stage, blocks: tuple[int, int, int]) -> Gemm:
    """Brings a definition into the form of a product, outputs and sums padded to whole blocks and steps.

    Args:
        tensors: of the kernel, from a definition of `compute`.
        stage: the algorithm's transform.
        blocks: channels and outputs of a thread block, and elements of the sum in a step.
    """
    block_m, block_n, block_k = blocks
    sch = Schedule(te.create_prim_func(list(tensors)))
    product, out = sch.get_sblock(nest.CONV), sch.get_sblock(nest.OUT)
    transform = _block(sch, stage.name)
    windows = sch.reindex(product, ("read", 0))
    if transform is not None and not stage.stored:
        sch.compute_inline(transform)
        transform = None
    for name in (nest.ROWS, *([nest.TRANSPOSED] if conv.residual else [])):
        sch.compute_inline(sch.get_sblock(name))
    outputs, depth = _fuse_product(sch, product, windows)
    _fuse_out(sch, conv, out, block_m)
    windows, filters = _padded(sch, product, windows, outputs % block_n > 0 or depth % block_k > 0, (block_n, block_k))
    # one row for each channel: TVM does not see that (block * m + channel) // m is the block, and would keep sums of whole thread blocks
    sch.transform_layout(product, ("write", 0), lambda jo, ji, p: (jo * block_m + ji, p))
    return Gemm(sch, product, windows, filters, out, transform)


def gemm_in_lines(conv: Conv2d, tensors: Sequence[te.Tensor], stage: Stage, blocks: tuple[int, int, int]) -> Gemm:
    """As `gemm`, with both operands in lines along the sum: the stages hold filter[block, channel, k] and windows[p, k].

    Args:
        tensors: of the kernel, from a definition of `compute`, with filters packed in lines.
    """
    sch = Schedule(te.create_prim_func(list(tensors)))
    product, out = sch.get_sblock(nest.CONV), sch.get_sblock(nest.OUT)
    transform = _block(sch, stage.name)
    windows, filters = sch.reindex(product, ("read", 0)), sch.reindex(product, ("read", 1))
    if transform is not None and not stage.stored:
        sch.compute_inline(transform)
        transform = None
    for name in (nest.ROWS, *([nest.TRANSPOSED] if conv.residual else [])):
        sch.compute_inline(sch.get_sblock(name))
    _fuse_product(sch, product, windows, filters)
    block_m, block_n, block_k = blocks
    _fuse_out(sch, conv, out, block_m)
    outputs, depth = (int(sch.get(loop).extent) for loop in sch.get_loops(product)[-2:])
    if outputs % block_n or depth % block_k:
        windows, filters = _padded_lines(sch, product, (windows, filters), (block_n, block_k))
    sch.transform_layout(product, ("write", 0), lambda jo, ji, p: (jo * block_m + ji, p))
    return Gemm(sch, product, windows, filters, out, transform)


def _padded_lines(
    sch: Schedule, product: SBlockRV, operands: tuple[SBlockRV, SBlockRV], blocks: tuple[int, int]
) -> tuple[SBlockRV, SBlockRV]:
    """Pads outputs and sums to whole blocks and steps, with zeros in the stages that copy operands. Returns the stages."""
    names = [str(sch.get(one).writes[0].source.name) for one in operands]
    sch.pad_einsum(product, [1, 1, *blocks])
    made = {str(sch.get(one).writes[0].source.name): one for one in sch.get_producers(product)}
    found = []
    for name in names:
        padded = made.get(f"{name}_pad")
        if padded is not None:
            for before in sch.get_producers(padded):
                if str(sch.get(before).writes[0].source.name) == name:
                    sch.compute_inline(before)
        found.append(made[name] if padded is None else padded)
    for behind in sch.get_consumers(product):
        if sch.get(behind).writes[0].source.name.startswith(nest.CONV):
            sch.compute_inline(behind)
    return found[0], found[1]


def _block(sch: Schedule, name: str) -> SBlockRV | None:
    """The block of that name; None where the definition has none."""
    names = {str(child.name_hint) for child in map(sch.get, sch.get_child_blocks(sch.get_sblock("root")))}
    return sch.get_sblock(name) if name in names else None


def _fused(axes: Sequence[Any], extents: Sequence[int]) -> Any:
    """One index for several, the last of which is innermost."""
    index = axes[0]
    for axis, extent in zip(axes[1:], extents[1:], strict=True):
        index = index * extent + axis
    return index


def _map(count: int, function: Callable[..., tuple[Any, ...]]) -> IndexMap:
    return IndexMap.from_func(function, ndim=count, index_dtype="int32")


def _fuse_product(sch: Schedule, product: SBlockRV, windows: SBlockRV, filters: SBlockRV | None = None) -> tuple[int, int]:
    """Fuses the loops of the product and of its windows. Returns the number of outputs for each channel, and the depth of a sum.

    Args:
        filters: their stage, where both operands are in lines along the sum.
    """
    extents = [int(sch.get(loop).extent) for loop in sch.get_loops(product)]
    used = _axes_of(sch, product, str(sch.get(windows).writes[0].source.name))
    channels = [] if filters is None else _axes_of(sch, product, str(sch.get(filters).writes[0].source.name))

    def outputs(axes: Sequence[Any]) -> Any:
        return _fused((axes[0], *axes[2:4]), (extents[0], *extents[2:4]))

    def depth(axes: Sequence[Any]) -> Any:
        return _fused(axes[5:], extents[5:])

    def flat(*given: Any) -> tuple[Any, ...]:
        """Block of filters where windows depend on it, as those of several groups do; step of the sum; output."""
        axes = [given[used.index(place)] if place in used else 0 for place in range(len(extents))]
        both = (depth(axes), outputs(axes)) if filters is None else (outputs(axes), depth(axes))
        return *([axes[1]] if 1 in used else []), *both

    def lines(*given: Any) -> tuple[Any, ...]:
        """Block of filters, channel, step of the sum."""
        axes = [given[channels.index(place)] if place in channels else 0 for place in range(len(extents))]
        return axes[1], axes[4], depth(axes)

    sch.transform_block_layout(product, _map(len(extents), lambda *axes: (axes[1], axes[4], outputs(axes), depth(axes))))
    sch.transform_layout(product, ("write", 0), lambda n, jo, m, x, ji: (jo, ji, outputs((n, jo, m, x))))
    sch.transform_layout(windows, ("write", 0), _map(len(used), flat))
    sch.transform_block_layout(windows, _map(len(used), flat))
    if filters is not None:
        sch.transform_layout(filters, ("write", 0), _map(len(channels), lines))
        sch.transform_block_layout(filters, _map(len(channels), lines))
    return extents[0] * extents[2] * extents[3], math.prod(extents[5:])


def _axes_of(sch: Schedule, product: SBlockRV, name: str) -> list[int]:
    """Which axes of the product the axes of an operand are, in their order; those of length 1 may be missing."""
    block = sch.get(product)
    axes = [axis.var for axis in block.iter_vars]
    region = next(region for region in block.reads if region.source.name == name)
    return [next(place for place, axis in enumerate(axes) if axis.same_as(bounds.min)) for bounds in region.region]


def _fuse_out(sch: Schedule, conv: Conv2d, out: SBlockRV, block_m: int) -> None:
    """Fuses the output's loops to (block of channels, channel, output). The bias, which is packed by blocks on CPUs, becomes one row."""
    height, width = conv.output_size

    def fused(n: Any, j: Any, m: Any, x: Any) -> tuple[Any, ...]:
        return j // block_m, j % block_m, (n * height + m) * width + x

    last = conv.layout == "NHWC"
    sch.transform_block_layout(out, (lambda n, m, x, j: fused(n, j, m, x)) if last else (lambda n, j, m, x: fused(n, j, m, x)))
    for place, region in enumerate(sch.get(out).reads):
        if region.source.name in (BIAS, SCALE):
            sch.transform_layout(out, ("read", place), lambda jo, ji: jo * block_m + ji)


def _padded(
    sch: Schedule, product: SBlockRV, windows: SBlockRV, padded: bool, blocks: tuple[int, int]
) -> tuple[SBlockRV, SBlockRV]:
    """Pads outputs and sums to whole blocks and steps, with zeros in the stages that copy operands. Returns the stages."""
    if padded:
        sch.pad_einsum(product, [1, 1, *blocks])
        made = {sch.get(one).writes[0].source.name: one for one in sch.get_producers(product)}
        windows = next(block for name, block in made.items() if not name.startswith(FILTER))
        for before in sch.get_producers(windows):
            if sch.get(before).reads and sch.get(before).writes[0].source.name.endswith("_reindex"):
                sch.compute_inline(before)
        for behind in sch.get_consumers(product):
            if sch.get(behind).writes[0].source.name.startswith(nest.CONV):
                sch.compute_inline(behind)
        if f"{FILTER}_pad" in made:
            return windows, made[f"{FILTER}_pad"]
    place = next(i for i, region in enumerate(sch.get(product).reads) if region.source.name == FILTER)
    return windows, sch.cache_read(product, place, "shared")
