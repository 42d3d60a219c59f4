"""Canonical form of a CUDA source, which changes only when the computation does.

Comments, layout, names and unused device functions do not change it. Kernels are compared by this form (`im2win.records.emission`), so that
a record of a kernel stays valid when the generator renames a variable, moves a device function to another header, or adds one that the
kernel does not call.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

Tokens = tuple[str, ...]

_TOKEN = re.compile(
    r"""//[^\n]*|/\*.*?\*/             # comments
    |(?P<token>"(?:\\.|[^"\\])*"       # strings: instructions of the assembler among them
    |'(?:\\.|[^'\\])*'
    |\d[\w.]*(?:[eEpP][+-]\d+\w*)?     # numbers, hexadecimal floats among them
    |[A-Za-z_]\w*
    |\.\.\.|->|::|<<=|>>=|\+\+|--|&&|\|\||[-+*/%&|^=!<>]=|<<|[^\s\w])""",
    re.DOTALL | re.VERBOSE,
)
_NAME = re.compile(r"[A-Za-z_]\w*")
_DIRECTIVE = re.compile(r"^[ \t]*#[ \t]*(\w+)[ \t]*(.*)$")
_EMULATOR = "IM2WIN_EMULATOR"  # defined only where kernels run on the CPU (`im2win.emulator`)

# Specifiers with arguments in parentheses that may precede the name in a function's definition.
_WITH_ARGUMENTS = {"__launch_bounds__", "__cluster_dims__", "alignas", "__align__", "__attribute__"}
_TYPES = {
    "auto", "bool", "char", "double", "float", "half", "nv_bfloat16", "int", "long", "short", "signed", "unsigned", "void", "typename",
    "class", "const", "volatile", "__restrict__", "*", "&", ">",
}  # fmt: skip
_AFTER_DECLARED = {";", "=", ",", ")", "[", ":", ">", "{"}


def tokens(source: str) -> Tokens:
    """The tokens of a C++ text without comments and white space."""
    return tuple(match["token"] for match in _TOKEN.finditer(source) if match["token"] is not None)


def for_device(source: str) -> str:
    """The text without the parts that only the emulator compiles. Other directives are kept."""
    kept: list[str] = []
    inside: list[bool | None] = []  # for each open condition, whether its lines count; None for a condition on another macro
    for line in source.split("\n"):
        found = _DIRECTIVE.match(line)
        word, rest = (found[1], found[2].strip()) if found else ("", "")
        if word in ("if", "ifdef", "ifndef"):
            ours = rest == _EMULATOR and word != "if"
            inside.append(word == "ifndef" if ours else None)
            if ours:
                continue
        elif word == "else" and inside and inside[-1] is not None:
            inside[-1] = not inside[-1]
            continue
        elif word == "endif" and inside and inside.pop() is not None:
            continue
        if False not in inside:
            kept.append(line)
    return "\n".join(kept)


@dataclass(frozen=True)
class Item:
    """A definition or declaration at the outermost level: its tokens, and the name that it defines ("" if none)."""

    name: str
    tokens: Tokens

    @property
    def kernel(self) -> bool:
        """Whether it defines or declares a kernel."""
        return "__global__" in self.tokens


def _defined(item: Sequence[str]) -> str:
    """The name that an item's tokens define: of a function, a structure, an alias or a variable."""
    depth, previous, position = 0, "", 0
    while position < len(item):
        token = item[position]
        if token == "template":
            position = _past(item, position + 1, "<", ">")
            continue
        if token in _WITH_ARGUMENTS:
            position = _past(item, position + 1, "(", ")")
            continue
        if token in ("struct", "class", "union", "enum", "using") and depth == 0:
            names = [one for one in _names_after(item, position + 1) if one not in _WITH_ARGUMENTS]
            return names[0] if names else ""
        if token in ("(", "=", ";", "{", "["):
            return previous
        if token == "<" and _NAME.fullmatch(previous):  # a specialisation: name<16>(
            return previous
        previous = token
        position += 1
    return ""


def _past(item: Sequence[str], position: int, begin: str, end: str) -> int:
    """The position behind the bracket that closes the one at `position`."""
    depth = 0
    while position < len(item):
        depth += (item[position] == begin) - (item[position] == end)
        position += 1
        if depth == 0:
            break
    return position


def _names_after(item: Sequence[str], position: int) -> Iterator[str]:
    while position < len(item) and item[position] not in ("{", ";", "="):
        if item[position] in _WITH_ARGUMENTS:
            position = _past(item, position + 1, "(", ")")
            continue
        if _NAME.fullmatch(item[position]):
            yield item[position]
        position += 1


def items(source: str) -> list[Item]:
    """The outermost definitions of a source in order, including those in namespaces and `extern "C"` blocks."""
    found: list[Item] = []
    current: list[str] = []
    depth = 0
    text = tokens("\n".join(line for line in source.split("\n") if not _DIRECTIVE.match(line)))
    for position, token in enumerate(text):
        if depth == 0 and token == "}" and not current:
            continue  # closes a namespace
        current.append(token)
        if token == "{":
            if depth == 0 and (current[0] == "namespace" or current[:-1] == ["extern", '"C"']):
                current = []
                continue
            depth += 1
        elif token == "}":
            depth -= 1
            following = text[position + 1] if position + 1 < len(text) else ""
            if depth == 0 and following != ";":
                found.append(Item(_defined(current), tuple(current)))
                current = []
        elif token == ";" and depth == 0:
            if len(current) > 1:
                found.append(Item(_defined(current), tuple(current)))
            current = []
    return found


def reached(found: Iterable[Item]) -> list[Item]:
    """The kernels in order, then the items that they reach, in the order of first mention."""
    by_name: dict[str, list[Item]] = {}
    order: list[Item] = []
    for item in found:
        (order if item.kernel else by_name.setdefault(item.name, [])).append(item)
    for item in order:  # the list grows in the loop
        for token in item.tokens:
            order += by_name.pop(token, ())
    return order


def _declared(found: Iterable[Item]) -> set[str]:
    """Names that the text itself declares. Renaming them does not change the computation."""
    names: set[str] = set()
    known = _TYPES | {item.name for item in found}
    for item in found:
        if item.name:
            names.add(item.name)
        before = ["", *item.tokens]
        after = [*item.tokens[1:], ""]
        for previous, token, following in zip(before, item.tokens, after, strict=False):
            typed = previous in known or previous.endswith("_t") or (previous[-1:].isdigit() and previous[:1].isalpha())
            if typed and following in _AFTER_DECLARED and _NAME.fullmatch(token) and not token.startswith("__") and token not in _TYPES:
                names.add(token)
    return names


def canonical(source: str) -> str:
    """The canonical form: the kernels and the device functions that they reach, with each declared name replaced by its number.

    Args:
        source: CUDA as it goes to the compiler. Everything before this project's first own function is TVM's prelude and is left out.
    """
    own = source[source.find("namespace im2win") :] if "namespace im2win" in source else source
    found = reached(items(for_device(own)))
    names = _declared(found)
    numbers: dict[str, str] = {}
    lines = []
    for item in found:
        line, previous = [], ""
        for token in item.tokens:
            own_name = token in names and previous not in (".", "->")
            line.append(numbers.setdefault(token, f"v{len(numbers)}") if own_name else token)
            previous = token
        lines.append(" ".join(line))
    return "\n".join(lines)
