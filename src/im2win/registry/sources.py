"""Digests of the source that generates each method's kernels, and of the source that selects untuned layers' tiles, by target.

Equal digests mean equal kernels, or equal default tiles, whatever else has changed. The reverse does not hold: code may change and still
generate the same kernel. `im2win.records.emission` tells whether it does.
"""

from __future__ import annotations

import ast
import functools
import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar, cast

from im2win.codegen.canonical_cuda import tokens
from im2win.registry import method_source
from im2win.registry.kept_digests import kept

ROOT = Path(__file__).parent.parent
DIGITS = 16
TARGETS = ("cpu", "cuda")

# What generates kernels for a target, as paths below the package. Files that only choose tiles (`_CHOICE`) do not count.
_SHARED = (
    "spec/*.py", "numerics/*.py", "schedules/*.py", "common/caching.py", "common/tvm_hooks.py", "codegen/workspace.py",
    "registry/algorithms.py", "registry/schedules.py", "records/emission.py",
)  # fmt: skip
_GENERATORS = {
    "cpu": (
        *_SHARED, "packing/cpu_*.py", "packing/winograd.py", "compute/*.py", "device/arm.py", "device/cpu.py", "codegen/llvm.py",
        "registry/cpu_schedules.py", "schedules/cpu/*.py", "schedules/cpu_depthwise/*.py", "schedules/cpu_winograd/*.py",
        "schedules/cpu_dot/*.py",
    ),
    "cuda": (
        *_SHARED, "packing/*.py", "compute/*.py", "device/gpu.py", "codegen/*.py", "registry/cuda_lowering.py", "emulator/*.py",
        "reconstruct/*.py", "reconstruct/*/*.py", "schedules/cuda/**/*", "schedules/studies/winograd_tc/*",
    ),
}  # fmt: skip
# Of these folders, what only CPUs' kernels are made with, and what compiles a finished source to machine code. `codegen/cuda.py` takes
# exceptions and a hash function from `codegen/llvm.py`.
_NOT_OF = {"cpu": frozenset[str](), "cuda": frozenset({"packing/cpu_dot.py", "codegen/llvm.py", "codegen/nvrtc.py"})}
_DEFINITIONS = ("compute/*.py",)
_BEGIN = ("records/emission.py", "codegen/")  # which file and folder every method's kernels come from
_CHOICE = {"legality", "model", "objective", "space"}  # of files and of folders
_LISTS = {"spec/suites.py", "spec/captured_layers.py"}  # say which layers there are, and nothing of how one is computed
_SELECTORS = ("registry/backends.py", "registry/interface.py", "registry/{target}_backend.py", "registry/ranking.py", "records/merit.py")
_LOOK_UP = ("records/estimates.py", "records/judge.py", "records/likeness.py", "records/lookup.py", "records/tiers.py")
_RUNTIME = {"cpu": ("codegen/pool/*.[ch]",), "cuda": ()}  # runs kernels' loops, and is no part of them
_EXPORT = ("export/c_abi/*.py",)
_MODELS = ("frontends/models/*.py", "frontends/onnx/*.py")  # compile what is no convolution
_NOT_RUN = ("ctx", "kind", "type_comment")  # fields of a syntax tree that say nothing more, or nothing at all
_BLOCKS = ("body", "orelse", "finalbody")  # of statements, where it is no expression
F = TypeVar("F", bound=Callable[..., str])


def _kept(digest: F) -> F:
    """Decorates what computes a digest of the source as it is: once a process, and from the cache folder where another one did."""

    @functools.cache
    def found(*names: Any) -> str:
        return kept(ROOT, " ".join((digest.__name__, *names)), lambda: digest(*names))

    return cast("F", functools.update_wrapper(found, digest))


def files(target: str) -> list[Path]:
    """The files that generate kernels for a target, "cpu" or "cuda"."""
    return [path for path in _generators(target) if not chooses(path.relative_to(ROOT))]


def parts(target: str, method: str) -> dict[Path, list[ast.stmt] | None]:
    """What can take part in the kernels of a method on a target: statements by file; None where the whole file can.

    A file with device functions counts if a Python file of its folder does.

    Raises:
        ValueError: the registry has no row of that name.
    """
    making = _making(target)
    names = {path.relative_to(ROOT).as_posix() for path in making if path.suffix == ".py"}
    every = {path.relative_to(ROOT).as_posix() for path in _generators(target) if path.suffix == ".py"}
    begin = frozenset(name for name in names if name.startswith(_BEGIN))
    area = method_source.Area(ROOT, begin, frozenset(names), frozenset(every - names))
    found = method_source.parts(area, method)
    folders = {path.parent for path in found}
    return {**found, **dict.fromkeys(path for path in making if path.suffix != ".py" and path.parent in folders)}


def _making(target: str) -> list[Path]:
    """The files that are searched for what makes a method's kernels; a row's definition may be used on either target."""
    return sorted({*files(target), *_found(_DEFINITIONS)})


def choice_files(target: str) -> list[Path]:
    """The files that select the default tile of a problem for a target, and that say which records beat it."""
    return sorted({*_generators(target), *_found(path.format(target=target) for path in _SELECTORS)})


def _generators(target: str) -> list[Path]:
    return [path for path in _found(_GENERATORS[target]) if path.relative_to(ROOT).as_posix() not in _NOT_OF[target]]


def _found(patterns: Iterable[str]) -> list[Path]:
    found = {path for pattern in patterns for path in ROOT.glob(pattern)}
    return sorted(path for path in found if path.suffix in (".py", ".hpp") and path.relative_to(ROOT).as_posix() not in _LISTS)


def chooses(path: Path) -> bool:
    """Whether a file, given below the package, only chooses tiles."""
    return not _CHOICE.isdisjoint((*path.parent.parts, path.stem))


@functools.cache
def methods() -> tuple[str, ...]:
    """The methods that the registry has a row for, in order, such as "direct/tiled"."""
    return tuple(method_source.keys(ROOT))


@_kept
def code_digest(target: str, method: str) -> str:
    """Digest of what can be executed to make a method's kernels for a target. While it is equal, all of them are equal.

    What counts is found by following imports (`im2win.registry.method_source`). Comments, docstrings, layout and the files' names do not.

    Args:
        method: algorithm and schedule, a row of the registry, such as "direct/tiled".

    Raises:
        ValueError: there is no such row.
    """
    return _together(_of_text(_python(path)) if part is None else _of_tree(part) for path, part in parts(target, method).items())


def is_current(target: str, method: str, digest: str) -> bool:
    """Whether a digest is today's `code_digest`; False for a method that has no row any more."""
    return method in methods() and digest == code_digest(target, method)


@_kept
def target_digest(target: str) -> str:
    """Digest of what the generator's files of a target execute, whatever the method."""
    return _executed(_making(target))


@_kept
def choice_digest(target: str) -> str:
    """Digest of what the files execute that select default tiles: while it is equal, every problem's default tile is."""
    return _executed(choice_files(target))


@_kept
def look_up_digest(target: str) -> str:
    """Digest of what the files execute that choose algorithms and tiles: among shipped records, and where none has earned its place."""
    return _executed([*choice_files(target), *_found(_LOOK_UP)])


@_kept
def runtime_digest(target: str) -> str:
    """Digest of what runs a target's kernels, and takes part in their times; "" if nothing of this package does."""
    paths = sorted(path for pattern in _RUNTIME[target] for path in ROOT.glob(pattern))
    return _executed(paths) if paths else ""


@_kept
def exporting_digest() -> str:
    """Digest of what the files execute that make object files and C of kernels."""
    return _executed(_found(_EXPORT))


@_kept
def model_digest() -> str:
    """Digest of what the files execute that compile a model's other operators."""
    return _executed(_found(_MODELS))


def _executed(paths: Iterable[Path]) -> str:
    return combined(map(_python, paths))


def _python(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.suffix == ".py" else cpp(path)


def cpp(path: Path) -> str:
    """A file of device functions as a Python constant, comments left out."""
    return f"DEVICE = {' '.join(tokens(path.read_text(encoding='utf-8')))!r}"


def combined(sources: Iterable[str]) -> str:
    """Digest of what Python sources execute, in any order."""
    return _together(map(_of_text, sources))


def _together(each: Iterable[str]) -> str:
    return hashlib.sha256("".join(sorted(each)).encode()).hexdigest()[:DIGITS]


@functools.lru_cache(maxsize=1024)
def _of_text(source: str) -> str:
    return hashlib.sha256(_plain(ast.parse(source)).encode()).hexdigest()


def _of_tree(statements: list[ast.stmt]) -> str:
    return hashlib.sha256(_plain(ast.Module(statements, [])).encode()).hexdigest()


def _is_text(statement: Any) -> bool:
    """Whether a statement is only a string: the docstring of a function, class, module or attribute."""
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant) and isinstance(statement.value.value, str)


def _plain(node: Any) -> str:
    """A syntax tree as text, the same for every version of Python that can run it: fields that are empty or say only where, left out."""
    if isinstance(node, ast.AST):
        fields = []
        for name in sorted(node._fields):
            value = getattr(node, name, None) if name not in _NOT_RUN else None
            if name in _BLOCKS and isinstance(value, list):
                value = [one for one in value if not _is_text(one)]
            if value is not None and value != []:
                fields.append(f"{name}={_plain(value)}")
        return f"{type(node).__name__}({','.join(fields)})"
    if isinstance(node, list):
        return f"[{','.join(map(_plain, node))}]"
    return repr(node)
