"""Pairs of launches that a workspace tensor connects, and the steps that both kinds of fusion share."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from im2win.emulator import Launch
from im2win.reconstruct.fusion.tiles import NotFused, Tiling, tiling
from im2win.reconstruct.parse.scan import builtins_used, written
from im2win.reconstruct.parse.statements import blanked, every
from im2win.reconstruct.parse.unit import Kernel, Parameter, Unit
from im2win.reconstruct.text_rules import Match
from im2win.reconstruct.trace.events import NotShown

ALIGNMENT = 128  # bytes; of arrays in dynamic shared memory
STATIC_LIMIT = 49152  # bytes of static shared memory of a kernel

# Names of variables that the fused kernel declares.
_RESERVED = re.compile(r"thread|ticket|wave|turn|makers?|reader|fused_\w+|(?:tile|wait)_[xyz]|(?:producer|consumer)_\w+")


@dataclass(frozen=True)
class Pair:
    """A producer launch, a consumer launch, and the tensor between them.

    tensor: its name in the unit. written, read: its parameter in the producer and in the consumer. elements: its size.
    """

    producer: Kernel
    consumer: Kernel
    tensor: str
    written: Parameter
    read: Parameter
    elements: int

    @staticmethod
    def tensors(kernel: Kernel) -> list[str]:
        """Names of the tensor arguments of a kernel, which has no scalar arguments."""
        return [name for name in kernel.launch.arguments if isinstance(name, str)]

    def tiling(self) -> Tiling:
        """The mapping from consumer blocks to producer blocks.

        Raises:
            NotFused: it cannot be enumerated, or no formula describes it.
        """
        try:
            return tiling(self.producer, self.written.name, self.consumer, self.read.name, self.elements)
        except NotShown as error:
            raise NotFused(f"what is read and written of {self.tensor} is not known: {error}") from None


def pairs(unit: Unit) -> Iterator[Pair]:
    """Pairs of launches whose data flow permits fusion, in the order of execution.

    One launch writes the workspace tensor, one other reads it. Neither the second launch nor any launch between the two writes a tensor of
    the first. Both kernels are launched once and have no scalar arguments.
    """
    for place, launch in enumerate(unit.launches):
        for tensor in sorted(unit.workspace.keys() & set(launch.arguments)):
            others = [i for i, other in enumerate(unit.launches) if i != place and tensor in other.arguments]
            if len(others) != 1 or others[0] < place:
                continue
            producer, consumer = (unit.kernel(unit.launches[i].kernel) for i in (place, others[0]))
            alone = len(producer.launches) == len(consumer.launches) == 1
            numbers = [one for kernel in (producer, consumer) for one in kernel.launch.arguments if isinstance(one, int)]
            later = unit.launches[place + 1 : others[0] + 1]
            if alone and not numbers and _outputs(unit, launch) == {tensor} and not _disturbed(unit, launch, later):
                first, second = (_parameter(kernel, tensor) for kernel in (producer, consumer))
                yield Pair(producer, consumer, tensor, first, second, math.prod(unit.workspace[tensor][0]))


def _outputs(unit: Unit, launch: Launch) -> set[object]:
    """Names of the tensors that a launch may write."""
    kernel = unit.kernel(launch.kernel)
    names = written(kernel)
    return {tensor for tensor, parameter in zip(launch.arguments, kernel.parameters, strict=True) if parameter.name in names}


def _disturbed(unit: Unit, producer: Launch, later: tuple[Launch, ...]) -> bool:
    return any(_outputs(unit, launch) & set(producer.arguments) for launch in later)


def _parameter(kernel: Kernel, tensor: str) -> Parameter:
    return kernel.parameters[kernel.launch.arguments.index(tensor)]


def pair(unit: Unit, producer: str | None = None, consumer: str | None = None) -> Pair:
    """The first pair of a unit, or the pair of the named kernels.

    Raises:
        NotFused: there is no such pair.
    """
    for found in pairs(unit):
        if producer in (None, found.producer.name) and consumer in (None, found.consumer.name):
            return found
    names = f"{producer} and {consumer}" if producer or consumer else "any two kernels"
    raise NotFused(f"no workspace lies between {names}: written by one launch alone, and read by one other alone")


@dataclass(frozen=True)
class Merged:
    """Parameters of the fused kernel as (tensor, declaration), and the new names of the producer's parameters."""

    parameters: tuple[tuple[str, str], ...]
    producer: dict[str, str]


def merged_parameters(found: Pair, left_out: set[str]) -> Merged:
    """The consumer's parameters, then the producer's parameters for further tensors; tensors in `left_out` get none.

    Raises:
        NotFused: a body declares a name that the fused kernel needs, or uses a built-in that fusion cannot rename.
    """
    taken = {parameter.name for parameter in found.consumer.parameters}
    rows, names = list[tuple[str, str]](), dict[str, str]()
    shared_names: dict[str, str] = {}
    for tensor, parameter in zip(found.tensors(found.consumer), found.consumer.parameters, strict=True):
        shared_names[tensor] = parameter.name
        if tensor not in left_out:
            rows.append((tensor, _declared(parameter, parameter.name)))
    for tensor, parameter in zip(found.tensors(found.producer), found.producer.parameters, strict=True):
        name = shared_names.get(tensor) or (parameter.name if parameter.name not in taken else f"producer_{parameter.name}")
        names[parameter.name] = name
        if tensor not in shared_names and tensor not in left_out:
            rows.append((tensor, _declared(parameter, name)))
    _check_names(found, names)
    return Merged(tuple(rows), names)


def _check_names(found: Pair, renamed: dict[str, str]) -> None:
    """Raises `NotFused` if names of the bodies collide in the fused kernel; `renamed`: new names of the producer's parameters."""
    for kernel in (found.producer, found.consumer):
        own = {str(getattr(part, "name", "")) for part in every(kernel.statements)}
        both = own | {parameter.name for parameter in kernel.parameters}
        taken = {name for name in both if _RESERVED.fullmatch(name) or name in (f"{found.tensor}_tile", f"{found.tensor}_origin")}
        if kernel is found.producer:
            taken |= own & {after for before, after in renamed.items() if before != after}
        if taken:
            raise NotFused(f"kernel {kernel.name} has a {min(taken)} of its own, which the fused kernel needs")
        builtins = builtins_used(kernel)
        if builtins:
            raise NotFused(f"kernel {kernel.name} uses {min(builtins)}, which would be that of the fused kernel")


def _declared(parameter: Parameter, name: str) -> str:
    return f"{parameter.element}* __restrict__ {name}" if parameter.restrict else f"{parameter.type} {name}"


def fused_block(found: Pair) -> tuple[int, int, int]:
    """Block shape of the fused kernel: the consumer's, unless the producer has block barriers and more threads."""
    own, other = found.consumer.threads, found.producer.threads
    if other <= own or not any(barrier.scope == "block" for barrier in found.producer.barriers):
        return found.consumer.launch.block
    return other, 1, 1


def _dynamic(kernel: Kernel) -> list[str]:
    return [array.name for array in kernel.shared if array.space == "dynamic"]


def rebased(kernel: Kernel, body: str, offset: int) -> str:
    """A body whose dynamic shared arrays start `offset` bytes into the dynamic shared memory of the fused kernel."""
    for name in _dynamic(kernel):
        pattern = re.compile(rf"extern\s+__shared__\s+(?:(?:alignas|__align__)\(\d+\)\s+)?([\w ]+?)\s*\b{name}\[\];")
        body = pattern.sub(lambda match, name=name: f"{match[1]}* {name} = ({match[1]}*)(fused_shared + {offset});", body)  # type: ignore[misc]
    return body


def _without(unit: Unit, names: set[str]) -> str:
    """The source without the definitions and declarations of some kernels."""
    text, source = blanked(unit.source), unit.source
    spans = [unit.kernels[name].span for name in names]
    spans += [match.span() for name in names for match in re.finditer(rf'extern "C" __global__[^;{{}}]*\b{name}\([^()]*\);\n?', text)]
    for start, end in sorted(spans, reverse=True):
        source = source[:start] + source[end:].lstrip("\n")
    return source.rstrip("\n") + "\n"


def replaced(unit: Unit, found: Pair, launches: dict[str, list[Launch]], definitions: str, rule: str, why: str) -> tuple[Unit, list[Match]]:
    """The unit with the kernels of a pair replaced by `definitions`, and the change.

    Args:
        launches: the new launches in place of each old kernel's launch.
        rule, why: of the reported change.
    """
    names = {found.producer.name, found.consumer.name}
    source = _without(unit, names) + "\n" + definitions
    order = [new for launch in unit.launches for new in launches.get(launch.kernel, [launch])]
    before = unit.kernels[found.producer.name].text + "\n" + unit.kernels[found.consumer.name].text
    line = source[: source.index(definitions)].count("\n") + 1
    return replace(unit, source=source, launches=tuple(order)), [Match(rule, line, before, definitions, why)]
