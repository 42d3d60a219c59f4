"""The part of the generator's source that can take part in one method's kernels, found by following imports.

A kernel is emitted by `im2win.records.emission` and compiled by the target's `codegen/`: there the search begins. Code can run only if its
module was imported, so a file counts if a file that counts imports it. A file that is not reached takes no part, unless code were loaded by
other means than an import statement. A test lists the files that count for no method; another one emits kernels of every method and
compares what runs with what counts.

A few files import the code of many methods. Of these a statement of the module counts only if a counted statement names what it defines:

- Of the tables of algorithms and schedules only the method's own row counts, which is the only one that emission asks for.
- Statements that define nothing, such as a call, always count.

Some imports are not followed, since nothing of them runs when a kernel is made:

- Names that are used in annotations alone, which are never evaluated.
- In the files of many methods, classes that are only compared with `isinstance`.
- Of files that choose tiles, what an interface (`families/`, `registry/`) asks in its methods that choose (`_CHOOSES`), and modules of them
  that it hands over. Where kernels are made with a definition of such a file, that definition counts, and what it names.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ALGORITHMS, SCHEDULES = "registry/algorithms.py", "registry/schedules.py"  # the files with the tables
TABLE = "_ROWS"

# Files that import the code of many methods; they count statement by statement.
_OF_MANY = {ALGORITHMS, SCHEDULES, "registry/cpu_schedules.py", "packing/codec.py", "schedules/cuda/families/tma.py"}
_INTERFACES = {"registry", "families"}  # folders, with `family.py`: their classes answer what is asked of a schedule
_CHOOSES = {"estimate", "floor", "space", "unsupported_reason", "violations"}  # methods that make no kernel

_Import = tuple[str, tuple[str, ...], str]  # the name that it binds, the module's path below the package, and what is taken from the module


@dataclass(frozen=True)
class Area:
    """Where to search. Files are written as paths below the package, such as "spec/conv2d.py".

    Attributes:
        root: folder of the package.
        begin: files that make kernels whatever the method is.
        making: Python files that make kernels. choosing: those that choose tiles.
    """

    root: Path
    begin: frozenset[str]
    making: frozenset[str]
    choosing: frozenset[str]


def keys(root: Path) -> list[str]:
    """The methods that have a row in the table of schedules, in order, such as "direct/tiled".

    Raises:
        ValueError: a row is written such that its names cannot be read without running it.
    """
    return list(_schedule_rows(_text(root / SCHEDULES)))


def parts(area: Area, method: str) -> dict[Path, list[ast.stmt] | None]:
    """The statements that count for a method, by file, in their order; None where the whole file counts.

    Raises:
        ValueError: the method has no row, or a row cannot be read.
    """
    return _Search(area, method).found()


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


# --- names in a syntax tree --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Names:
    """Names that code uses.

    running: where it runs for a kernel; `members` are the same, with the attribute ("module.name") that follows a name.
    choosing: in methods that choose. compared: as the class of `isinstance`, where it runs. annotated: all of them, and in annotations.
    """

    running: frozenset[str]
    members: frozenset[str]
    choosing: frozenset[str]
    compared: frozenset[str]
    annotated: frozenset[str]


def _names(nodes: Iterable[ast.AST]) -> _Names:
    found: dict[str, set[str]] = {"running": set(), "members": set(), "choosing": set(), "compared": set(), "annotated": set()}

    def visit(node: ast.AST | None, kind: str, member: bool = False) -> None:
        if node is None:
            return
        if isinstance(node, ast.Name):
            note(node.id, node.id, kind)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            note(node.value.id, f"{node.value.id}.{node.attr}", kind)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            inside, given = "choosing" if member and node.name in _CHOOSES and kind == "running" else kind, node.args
            every(kind, *node.decorator_list, *given.defaults, *given.kw_defaults)
            arguments = (*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg)
            every("annotated", node.returns, *(argument.annotation for argument in arguments if argument))
            every(inside, *node.body)
        elif isinstance(node, ast.ClassDef):
            every(kind, *node.decorator_list, *node.bases, *node.keywords)
            for statement in node.body:
                visit(statement, kind, member=True)
        elif isinstance(node, ast.AnnAssign):
            every(kind, node.target, node.value)
            visit(node.annotation, "annotated")
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance" and kind == "running":
            every(kind, *node.args[:1])
            every("compared", *node.args[1:])
        else:
            every(kind, *ast.iter_child_nodes(node))

    def every(kind: str, *nodes: ast.AST | None) -> None:
        for one in nodes:
            visit(one, kind)

    def note(name: str, member: str, kind: str) -> None:
        found[kind].add(name)
        found["annotated"].add(name)
        if kind == "running":
            found["members"].add(member)

    for node in nodes:
        visit(node, "running")
    return _Names(**{kind: frozenset(names) for kind, names in found.items()})


def _imports(nodes: Iterable[ast.AST], package: tuple[str, ...]) -> Iterator[_Import]:
    """Imports of this package's modules, wherever they stand.

    Args:
        package: folders of the file below the package, which relative imports count from.
    """
    for node in (one for top in nodes for one in ast.walk(top)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                first, *rest = alias.name.split(".")
                if first == "im2win":
                    yield alias.asname or first, tuple(rest), ""
        elif isinstance(node, ast.ImportFrom):
            module = tuple(node.module.split(".")) if node.module else ()
            if node.level:
                module = ("im2win", *package[: len(package) - node.level + 1], *module)
            if module[:1] == ("im2win",):
                for alias in node.names:
                    yield alias.asname or alias.name, module[1:], alias.name


def _defined(statement: ast.stmt) -> frozenset[str]:
    """The names that a statement of a module binds, if that is all it does; empty for any other statement."""
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return frozenset({statement.name})
    if isinstance(statement, (ast.Import, ast.ImportFrom)):
        return frozenset(alias.asname or alias.name.partition(".")[0] for alias in statement.names)
    targets: list[ast.expr] = statement.targets if isinstance(statement, ast.Assign) else []
    if isinstance(statement, (ast.AnnAssign, ast.AugAssign)):
        targets = [statement.target]
    flat = [one for target in targets for one in (target.elts if isinstance(target, (ast.Tuple, ast.List)) else [target])]
    return frozenset(one.id for one in flat if isinstance(one, ast.Name)) if all(isinstance(one, ast.Name) for one in flat) else frozenset()


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


class _File:
    """What a file's text uses and imports. Its syntax tree, which is large, is not held."""

    def __init__(self, text: str, package: tuple[str, ...]) -> None:
        body = ast.parse(text).body
        self.names = _names(body)
        self.imports = list(_imports(body, package))
        self.annotations_run = "from __future__ import annotations" not in text
        self.package = package


class _Statements:
    """A file's text, statement by statement."""

    def __init__(self, text: str) -> None:
        self.body = ast.parse(text).body
        self.defined = [_defined(statement) for statement in self.body]
        self.names = [_names([statement]) for statement in self.body]


_file = functools.lru_cache(maxsize=1024)(_File)
_statements = functools.lru_cache(maxsize=64)(_Statements)


# --- the tables --------------------------------------------------------------------------------------------------------


def _table(text: str) -> list[ast.Call]:
    """The rows of the table in a file's text."""
    for statement in ast.parse(text).body:
        if TABLE in _defined(statement) and isinstance(statement, (ast.Assign, ast.AnnAssign)) and isinstance(statement.value, ast.Tuple):
            return [row if isinstance(row, ast.Call) else _unreadable(row) for row in statement.value.elts]
    raise ValueError(f"the table of algorithms or of schedules must be a tuple named {TABLE}.")


def _unreadable(row: ast.expr) -> ast.Call:
    shapes = "Schedule(ALGORITHMS[name], schedule) or Algorithm(name)"
    raise ValueError(f"line {row.lineno} of a table: a row must be a call with literal names, as {shapes}.")


def _literal(row: ast.expr, node: ast.expr | None) -> str:
    if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
        _unreadable(row)
    assert isinstance(node, ast.Constant)
    return str(node.value)


@functools.lru_cache(maxsize=8)
def _algorithm_rows(text: str) -> dict[str, ast.Call]:
    return {_literal(row, row.args[0] if row.args else None): row for row in _table(text)}


@functools.lru_cache(maxsize=8)
def _schedule_rows(text: str) -> dict[str, ast.Call]:
    """Rows by method. A row is a call of `Schedule`, or of a function of the module that makes one for an algorithm's name."""
    functions = {one.name: one for one in ast.parse(text).body if isinstance(one, ast.FunctionDef)}
    found = {}
    for row in _table(text):
        first = row.args[0] if row.args else None
        algorithm = _literal(row, first.slice if isinstance(first, ast.Subscript) else first)
        made = row
        if isinstance(row.func, ast.Name) and row.func.id in functions:
            calls = [one for one in ast.walk(functions[row.func.id]) if isinstance(one, ast.Call) and isinstance(one.func, ast.Name)]
            made = next((one for one in calls if isinstance(one.func, ast.Name) and one.func.id == "Schedule"), row)
        found[f"{algorithm}/{_literal(row, made.args[1] if len(made.args) > 1 else None)}"] = row
    return found


# --- the search --------------------------------------------------------------------------------------------------------


class _Search:
    """The search for one method's source."""

    def __init__(self, area: Area, method: str) -> None:
        self.area = area
        self.known = area.making | area.choosing
        self.texts: dict[str, str] = {}
        rows = _schedule_rows(self._text(SCHEDULES))
        if method not in rows:
            raise ValueError(f"`method` (={method!r}) must be one of {', '.join(rows)}.")
        row, algorithms = rows[method], _algorithm_rows(self._text(ALGORITHMS))
        words = {one.value for one in ast.walk(row) if isinstance(one, ast.Constant)}
        named = [one for name, one in algorithms.items() if name in words or name == method.partition("/")[0]]
        self.rows: dict[str, list[ast.Call]] = {SCHEDULES: [row], ALGORITHMS: named}
        self.whole: set[str] = set()
        self.statements: dict[str, dict[int, ast.stmt]] = {}
        self.asked: set[tuple[str, str]] = set()
        self.left: list[tuple[str, str]] = [(path, "") for path in area.begin]

    def found(self) -> dict[Path, list[ast.stmt] | None]:
        """See `parts`."""
        while self.left:
            path, name = self.left.pop()
            if (path, name) in self.asked or path in self.whole:
                continue
            self.asked.add((path, name))
            self._packages(path)
            if name and (path in self.area.choosing or path in _OF_MANY):
                self._take(path, *name.split("."))
            else:
                self.whole.add(path)
                self._follow(path, self._file(path).imports, self._file(path).names)
        found = {path: [one for _, one in sorted(statements.items())] for path, statements in self.statements.items()}
        return {self.area.root / path: None if path in self.whole else found[path] for path in {**found, **dict.fromkeys(self.whole)}}

    def _text(self, path: str) -> str:
        if path not in self.texts:
            self.texts[path] = _text(self.area.root / path)
        return self.texts[path]

    def _file(self, path: str) -> _File:
        return _file(self._text(path), tuple(path.split("/")[:-1]))

    def _packages(self, path: str) -> None:
        """Importing a module runs the packages that it is in."""
        folders = path.split("/")[:-1]
        self._reach("__init__.py", "")
        for count in range(len(folders)):
            self._reach("/".join([*folders[: count + 1], "__init__.py"]), "")

    def _take(self, path: str, name: str, member: str = "") -> None:
        """The statements of a file that define a name, and those that do more than define names.

        Args:
            member: the attribute that is used, if only one is: if the name is a module's, that name of the module.
        """
        file, every, taken = self._file(path), _statements(self._text(path)), self.statements.setdefault(path, {})
        for place, (statement, defined, names) in enumerate(zip(every.body, every.defined, every.names, strict=True)):
            if place in taken or (defined and name not in defined) or _is_text(statement):
                continue
            imports = list(_imports([statement], file.package))
            if isinstance(statement, (ast.Import, ast.ImportFrom)):  # says only where a name is from
                self._follow(path, [one for one in imports if one[0] == name], member=member)
                continue
            taken[place] = statement
            if TABLE in defined and path in self.rows:
                rows = self.rows[path]
                taken[place], names = ast.Assign([ast.Name(TABLE)], ast.Tuple([*rows])), _names(rows)
            self.left += [(path, one) for one in names.members | (names.annotated if file.annotations_run else frozenset())]
            self.left += [(path, one) for one in names.choosing if not self._asks(path) or not self._chooses(file, one)]
            self._follow(path, imports)

    def _chooses(self, file: _File, name: str) -> bool:
        """Whether a name is imported from a file that chooses, or is one."""
        return any(self._resolved(one)[0] in self.area.choosing for one in file.imports if one[0] == name)

    def _follow(self, path: str, imports: Iterable[_Import], names: _Names | None = None, member: str = "") -> None:
        """Follows imports of a file.

        Args:
            names: those that the file uses; None for imports that are known to be used where kernels are made.
            member: the only name that is used of an imported module; "" if that is not known.
        """
        for one in imports:
            target, taken = self._resolved(one)
            running = names is None or one[0] in names.running | names.compared
            if names is not None and not running and one[0] not in names.choosing:
                if one[0] in names.annotated and not self._file(path).annotations_run:
                    continue
                running = True  # used nowhere: imported for what the module does
            if target in self.area.choosing and self._asks(path) and (not running or not taken):
                continue
            self._reach(target, taken or member)

    def _asks(self, path: str) -> bool:
        """Whether a file is an interface."""
        *folders, name = path.split("/")
        return path not in self.area.choosing and (not _INTERFACES.isdisjoint(folders) or name == "family.py")

    def _resolved(self, one: _Import) -> tuple[str, str]:
        """The file that an import reads, "" for one of no interest, and the name in it that is taken; "" for the whole module."""
        _, module, taken = one
        if taken and taken != "*":
            for path in ("/".join([*module, f"{taken}.py"]), "/".join([*module, taken, "__init__.py"])):
                if path in self.known:
                    return path, ""
        for path in ("/".join(module) + ".py", "/".join([*module, "__init__.py"])):
            if path in self.known:
                return path, "" if taken == "*" else taken
        return "", ""

    def _reach(self, path: str, name: str) -> None:
        if path in self.known:
            self.left.append((path, name))
