"""Indices into a tensor, rewritten to its tile in shared memory and verified address by address."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from im2win.reconstruct.fusion.pairs import Pair
from im2win.reconstruct.fusion.tiles import Ints, NotFused, Tiling
from im2win.reconstruct.parse.expressions import ExpressionError, parse
from im2win.reconstruct.parse.statements import blanked, closing
from im2win.reconstruct.parse.unit import AXES, Kernel
from im2win.reconstruct.trace.events import Access, NotShown
from im2win.reconstruct.trace.trace import Trace, grid_blocks


@dataclass(frozen=True)
class _Site:
    """An index expression of a tensor in the source: offset of the tensor's name, span of the index, offset of the closing bracket."""

    start: int
    index: tuple[int, int]
    end: int


def _sites(kernel: Kernel, name: str) -> list[_Site]:
    """All uses of a parameter, each of the form `name[index]` or `(name + index)`.

    Raises:
        NotFused: the parameter is used in another way.
    """
    text, found = blanked(kernel.source), []
    for match in re.finditer(rf"\b{name}\b", text[: kernel.inner[1]]):
        if match.start() < kernel.inner[0]:
            continue
        after = re.compile(r"\s*(\[|\+ )").match(text, match.end())
        if after is None:
            raise NotFused(f"line {kernel.line(match.start())}: {name} is used other than by an index")
        if after[1] == "[":
            last = closing(text, after.end() - 1)
        else:
            opened = text.rindex("(", 0, match.start())
            if text[opened + 1 : match.start()].strip():
                raise NotFused(f"line {kernel.line(match.start())}: {name} is used other than by an index")
            last = closing(text, opened)
        found.append(_Site(match.start(), (after.end(), last), last))
    return found


def indexed_in_smem(found: Pair, tiles: Tiling, kernel: Kernel, name: str) -> str:
    """The body of a kernel with all indices of the tensor rewritten to its tile in shared memory.

    An index gets packed factors (`Layout.rescaled`) if that is right for every thread, iteration and block. Otherwise the code computes it
    digit by digit (`Layout.text`).

    Raises:
        NotFused: neither form is right for some index.
    """
    sites = _sites(kernel, name)
    makes = kernel is found.producer
    single = {f"blockIdx.{axis}" for axis, along in zip(AXES, tiles.along, strict=True) if along.count == 1}
    origin = single if makes else {f"blockIdx.{axis}" for axis in AXES}
    texts = []
    for site in sites:
        index = kernel.source[slice(*site.index)]
        place = f"(({index}) - {found.tensor}_origin)"
        try:
            short = tiles.layout.rescaled(parse(index), origin)
            short = re.sub(r"\(\(int\)blockIdx\.([xyz])\)", r"tile_\1", short) if makes else short
        except ExpressionError:
            short = tiles.layout.text(place)
        texts.append([short, tiles.layout.text(place)])
    choice = [0] * len(sites)
    for _ in range(2):
        body = _written(kernel, sites, [forms[i] for forms, i in zip(texts, choice, strict=True)], f"{found.tensor}_tile")
        wrong = _mismatches(found, tiles, kernel, name, body)
        if not wrong:
            return body
        choice = [1 if any(low <= site.start < high for low, high in wrong) else i for site, i in zip(sites, choice, strict=True)]
    line = kernel.line(min(wrong)[0])
    raise NotFused(f"line {line}: an index of {found.tensor} does not lie where the part in shared memory has it")


def _written(kernel: Kernel, sites: list[_Site], texts: list[str], name: str) -> str:
    source, end = kernel.source, kernel.inner[1]
    body = source[:end]
    for site, text in sorted(zip(sites, texts, strict=True), key=lambda pair: -pair[0].start):
        opens = " + " if body[site.end] == ")" else "["
        body = body[: site.start] + name + opens + text + body[site.end :]
    return body[kernel.inner[0] :]


def _mismatches(found: Pair, tiles: Tiling, kernel: Kernel, name: str, body: str) -> set[tuple[int, int]]:
    """Spans of the statements in the kernel's source whose new indices do not address the elements of the old ones."""
    tile, wrong = f"{found.tensor}_tile", set[tuple[int, int]]()
    changed = kernel.source[: kernel.inner[0]] + body + kernel.source[kernel.inner[1] :]
    inner = kernel.inner[0], kernel.inner[0] + len(body)
    parameters = tuple(replace(parameter, name=tile) if parameter.name == name else parameter for parameter in kernel.parameters)
    rewritten = Kernel(kernel.name, parameters, kernel.bounds, (kernel.span[0], inner[1] + 1), inner, changed, kernel.launches)
    for _, blocks in grid_blocks(kernel):
        old = [event for event in Trace(kernel, {name}, blocks) if isinstance(event, Access)]
        for names, start in _origins(found, tiles, kernel, blocks):
            try:
                traced = Trace(rewritten, {tile}, blocks, {**names, f"{found.tensor}_origin": start})
                new = [event for event in traced if isinstance(event, Access)]
            except NotShown:
                return {kernel.inner}
            if [event.width for event in old] != [event.width for event in new]:
                raise NotFused(f"the accesses of {found.tensor} in {kernel.name} are not those before")
            wrong |= {before.span for before, after in zip(old, new, strict=True) if not _same(before, after, start, tiles)}
    return wrong


def _origins(found: Pair, tiles: Tiling, kernel: Kernel, blocks: tuple[Ints, Ints, Ints]) -> Iterator[tuple[dict[str, Ints], Ints]]:
    """Values of the tile variables, and the first element of the tile: one case for a consumer, one for each position of a producer."""
    if kernel is not found.producer:
        yield {}, tiles.start(blocks)
        return
    first, *steps = tiles.origin
    counts = [along.count if along.axis else 1 for along in tiles.along]
    for number in range(math.prod(counts)):
        tied = (number % counts[0], number // counts[0] % counts[1], number // (counts[0] * counts[1]))
        tile = [np.full_like(block, i) if along.axis else block for along, block, i in zip(tiles.along, blocks, tied, strict=True)]
        start = sum(((block - i) * step for block, i, step in zip(blocks, tile, steps, strict=True)), np.full_like(blocks[0], first))
        yield {f"tile_{axis}": index for axis, index in zip(AXES, tile, strict=True)}, start


def _same(before: Access, after: Access, start: Ints, tiles: Tiling) -> bool:
    """Whether an access reaches the packed offsets of all its elements, with the alignment that its width needs."""
    mask = np.True_ if before.mask is None else before.mask
    first, origin, new, mask = np.broadcast_arrays(before.start // tiles.element, start.reshape(-1, 1), after.start // tiles.element, mask)
    first, new, lanes = first[mask], new[mask], before.width // tiles.element
    place = first - origin[mask]
    last = tiles.layout.packed(place + lanes - 1) == new + lanes - 1
    aligned = new % np.gcd(first, lanes) == 0
    return bool(np.all(place >= 0) and np.all(tiles.layout.packed(place) == new) and np.all(last) and np.all(aligned))
