"""Partial kernel fusion through shared memory (PKF-Shmem): one kernel replaces a producer and a consumer kernel.

Every block of the fused kernel first executes the producer blocks whose results it reads, one after the other, and stores their results in
shared memory. It then executes its consumer block. `tiles` enumerates which blocks are needed; `smem_index` rewrites and verifies indices.

Source: the PKF paper, see `im2win.reconstruct`.
"""

from __future__ import annotations

import math
from dataclasses import replace

from im2win.emulator import Launch
from im2win.reconstruct.fusion.pairs import ALIGNMENT, STATIC_LIMIT, Merged, Pair, fused_block, merged_parameters, pair, rebased, replaced
from im2win.reconstruct.fusion.smem_index import indexed_in_smem
from im2win.reconstruct.fusion.splice import as_part, indented, linear_thread
from im2win.reconstruct.fusion.tiles import NotFused, Tiling
from im2win.reconstruct.fusion.uniform import few
from im2win.reconstruct.parse.unit import AXES, Unit
from im2win.reconstruct.text_rules import Match

RULE = "pkf-shmem"


def fuse(unit: Unit, limit: int, producer: str | None = None, consumer: str | None = None) -> tuple[Unit, list[Match]]:
    """Fuses two kernels; the tensor between them stays in shared memory.

    Args:
        unit: with launches and workspaces.
        limit: bytes of shared memory that a block may take.
        producer, consumer: names of the kernels; None for those of the first pair.

    Returns:
        The new unit and the change.

    Raises:
        NotFused: there is no such pair, or its blocks, indices or sizes do not permit fusion.
    """
    found = pair(unit, producer, consumer)
    block, merged = fused_block(found), merged_parameters(found, {found.tensor})
    small = few(found)
    tiles = small.tiling()
    try:
        parts = _bodies(small, tiles)
    except NotFused:
        tiles = replace(tiles, layout=tiles.layout.spread())
        parts = _bodies(small, tiles)
    size, dynamic = _bytes(found, tiles, limit)
    name = f"{found.consumer.name}_{RULE.replace('-', '_')}"
    made = _producer_part(found, tiles, block, merged, rebased(found.producer, parts[0], size))
    used = as_part(found.consumer, rebased(found.consumer, parts[1], size), "consumer", block, {}, None)
    element = found.read.element
    head = f'extern "C" __global__ void __launch_bounds__({math.prod(block)}) {name}({", ".join(row for _, row in merged.parameters)}) {{\n'
    whole = f"{{\n{indented(made)}}}\n__syncthreads();\n{{\n{indented(used)}}}\n"
    body = (
        f"extern __shared__ __align__({ALIGNMENT}) unsigned char fused_shared[];\n"
        f"{element}* {found.tensor}_tile = ({element}*)(fused_shared);\n"
        f"int thread = {linear_thread(block)};\n"
    )
    body += (f"int {found.tensor}_origin = {_origin(tiles)};\n" if f"{found.tensor}_origin" in whole else "") + whole
    tensors = tuple(tensor for tensor, _ in merged.parameters)
    launch = Launch(name, tensors, found.consumer.launch.grid, block, dynamic)
    why = (
        f"every block of {found.consumer.name} reads of {found.tensor} what {math.prod(tiles.counts)} block(s) of "
        f"{found.producer.name} write; {size} bytes hold it"
    )
    launches = {found.producer.name: [], found.consumer.name: [launch]}
    result, matches = replaced(unit, found, launches, head + indented(body) + "}\n", RULE, why)
    workspace = {tensor: shape for tensor, shape in unit.workspace.items() if tensor != found.tensor}
    return replace(result, workspace=workspace), matches


def _bodies(found: Pair, tiles: Tiling) -> list[str]:
    """The bodies of both kernels, indexing the tile in shared memory."""
    both = (found.producer, found.written.name), (found.consumer, found.read.name)
    return [indexed_in_smem(found, tiles, kernel, name) for kernel, name in both]


def _bytes(found: Pair, tiles: Tiling, limit: int) -> tuple[int, int]:
    """Bytes of the tile, and bytes of dynamic shared memory of the launch.

    A launch with more than 48 KiB in all needs an opt-in, which runtimes make only if the dynamic part has at least 48 KiB. A smaller
    dynamic part is padded.

    Raises:
        NotFused: the kernels need more shared memory than there is.
    """
    size = -(-tiles.layout.size * tiles.element // ALIGNMENT) * ALIGNMENT
    dynamic = size + max(found.producer.launch.dynamic_bytes, found.consumer.launch.dynamic_bytes)
    static = found.producer.static_bytes + found.consumer.static_bytes
    if static + dynamic > STATIC_LIMIT:
        dynamic = max(dynamic, STATIC_LIMIT)
    total = dynamic + static
    if static > STATIC_LIMIT:
        raise NotFused(f"both kernels declare {static} bytes of shared memory; a kernel may declare {STATIC_LIMIT}")
    if total > limit:
        raise NotFused(f"{found.tensor} takes {size} bytes of a block's shared memory, with the rest {total}; there are {limit}")
    return size, dynamic


def _origin(tiles: Tiling) -> str:
    """The first element that a block needs, as C source."""
    words = [str(tiles.origin[0])] if tiles.origin[0] else []
    for along, step in zip(tiles.along, tiles.origin[1:], strict=True):
        if along.axis:
            words.append(f"({along.text(f'((int)blockIdx.{along.axis})')} * {step})")
    return f"({' + '.join(words)})" if len(words) > 1 else (words or ["0"])[0]


def _producer_part(found: Pair, tiles: Tiling, block: tuple[int, int, int], merged: Merged, body: str) -> str:
    """C source that executes the producer blocks that a block needs, one after the other; `body` is that of one producer block."""
    kernel = found.producer
    names = {before: after for before, after in merged.producer.items() if before != after and before != found.written.name}
    before, after, blocks = "", "", dict[str, str]()
    depth = 0
    for axis, along, extent in zip(AXES, tiles.along, kernel.launch.grid, strict=True):
        tile, first = f"tile_{axis}", along.text(f"((int)blockIdx.{along.axis})")
        if along.count == 1:
            blocks[axis] = first
            continue
        before += indented(f"for (int {tile} = 0; {tile} < {along.count}; ++{tile}) {{\n", 2 * depth)
        depth += 1
        blocks[axis] = tile if first == "0" else f"({first} + {tile})"
        if (along.axis and along.count > along.step) or extent % along.count:
            before += indented(f"if ({blocks[axis]} < {extent}) {{\n", 2 * depth)
            depth += 1
    inner = as_part(kernel, body, "producer", block, names, blocks)
    if depth and kernel.shared:
        inner += "__syncthreads();\n"  # the next producer block overwrites the shared memory that this one reads
    for level in reversed(range(depth)):
        after += "  " * level + "}\n"
    return before + indented(inner, 2 * depth) + after
