"""A translation unit of generated CUDA: kernels, parameters, shared arrays, barriers and launches.

Regular expressions parse the source, so this is a model of what TVM generates, not of C++. TVM's host code holds the launches;
`codegen.cuda_source.generate` reads them there. A standalone source states its launches in comments, in the order of execution:

    // launch: main_kernel(V, data) grid 4 1 1 block 32 4 1 dynamic 0
    // workspace: V float32 2048
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from im2win.emulator import Launch
from im2win.reconstruct.parse.expressions import plain_type, size_of
from im2win.reconstruct.parse.statements import Barrier, Declaration, Loop, Statement, blanked, closing, every, statements
from im2win.reconstruct.text_rules import Match, ReconstructError

WARP = 32
AXES = "xyz"

_KERNEL = re.compile(
    r'extern\s+"C"\s+__global__\s+void\s+(?:__launch_bounds__\((?P<bounds>[\d,\s]+)\)\s+)?(?P<name>\w+)\s*\((?P<parameters>[^()]*)\)\s*(?P<end>[;{])'
)
_PARAMETER = re.compile(r"\s*(?P<type>.*?[\s*])(?:(?P<restrict>__restrict__)\s+)?(?P<name>\w+)\s*$", re.DOTALL)
_LAUNCH = re.compile(
    r"^// launch: (?P<kernel>\w+)\((?P<arguments>[-\w., ]*)\) "
    r"grid (?P<grid>\d+ \d+ \d+) block (?P<block>\d+ \d+ \d+) dynamic (?P<dynamic>\d+)$",
    re.MULTILINE,
)
_WORKSPACE = re.compile(r"^// workspace: (?P<name>\w+) (?P<dtype>\w+) (?P<shape>\d+(?: \d+)*)$", re.MULTILINE)
Workspace = Mapping[str, tuple[tuple[int, ...], str]]
"""Shape and element type, by name, of the tensors that exist only between launches."""


@dataclass(frozen=True)
class Parameter:
    """A parameter of a kernel; `restrict` says whether it is declared `__restrict__`."""

    type: str
    name: str
    restrict: bool

    @property
    def element(self) -> str:
        """The pointee type, "" for a scalar."""
        return self.type[:-1] if self.type.endswith("*") else ""


@dataclass(frozen=True)
class Edit:
    """Replaces the characters of `span` by `text`; `rule` and `why` describe the change."""

    span: tuple[int, int]
    text: str
    rule: str
    why: str


@dataclass(frozen=True)
class Kernel:
    """One kernel of a source.

    bounds: threads of its `__launch_bounds__`, None without. span: of the definition. inner: span of the body, without the braces.
    launches: in the order of execution; tensors are named, scalars have their values. resident: thread blocks that `__launch_bounds__`
        asks a multiprocessor to run at a time, None without.
    """

    name: str
    parameters: tuple[Parameter, ...]
    bounds: int | None
    span: tuple[int, int]
    inner: tuple[int, int]
    source: str
    launches: tuple[Launch, ...] = ()
    resident: int | None = None

    @property
    def text(self) -> str:
        """Source text of the definition."""
        return self.source[slice(*self.span)]

    @property
    def body(self) -> str:
        """Source text between the braces."""
        return self.source[slice(*self.inner)]

    @functools.cached_property
    def statements(self) -> tuple[Statement, ...]:
        """The body as a tree; spans are offsets in the unit's source."""
        return statements(blanked(self.source), *self.inner)

    @property
    def shared(self) -> list[Declaration]:
        """Arrays in shared memory; the `count` of a dynamic array is 0."""
        return [part for part in every(self.statements) if isinstance(part, Declaration) and part.space]

    @property
    def barriers(self) -> list[Barrier]:
        """In the order of the text."""
        return [part for part in every(self.statements) if isinstance(part, Barrier)]

    @property
    def loops(self) -> list[Loop]:
        """In the order of the text."""
        return [part for part in every(self.statements) if isinstance(part, Loop)]

    @property
    def bound(self) -> list[str]:
        """Block and thread indices that the body uses ("blockIdx.x", "threadIdx.y", ...), sorted."""
        return sorted(set(re.findall(r"\b(?:blockIdx|threadIdx)\.[xyz]\b", blanked(self.source)[slice(*self.inner)])))

    @property
    def static_bytes(self) -> int:
        """Bytes of static shared memory.

        Raises:
            ReconstructError: an array has an element type of unknown size.
        """
        total = 0
        for array in self.shared:
            size = size_of(array.type)
            if size is None:
                raise ReconstructError(f"kernel {self.name}: shared array {array.name} is of {array.type}, whose size is not known.")
            total += size * (array.count or 0)
        return total

    @property
    def launch(self) -> Launch:
        """The launch configuration.

        Raises:
            ReconstructError: there is no launch, launches differ in shape, or the number of arguments is wrong.
        """
        if not self.launches:
            raise ReconstructError(f"kernel {self.name}: its launch is not known; give it as a comment `// launch: ...`.")
        shapes = {(launch.grid, launch.block, launch.dynamic_bytes) for launch in self.launches}
        if len(shapes) > 1:
            raise ReconstructError(f"kernel {self.name} is launched in {len(shapes)} ways; rules need one.")
        for launch in self.launches:
            if len(launch.arguments) != len(self.parameters):
                what = f"{len(self.parameters)} parameters and {len(launch.arguments)} arguments"
                raise ReconstructError(f"kernel {self.name}: {what}.")
        return self.launches[0]

    @property
    def numbers(self) -> list[dict[str, int]]:
        """The distinct combinations of scalar arguments over all launches, by parameter name."""
        found = []
        for launch in self.launches:
            given = zip(self.parameters, launch.arguments, strict=True)
            found.append({parameter.name: one for parameter, one in given if isinstance(one, int)})
        return [one for i, one in enumerate(found) if one not in found[:i]]

    @property
    def threads(self) -> int:
        """Threads a block."""
        x, y, z = self.launch.block
        return x * y * z

    def line(self, offset: int) -> int:
        """Line number of an offset, from 1."""
        return self.source.count("\n", 0, offset) + 1


@dataclass(frozen=True)
class Unit:
    """A source, its launches in the order of execution, and the workspace tensors between them."""

    source: str
    launches: tuple[Launch, ...] = ()
    workspace: Workspace = field(default_factory=dict)

    @functools.cached_property
    def kernels(self) -> dict[str, Kernel]:
        """Kernels by name, in source order.

        Raises:
            ReconstructError: a parameter cannot be parsed, two kernels have one name, or nothing closes a kernel's brackets.
        """
        text, found = blanked(self.source), dict[str, Kernel]()
        for match in _KERNEL.finditer(text):
            if match["end"] == ";":
                continue
            name, last = match["name"], closing(text, match.end() - 1)
            if name in found:
                raise ReconstructError(f"kernel {name} is defined twice.")
            bounds, resident = _bounds(match["bounds"])
            launches = tuple(launch for launch in self.launches if launch.kernel == name)
            span, inner = (match.start(), last + 1), (match.end(), last)
            found[name] = Kernel(name, _parameters(name, match["parameters"]), bounds, span, inner, self.source, launches, resident)
        return found

    def kernel(self, name: str) -> Kernel:
        """The kernel of a name.

        Raises:
            ReconstructError: no kernel has this name.
        """
        if name not in self.kernels:
            raise ReconstructError(f"there is no kernel {name!r}; the source has {', '.join(self.kernels) or 'none'}.")
        return self.kernels[name]

    @property
    def head(self) -> str:
        """Source text before the first declaration or definition of a kernel."""
        match = _KERNEL.search(blanked(self.source))
        return self.source[: match.start()] if match else self.source

    def edited(self, edits: Iterable[Edit]) -> tuple[Unit, list[Match]]:
        """Applies edits; returns the new unit and the changes in source order.

        Raises:
            ReconstructError: edits overlap.
        """
        ordered, source, end = sorted(edits, key=lambda edit: edit.span), self.source, len(self.source) + 1
        matches = [
            Match(edit.rule, source.count("\n", 0, edit.span[0]) + 1, source[slice(*edit.span)], edit.text, edit.why) for edit in ordered
        ]
        for edit in reversed(ordered):
            if edit.span[1] > end:
                raise ReconstructError(f"rule {edit.rule!r} changes what another has changed.")
            source, end = source[: edit.span[0]] + edit.text + source[edit.span[1] :], edit.span[0]
        return replace(self, source=source), matches

    def annotated(self) -> str:
        """The source after comments that state its launches and workspaces; `read` parses them."""
        lines = [launch_comment(launch) for launch in self.launches]
        lines += [f"// workspace: {name} {dtype} {' '.join(map(str, shape))}" for name, (shape, dtype) in self.workspace.items()]
        return "".join(line + "\n" for line in lines) + self.source


def launch_comment(launch: Launch) -> str:
    """A launch as a comment that `read` parses."""
    grid, block = (" ".join(map(str, extents)) for extents in (launch.grid, launch.block))
    return f"// launch: {launch.kernel}({', '.join(map(str, launch.arguments))}) grid {grid} block {block} dynamic {launch.dynamic_bytes}"


def read(text: str) -> Unit:
    """Parses a source whose comments state its launches and workspaces.

    Raises:
        ReconstructError: a launch names a kernel that the source does not define, or nothing closes a kernel's brackets.
    """
    launches = tuple(_launch(match) for match in _LAUNCH.finditer(text))
    workspace = {match["name"]: (tuple(map(int, match["shape"].split())), match["dtype"]) for match in _WORKSPACE.finditer(text)}
    unit = Unit(_WORKSPACE.sub("", _LAUNCH.sub("", text)).lstrip("\n"), launches, workspace)
    for launch in launches:
        unit.kernel(launch.kernel)
    return unit


def _bounds(text: str | None) -> tuple[int | None, int | None]:
    """(threads, thread blocks of a multiprocessor) of the text between the brackets of `__launch_bounds__`."""
    numbers = [int(word) for word in text.split(",")] if text else []
    return (numbers[0] if numbers else None), (numbers[1] if len(numbers) > 1 else None)


def _launch(match: re.Match[str]) -> Launch:
    words = [part.strip() for part in match["arguments"].split(",") if part.strip()]
    arguments = tuple(int(word) if re.fullmatch(r"-?\d+", word) else word for word in words)
    grid, block = ((int(x), int(y), int(z)) for x, y, z in (match[name].split() for name in ("grid", "block")))
    return Launch(match["kernel"], arguments, grid, block, int(match["dynamic"]))


def _parameters(kernel: str, text: str) -> tuple[Parameter, ...]:
    found = []
    for part in filter(str.strip, text.split(",")):
        match = _PARAMETER.match(part)
        if match is None:
            raise ReconstructError(f"kernel {kernel}: parameter {part.strip()!r} is not understood.")
        found.append(Parameter(plain_type(match["type"]), match["name"], match["restrict"] is not None))
    return tuple(found)
