"""Mutants: small changes of the source, drawn at random with the operators of Cosmic Ray, and applied to a copy of the source.

Only `drawn` needs Cosmic Ray. A mutant holds the lines that it replaces, so a list of mutants can be applied where it is not installed.
"""

from __future__ import annotations

import ast
import functools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TRIES = 20  # changes of a place that are tried before it is given up


class MutantError(ValueError):
    """A mutant that is not one of this source, or a sample that cannot be drawn. The message says which."""


@dataclass(frozen=True)
class Mutant:
    """One change of one file.

    Attributes:
        area: the part of the source that it was drawn for.
        file: path below the root of the repository.
        line: first line that changes, counted from 1.
        operator: what changed it: a name of Cosmic Ray's, or `REMOVED`.
        diff: the lines that it removes and then those in their place, with "-" and "+" before each.
    """

    area: str
    file: str
    line: int
    operator: str
    diff: str

    @property
    def name(self) -> str:
        """What a person calls it."""
        return f"{self.file}:{self.line} {self.operator}"

    def side(self, sign: str) -> list[str]:
        """The lines of one side of the diff, "-" or "+"."""
        return [line[1:] for line in self.diff.split("\n") if line[:1] == sign]

    def applied(self, source: str) -> str:
        """The text of the file with the change.

        Raises:
            MutantError: the lines that it replaces are not there.
        """
        lines, removed = source.split("\n"), self.side("-")
        first = self.line - 1
        if lines[first : first + len(removed)] != removed:
            raise MutantError(f"{self.name}: the file's lines are not those that the mutant replaces; draw again.")
        return "\n".join([*lines[:first], *self.side("+"), *lines[first + len(removed) :]])


def difference(before: str, after: str) -> tuple[int, str]:
    """The first line that differs, counted from 1, and the lines of both texts, as `Mutant.diff` holds them.

    Raises:
        MutantError: the texts are equal.
    """
    old, new = before.split("\n"), after.split("\n")
    if old == new:
        raise MutantError("the change leaves the text as it is.")
    shorter = min(len(old), len(new))
    head = next((i for i in range(shorter) if old[i] != new[i]), shorter)
    tail = next((i for i in range(shorter - head) if old[-1 - i] != new[-1 - i]), shorter - head)
    sides = [f"-{line}" for line in old[head : len(old) - tail]] + [f"+{line}" for line in new[head : len(new) - tail]]
    return head + 1, "\n".join(sides)


def meaning(source: str) -> str | None:
    """The syntax tree of a text without what no result depends on; None if it has none.

    Docstrings and annotations are never evaluated. Decorators that remember results change times only. That `zip` compares lengths is an
    assertion, as `assert` is: where it could fail, the program is wrong already.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):  # ValueError: a number with too many digits
        return None
    for node in ast.walk(tree):
        for name in ("annotation", "returns"):
            if getattr(node, name, None) is not None:
                setattr(node, name, ast.Constant(None))
        for name, left_out in (("body", _says_nothing), ("decorator_list", _remembers)):
            if isinstance(held := getattr(node, name, None), list):
                setattr(node, name, [one for one in held if not left_out(one)])
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "zip":
            node.keywords = []
    return ast.dump(tree)


def _says_nothing(statement: ast.AST) -> bool:
    text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant) and isinstance(statement.value.value, str)
    return text or isinstance(statement, ast.Assert)


def _remembers(decorator: ast.AST) -> bool:
    name = ast.unparse(decorator).partition("(")[0].rpartition(".")[2]
    return name in ("cache", "lru_cache", "hashed_once")


def drawn(root: Path, areas: Mapping[str, Sequence[str]], count: int, seed: int) -> list[Mutant]:
    """A random sample of mutants of the source; the same for the same source and seed.

    Every area has the same share. In an area every place that can change has the same chance, whatever the number of its changes: one of
    these is then drawn. What is no Python, and what changes nothing of a file's `meaning`, is drawn again.

    Args:
        root: of the repository.
        areas: by name, patterns of their files below `root`.
        count: mutants in all. seed: of the random numbers.

    Raises:
        MutantError: an area has no file, or fewer places than its share.
    """
    made: list[Mutant] = []
    for number, (area, patterns) in enumerate(areas.items()):
        share = count // len(areas) + (number < count % len(areas))
        files = sorted({path for pattern in patterns for path in root.glob(pattern)})
        if not files:
            raise MutantError(f"area {area!r} has no file.")
        places = [(path, place) for path in files for place in _places(path.read_text(encoding="utf-8"))]
        rng = random.Random(f"{seed} {area}")
        rng.shuffle(places)
        for path, variants in places:
            if share == 0:
                break
            for operator, occurrence in rng.sample(variants, min(TRIES, len(variants))):
                mutant = _mutant(area, path, path.relative_to(root).as_posix(), operator, occurrence)
                if mutant is not None:
                    made.append(mutant)
                    share -= 1
                    break
        if share:
            raise MutantError(f"area {area!r} has {share} places less than `count` (={count}) asks of it.")
    return made


def _mutant(area: str, path: Path, file: str, operator: str, occurrence: int) -> Mutant | None:
    """A change; None if it means nothing."""
    from cosmic_ray.mutating import mutate_code

    before = path.read_text(encoding="utf-8")
    after = mutate_code(before, _operators()[operator], occurrence)
    if after is None or meaning(after) in (None, meaning(before)):
        return None
    line, diff = difference(before, after)
    return Mutant(area, file, line, operator, diff)


def _places(source: str) -> list[list[tuple[str, int]]]:
    """Every place that operators change, as the changes that it can have: (operator, its occurrence in the text)."""
    found: dict[tuple[str, Any], list[tuple[str, int]]] = {}
    for operator, occurrence, start in _positions(source):
        found.setdefault((operator.split("_")[0], start), []).append((operator, occurrence))
    return list(found.values())


def _positions(source: str) -> Iterator[tuple[str, int, tuple[int, int]]]:
    from cosmic_ray.ast import ast_nodes, get_ast

    counts = dict.fromkeys(_operators(), 0)
    for node in ast_nodes(get_ast(source)):
        for name, operator in _operators().items():
            for start, _ in operator.mutation_positions(node):
                yield name, counts[name], start
                counts[name] += 1


REMOVED = "RemoveStatement"


@functools.cache
def _operators() -> dict[str, Any]:
    """Cosmic Ray's operators that need no arguments, by name, and one more."""
    try:
        from cosmic_ray.operators.operator import Example, Operator
        from cosmic_ray.plugins import get_operator, operator_names
        from parso.python.tree import Keyword, PythonNode
    except ImportError:
        raise MutantError("a sample is drawn with Cosmic Ray, which is not installed: pip install 'im2win[mutation]'.") from None

    class RemoveStatement(Operator):  # type: ignore[misc]
        """Replaces a statement by `pass`: a call whose result is not used, an augmented assignment, or a raised error."""

        def mutation_positions(self, node: Any) -> Iterator[Any]:
            if node.parent is not None and node.parent.type == "simple_stmt" and (_calls(node) or _augments(node) or _raises(node)):
                yield node.start_pos, node.end_pos

        def mutate(self, node: Any, index: int) -> Any:
            first = node.get_first_leaf()
            return Keyword("pass", first.start_pos, first.prefix)

        @classmethod
        def examples(cls) -> tuple[Any, ...]:
            return (Example("file.flush()", "pass"), Example("a += 1", "pass"), Example("raise ValueError", "pass"))

    def _calls(node: Any) -> bool:
        return isinstance(node, PythonNode) and node.type == "atom_expr" and node.children[-1].get_code().startswith("(")

    def _augments(node: Any) -> bool:
        return bool(node.type == "expr_stmt" and node.children[1].get_code().strip() != "=" and node.children[1].type != "annassign")

    def _raises(node: Any) -> bool:
        return bool(node.type == "raise_stmt")

    found = {name.rpartition("/")[2]: get_operator(name) for name in operator_names()}
    return {**{name: kind() for name, kind in sorted(found.items()) if not kind.arguments()}, REMOVED: RemoveStatement()}
