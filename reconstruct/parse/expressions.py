"""Expressions of generated CUDA: parsing into trees, splitting into sums, and printing."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from im2win.reconstruct.text_rules import ReconstructError

DEEPEST = 120  # most levels of an expression, of which a bracket is two, a sign and a condition one; also of nested statements
HIGHEST = 300  # most levels of an expression's tree, in which each further term of a sum is one


class ExpressionError(ReconstructError):
    """Text that is not an expression of the subset of C++ that TVM generates; the message quotes it."""


@dataclass(frozen=True)
class Number:
    """An integer literal; the value of a floating-point literal is None."""

    value: int | None


@dataclass(frozen=True)
class Name:
    """A variable, a parameter, or a built-in such as threadIdx."""

    name: str


@dataclass(frozen=True)
class Member:
    """`base.field`"""

    base: Expr
    field: str


@dataclass(frozen=True)
class Index:
    """`base[index]`"""

    base: Expr
    index: Expr


@dataclass(frozen=True)
class Call:
    """`function<template>(arguments)`"""

    function: str
    template: str
    arguments: tuple[Expr, ...]


@dataclass(frozen=True)
class Cast:
    """`(type)operand`"""

    type: str
    operand: Expr


@dataclass(frozen=True)
class Unary:
    """`-x`, `!x`, `~x`, `*pointer`, `&place`"""

    operator: str
    operand: Expr


@dataclass(frozen=True)
class Binary:
    """`left operator right`"""

    operator: str
    left: Expr
    right: Expr


@dataclass(frozen=True)
class Choice:
    """`condition ? then : other`"""

    condition: Expr
    then: Expr
    other: Expr


Expr = Number | Name | Member | Index | Call | Cast | Unary | Binary | Choice

_SCALARS = {
    "bool": 1, "char": 1, "signed char": 1, "int8_t": 1, "uint8_t": 1, "uchar": 1, "short": 2, "ushort": 2, "half": 2, "half_t": 2,
    "nv_bfloat16": 2, "int16_t": 2, "uint16_t": 2, "int": 4, "uint": 4, "unsigned": 4, "float": 4, "int32_t": 4, "uint32_t": 4, "double": 8,
    "int64_t": 8, "uint64_t": 8, "longlong": 8, "void": 1, "size_t": 8,
}  # fmt: skip
_LONG = {"unsigned int": "uint", "unsigned char": "uchar", "char": "signed char", "unsigned short": "ushort", "long long": "int64_t",
         "unsigned long long": "uint64_t", "__half": "half", "__nv_bfloat16": "nv_bfloat16"}  # fmt: skip
_VECTORS = {f"{name}{lanes}": size * lanes for name, size in _SCALARS.items() for lanes in (1, 2, 3, 4) if name.isalpha()}
_VECTORS |= {f"nv_bfloat16{lanes}": 2 * lanes for lanes in (2, 4)}


def plain_type(text: str) -> str:
    """The canonical name of a type, without qualifiers: "const unsigned int *" becomes "uint*"."""
    words = re.sub(r"\b(const|volatile|__restrict__)\b", " ", text)
    stars = words.count("*")
    name = " ".join(words.replace("*", " ").split())
    return _LONG.get(name, name) + "*" * stars


def size_of(name: str) -> int | None:
    """Size of a type in bytes, None for an unknown type. A pointer has 8 bytes."""
    return 8 if name.endswith("*") else _SCALARS.get(name) or _VECTORS.get(name)


_TYPE = r"(?:(?:const|volatile|unsigned|signed|long)\s+)*[A-Za-z_]\w*"
_TOKEN = re.compile(
    rf"""\s*(?:
    (?P<cast>\(\s*(?:{_TYPE}\s*\*+|(?:const\s+)?(?:unsigned\ int|unsigned\ char|signed\ char|long\ long|
        {"|".join(sorted({*_SCALARS, *_VECTORS}, key=len, reverse=True))}))\s*\)(?=\s*[\w(*&~!+-]))
  | (?P<number>0[xX][0-9a-fA-F.]+(?:[pP][+-]?\d+)?[a-zA-Z]*|\d+\.?\d*(?:[eE][+-]?\d+)?[a-zA-Z]*)
  | (?P<template>[A-Za-z_][\w:]*<[\w:,\ *]*>(?=\())
  | (?P<name>[A-Za-z_][\w]*(?:::\w+)*)
  | (?P<operator><<|>>|<=|>=|==|!=|&&|\|\||[-+*/%<>&|^~!?:.,()\[\]])
    )""",
    re.VERBOSE,
)
_LEVELS = {
    operator: level
    for level, operators in enumerate(("||", "&&", "|", "^", "&", "== !=", "< > <= >=", "<< >>", "+ -", "* / %"))
    for operator in operators.split()
}


class _Parser:
    """Precedence climbing over the tokens of one expression."""

    def __init__(self, text: str) -> None:
        self.text, self.tokens, at = text, list[tuple[str, str]](), 0
        while text[at:].strip():
            match = _TOKEN.match(text, at)
            if match is None:
                raise ExpressionError(f"not an expression that is understood: {text.strip()[:200]}")
            self.tokens.append((str(match.lastgroup), match.group(str(match.lastgroup))))
            at = match.end()
        self.tokens.append(("end", ""))
        self.at = self.depth = 0

    def fail(self) -> ExpressionError:
        return ExpressionError(f"not an expression that is understood: {self.text.strip()[:200]}")

    def take(self, value: str = "") -> str:
        kind, token = self.tokens[self.at]
        if (value and token != value) or kind == "end":
            raise self.fail()
        self.at += 1
        return token

    def peek(self) -> str:
        return self.tokens[self.at][1]

    def whole(self) -> Expr:
        found = self.choice()
        if self.tokens[self.at][0] != "end" or _height(found) > HIGHEST:
            raise self.fail()
        return found

    def deeper(self, part: Callable[[], Expr]) -> Expr:
        """What `part` parses, one level deeper."""
        self.depth += 1
        if self.depth > DEEPEST:
            raise self.fail()
        found = part()
        self.depth -= 1
        return found

    def choice(self) -> Expr:
        return self.deeper(self._choice)

    def unary(self) -> Expr:
        return self.deeper(self._unary)

    def _choice(self) -> Expr:
        condition = self.binary(0)
        if self.peek() != "?":
            return condition
        self.take("?")
        then = self.choice()
        self.take(":")
        return Choice(condition, then, self.choice())

    def binary(self, level: int) -> Expr:
        left = self.unary()
        while self.tokens[self.at][0] == "operator" and _LEVELS.get(self.peek(), -1) >= level:
            operator = self.take()
            left = Binary(operator, left, self.binary(_LEVELS[operator] + 1))
        return left

    def _unary(self) -> Expr:
        kind, token = self.tokens[self.at]
        if kind == "cast":
            self.take()
            return Cast(plain_type(token.strip("() \t\n")), self.unary())
        if kind == "operator" and token in "-+!~*&":
            self.take()
            operand = self.unary()
            return operand if token == "+" else Unary(token, operand)
        return self.postfix(self.primary())

    def postfix(self, base: Expr) -> Expr:
        while self.peek() in (".", "["):
            if self.take() == ".":
                base = Member(base, self.take())
            else:
                base = Index(base, self.choice())
                self.take("]")
        return base

    def primary(self) -> Expr:
        kind, token = self.tokens[self.at]
        self.take()
        if kind == "number":
            return Number(_integer(token))
        if kind == "template" or (kind == "name" and self.peek() == "("):
            function, _, template = token.partition("<")
            return Call(function, template.rstrip(">"), self.arguments())
        if kind == "name":
            return Name(token)
        if token != "(":
            raise self.fail()
        inner = self.choice()
        self.take(")")
        return inner

    def arguments(self) -> tuple[Expr, ...]:
        self.take("(")
        found = []
        while self.peek() != ")":
            found.append(self.choice())
            if self.peek() != ")":
                self.take(",")
        self.take(")")
        return tuple(found)


def _integer(token: str) -> int | None:
    match = re.fullmatch(r"(0[xX][0-9a-fA-F]+|\d+)[uUlL]*", token)
    return int(match[1], 0) if match and not re.fullmatch(r"0\d+", match[1]) else None


def parse(text: str) -> Expr:
    """Parses an expression.

    Raises:
        ExpressionError: the text is not an expression of the subset of C++ that TVM generates.
    """
    return _Parser(text).whole()


def _children(expr: Expr) -> tuple[Expr, ...]:
    children: tuple[Expr, ...] = ()
    match expr:
        case Member(base, _):
            children = (base,)
        case Index(base, index):
            children = (base, index)
        case Call(_, _, arguments):
            children = arguments
        case Cast(_, operand) | Unary(_, operand):
            children = (operand,)
        case Binary(_, left, right):
            children = (left, right)
        case Choice(condition, then, other):
            children = (condition, then, other)
    return children


def _height(expr: Expr) -> int:
    """Levels of a tree, counted without recursion."""
    levels, level = 0, [expr]
    while level:
        levels, level = levels + 1, [child for part in level for child in _children(part)]
    return levels


def walk(expr: Expr) -> list[Expr]:
    """The expression and all its subexpressions, in pre-order."""
    return [expr, *(inner for child in _children(expr) for inner in walk(child))]


def names(expr: Expr) -> set[str]:
    """Names of variables and built-ins in an expression; a built-in includes its field, as in "threadIdx.x"."""
    found = {part.name for part in walk(expr) if isinstance(part, Name)}
    members = {(part.base.name, part.field) for part in walk(expr) if isinstance(part, Member) and isinstance(part.base, Name)}
    return (found - {base for base, _ in members}) | {f"{base}.{field}" for base, field in members}


def text(expr: Expr) -> str:
    """The expression as source text, every operation in parentheses.

    Raises:
        ExpressionError: the expression has a floating-point literal, whose text is not kept.
    """
    match expr:
        case Number(None):
            raise ExpressionError("a literal of floating point has no text")
        case Number(value):
            return str(value)
        case Name(name):
            return name
        case Member(Number() as base, field):
            return f"{text(base)} .{field}"  # "4.x" is a number
        case Member(base, field):
            return f"{text(base)}.{field}"
        case Index(base, index):
            return f"{text(base)}[{text(index)}]"
        case Call(function, template, arguments):
            return f"{function}{f'<{template}>' if template else ''}({', '.join(map(text, arguments))})"
        case Cast(type_, operand):
            return f"(({type_}){text(operand)})"
        case Unary(operator, operand):
            return f"({operator}{text(operand)})"
        case Binary(operator, left, right):
            return f"({text(left)} {operator} {text(right)})"
        case Choice(condition, then, other):
            return f"({text(condition)} ? {text(then)} : {text(other)})"


def terms(expr: Expr) -> list[tuple[int, Expr | None]]:
    """Splits a sum into (factor, term) pairs; the term of a constant is None."""
    match expr:
        case Number(int(value)):
            return [(value, None)]
        case Binary("+", left, right):
            return terms(left) + terms(right)
        case Binary("-", left, right):
            return terms(left) + [(-factor, rest) for factor, rest in terms(right)]
        case Binary("*", left, Number(int(factor))) | Binary("*", Number(int(factor)), left):
            return [(factor * inner, rest) for inner, rest in terms(left)]
        case Binary("<<", left, Number(int(bits))):
            return [(inner << bits, rest) for inner, rest in terms(left)]
    return [(1, expr)]


def total(parts: Sequence[tuple[int, Expr | None]]) -> str:
    """The source text of a sum of (factor, term) pairs; the inverse of `terms`."""
    constant = sum(factor for factor, rest in parts if rest is None)
    words = [text(rest) if factor == 1 else f"({text(rest)} * {factor})" for factor, rest in parts if rest is not None and factor]
    words += [str(constant)] if constant or not words else []
    return words[0] if len(words) == 1 else f"({' + '.join(words)})"
