"""Partial kernel fusion through shared memory (PKF-Shmem): a kernel that writes a tensor and the one that reads it, as one kernel.

The tensor stays in shared memory: every block makes what it reads itself, block by block of the producer, and then goes on as a block of
the consumer. Which block needs which is enumerated (`tiles`), never guessed, and the new indices are compared with the old ones address by
address. What both kinds of fusion share is here, too.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from im2win.emulator import Launch
from im2win.reconstruct.expressions import ExpressionError, parse
from im2win.reconstruct.rules import Match
from im2win.reconstruct.splice import AXES, as_part, indented, linear_thread
from im2win.reconstruct.statements import blanked, closing, every
from im2win.reconstruct.tiles import Ints, NotFused, Tiling, grid_blocks, tiling
from im2win.reconstruct.trace import Access, NotShown, Trace, written
from im2win.reconstruct.unit import Kernel, Parameter, Unit

RULE = "pkf-shmem"
ALIGNMENT = 128  # bytes, of what is put into dynamic shared memory


@dataclass(frozen=True)
class Pair:
    """Two launches of a unit and the tensor between them: its name there, the parameters it is in each, and its elements."""

    producer: Kernel
    consumer: Kernel
    tensor: str
    written: Parameter
    read: Parameter
    elements: int

    def tiling(self) -> Tiling:
        """How their blocks lie over each other."""
        try:
            return tiling(self.producer, self.written.name, self.consumer, self.read.name, self.elements)
        except NotShown as error:
            raise NotFused(f"what is read and written of {self.tensor} is not known: {error}") from None


def pairs(unit: Unit) -> Iterator[Pair]:
    """Launches that can be fused as far as their tensors go, in the order of execution.

    The tensor between them is a workspace, one launch writes it, one reads it; between the two nothing touches what the first reads.
    """
    for place, launch in enumerate(unit.launches):
        for tensor in unit.workspace.keys() & set(launch.arguments):
            others = [i for i, other in enumerate(unit.launches) if i != place and tensor in other.arguments]
            if len(others) != 1 or others[0] < place:
                continue
            producer, consumer = (unit.kernel(unit.launches[i].kernel) for i in (place, others[0]))
            between = unit.launches[place + 1 : others[0]]
            if _outputs(producer) == {tensor} and tensor not in _outputs(consumer) and not _disturbed(unit, producer, between):
                first, second = (_parameter(kernel, tensor) for kernel in (producer, consumer))
                yield Pair(producer, consumer, tensor, first, second, math.prod(unit.workspace[tensor][0]))


def _outputs(kernel: Kernel) -> set[str]:
    """Tensors that a kernel may write."""
    names = written(kernel)
    return {tensor for tensor, parameter in zip(kernel.launch.arguments, kernel.parameters, strict=True) if parameter.name in names}


def _disturbed(unit: Unit, producer: Kernel, between: tuple[Launch, ...]) -> bool:
    return any(_outputs(unit.kernel(launch.kernel)) & set(producer.launch.arguments) for launch in between)


def _parameter(kernel: Kernel, tensor: str) -> Parameter:
    return kernel.parameters[kernel.launch.arguments.index(tensor)]


def pair(unit: Unit, producer: str | None = None, consumer: str | None = None) -> Pair:
    """The first pair of a unit, or that of two kernels.

    Raises:
        NotFused: there is none.
    """
    for found in pairs(unit):
        if producer in (None, found.producer.name) and consumer in (None, found.consumer.name):
            return found
    names = f"{producer} and {consumer}" if producer or consumer else "any two kernels"
    raise NotFused(f"no workspace lies between {names}: written by one launch alone, and read by one other alone")


# --- what both kinds share


@dataclass(frozen=True)
class Merged:
    """Parameters of the fused kernel: (tensor, declaration), and how those of either part are called there."""

    parameters: tuple[tuple[str, str], ...]
    producer: dict[str, str]
    consumer: dict[str, str]


def merged_parameters(found: Pair, left_out: set[str]) -> Merged:
    """The consumer's parameters under their names, then those of the producer that are other tensors."""
    taken = {parameter.name for parameter in found.consumer.parameters}
    rows, names = [], dict[str, str]()
    held: dict[str, str] = {}
    for tensor, parameter in zip(found.consumer.launch.arguments, found.consumer.parameters, strict=True):
        held[tensor] = parameter.name
        if tensor not in left_out:
            rows.append((tensor, _declared(parameter, parameter.name)))
    for tensor, parameter in zip(found.producer.launch.arguments, found.producer.parameters, strict=True):
        name = held.get(tensor) or (parameter.name if parameter.name not in taken else f"producer_{parameter.name}")
        names[parameter.name] = name
        if tensor not in held and tensor not in left_out:
            rows.append((tensor, _declared(parameter, name)))
    return Merged(tuple(rows), names, {})


def _declared(parameter: Parameter, name: str) -> str:
    return f"{parameter.element}* __restrict__ {name}" if parameter.restrict else f"{parameter.type} {name}"


def fused_block(found: Pair) -> tuple[int, int, int]:
    """Shape of the fused kernel's blocks: the consumer's, unless the producer's barriers need more threads."""
    own, other = found.consumer.threads, found.producer.threads
    if other <= own or not any(barrier.scope == "block" for barrier in found.producer.barriers):
        return found.consumer.launch.block
    return other, 1, 1


def _dynamic(kernel: Kernel) -> list[str]:
    return [array.name for array in kernel.shared if array.space == "dynamic"]


def rebased(kernel: Kernel, body: str, offset: int) -> str:
    """A body whose dynamic shared memory begins at an offset of the fused kernel's."""
    for name in _dynamic(kernel):
        pattern = re.compile(rf"extern\s+__shared__\s+(?:(?:alignas|__align__)\(\d+\)\s+)?([\w ]+?)\s*\b{name}\[\];")
        body = pattern.sub(lambda match, name=name: f"{match[1]}* {name} = ({match[1]}*)(fused_shared + {offset});", body)  # type: ignore[misc]
    return body


def _without(unit: Unit, names: set[str]) -> str:
    """The source without some kernels and their declarations."""
    text, source = blanked(unit.source), unit.source
    spans = [unit.kernels[name].span for name in names]
    spans += [match.span() for name in names for match in re.finditer(rf'extern "C" __global__[^;{{}}]*\b{name}\([^()]*\);\n?', text)]
    for start, end in sorted(spans, reverse=True):
        source = source[:start] + source[end:].lstrip("\n")
    return source.rstrip("\n") + "\n"


def replaced(unit: Unit, found: Pair, launches: dict[str, list[Launch]], definitions: str, rule: str, why: str) -> tuple[Unit, list[Match]]:
    """The unit with a pair's kernels replaced by others."""
    names = {found.producer.name, found.consumer.name}
    source = _without(unit, names) + "\n" + definitions
    order = [new for launch in unit.launches for new in launches.get(launch.kernel, [launch])]
    before = unit.kernels[found.producer.name].text + "\n" + unit.kernels[found.consumer.name].text
    line = source[: source.index(definitions)].count("\n") + 1
    return replace(unit, source=source, launches=tuple(order)), [Match(rule, line, before, definitions, why)]


# --- PKF-Shmem


def fuse(unit: Unit, limit: int, producer: str | None = None, consumer: str | None = None) -> tuple[Unit, list[Match]]:
    """Two kernels as one that keeps the tensor between them in shared memory.

    Args:
        limit: bytes of shared memory that a block may take.

    Raises:
        NotFused: no such pair, or one whose blocks, indices or sizes do not fit.
    """
    found = pair(unit, producer, consumer)
    tiles = found.tiling()
    held = -(-tiles.layout.size * tiles.element // ALIGNMENT) * ALIGNMENT
    dynamic = held + max(found.producer.launch.dynamic_bytes, found.consumer.launch.dynamic_bytes)
    total = dynamic + found.producer.static_bytes + found.consumer.static_bytes
    if total > limit:
        raise NotFused(f"{found.tensor} takes {held} bytes of a block's shared memory, with the rest {total}; there are {limit}")
    block, merged = fused_block(found), merged_parameters(found, {found.tensor})
    name = f"{found.consumer.name}_{RULE.replace('-', '_')}"
    made = _producer_part(found, tiles, block, merged, held)
    used = _consumer_part(found, tiles, block, held)
    check_names(found, merged)
    element = found.read.element
    head = f'extern "C" __global__ void __launch_bounds__({math.prod(block)}) {name}({", ".join(row for _, row in merged.parameters)}) {{\n'
    body = (
        f"extern __shared__ __align__({ALIGNMENT}) unsigned char fused_shared[];\n"
        f"{element}* {found.tensor}_tile = ({element}*)(fused_shared);\n"
        f"int thread = {linear_thread(block)};\n"
        f"int {found.tensor}_origin = {_origin(tiles)};\n"
        f"{{\n{indented(made)}}}\n__syncthreads();\n{{\n{indented(used)}}}\n"
    )
    tensors = tuple(tensor for tensor, _ in merged.parameters)
    launch = Launch(name, tensors, found.consumer.launch.grid, block, dynamic)
    why = (
        f"every block of {found.consumer.name} reads of {found.tensor} what {math.prod(tiles.counts)} block(s) of "
        f"{found.producer.name} write; {held} bytes hold it"
    )
    launches = {found.producer.name: [], found.consumer.name: [launch]}
    result, matches = replaced(unit, found, launches, head + indented(body) + "}\n", RULE, why)
    workspace = {tensor: shape for tensor, shape in unit.workspace.items() if tensor != found.tensor}
    return replace(result, workspace=workspace), matches


def _origin(tiles: Tiling) -> str:
    """The first element that a block needs, as C."""
    words = [str(tiles.origin[0])] if tiles.origin[0] else []
    for along, step in zip(tiles.along, tiles.origin[1:], strict=True):
        if along.axis:
            words.append(f"({along.text(f'((int)blockIdx.{along.axis})')} * {step})")
    return f"({' + '.join(words)})" if len(words) > 1 else (words or ["0"])[0]


def check_names(found: Pair, merged: Merged) -> None:
    """A tensor that both parts take has the consumer's name, which the producer must not use for anything else."""
    own = {part.name for part in every(found.producer.statements) if hasattr(part, "name")}
    for before, after in merged.producer.items():
        if before != after and after in own:
            raise NotFused(f"kernel {found.producer.name} has a {after} of its own")


def _producer_part(found: Pair, tiles: Tiling, block: tuple[int, int, int], merged: Merged, offset: int) -> str:
    """Makes a block's part of the tensor: the producer's blocks that it needs, one after the other."""
    kernel = found.producer
    body = rebased(kernel, _held(found, tiles, kernel, found.written.name), offset)
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
        inner += "__syncthreads();\n"  # the next of them writes the shared memory that this one reads
    for level in reversed(range(depth)):
        after += "  " * level + "}\n"
    return before + indented(inner, 2 * depth) + after


def _consumer_part(found: Pair, tiles: Tiling, block: tuple[int, int, int], offset: int) -> str:
    body = rebased(found.consumer, _held(found, tiles, found.consumer, found.read.name), offset)
    return as_part(found.consumer, body, "consumer", block, {}, None)


# --- indices of the tensor in shared memory


@dataclass(frozen=True)
class _Site:
    """An index of a tensor in a kernel's body: the offsets of the name and of the index, and both ends."""

    start: int
    index: tuple[int, int]
    end: int


def _sites(kernel: Kernel, name: str) -> list[_Site]:
    """Where a kernel indexes a parameter: `name[index]` or `(name + index)`, and no other use.

    Raises:
        NotFused: it is used in another way.
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


def _held(found: Pair, tiles: Tiling, kernel: Kernel, name: str) -> str:
    """A kernel's body with all indices of the tensor those of its part in shared memory.

    Factors are changed where that is right for every thread, iteration and block; elsewhere digits are taken apart and put together.

    Raises:
        NotFused: an index that neither does.
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
    """Spans, in the kernel's source, of statements whose new indices are not where the old ones' elements are held."""
    tile, wrong = f"{found.tensor}_tile", set[tuple[int, int]]()
    changed = kernel.source[: kernel.inner[0]] + body + kernel.source[kernel.inner[1] :]
    inner = kernel.inner[0], kernel.inner[0] + len(body)
    parameters = tuple(replace(parameter, name=tile) if parameter.name == name else parameter for parameter in kernel.parameters)
    held = Kernel(kernel.name, parameters, kernel.bounds, (kernel.span[0], inner[1] + 1), inner, changed, kernel.launches)
    for _, blocks in grid_blocks(kernel):
        old = [event for event in Trace(kernel, {name}, blocks) if isinstance(event, Access)]
        for names, start in _origins(found, tiles, kernel, blocks):
            try:
                traced = Trace(held, {tile}, blocks, {**names, f"{found.tensor}_origin": start})
                new = [event for event in traced if isinstance(event, Access)]
            except NotShown:
                return {kernel.inner}
            if [event.width for event in old] != [event.width for event in new]:
                raise NotFused(f"the accesses of {found.tensor} in {kernel.name} are not those before")
            wrong |= {before.span for before, after in zip(old, new, strict=True) if not _same(before, after, start, tiles)}
    return wrong


def _origins(found: Pair, tiles: Tiling, kernel: Kernel, blocks: tuple[Ints, Ints, Ints]) -> Iterator[tuple[dict[str, Ints], Ints]]:
    """Which tile of its box each block is, and where that box begins: one case for a consumer, one for each tile of a producer."""
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
    """Whether an access goes where its elements are held: all its lanes, and aligned for its width."""
    place, new, mask = np.broadcast_arrays(
        before.start // tiles.element - start.reshape(-1, 1), after.start // tiles.element, np.True_ if before.mask is None else before.mask
    )
    place, new, lanes = place[mask], new[mask], before.width // tiles.element
    last = tiles.layout.held(place + lanes - 1) == new + lanes - 1
    return bool(np.all(place >= 0) and np.all(tiles.layout.held(place) == new) and np.all(last) and np.all(new % lanes == 0))

