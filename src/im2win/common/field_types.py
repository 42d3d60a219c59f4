"""Checks that the fields of a dataclass, read from a file that anyone may have written, hold values of their declared types."""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Iterator
from functools import lru_cache
from reprlib import repr as shortened
from typing import Any, Union, get_args, get_origin, get_type_hints


def check_fields(value: Any, name: str = "") -> None:
    """Checks every field of a dataclass instance against its declared type, dataclasses in lists and dictionaries included.

    Types may be `str`, `int`, `float`, `bool`, `None`, `Any`, `list[T]`, `tuple[T, ...]`, `dict[str, T]`, unions and dataclasses. A float
    may be stored as an integer and must be finite.

    Args:
        value: an instance of a dataclass.
        name: what the instance is called in messages, such as "layers[2]"; "" for the outermost.

    Raises:
        ValueError: a field has another type. The message names the field, its value and the type.
    """
    for wrong in _wrong(value, type(value), name):
        raise ValueError(wrong)


@lru_cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _wrong(value: Any, kind: Any, name: str) -> Iterator[str]:
    """A message for each value that does not have its type."""
    if isinstance(kind, type) and dataclasses.is_dataclass(kind) and isinstance(value, kind):
        for field in dataclasses.fields(kind):
            yield from _wrong(getattr(value, field.name), _hints(kind)[field.name], f"{name}.{field.name}" if name else field.name)
    elif get_origin(kind) in (list, tuple) and isinstance(value, get_origin(kind)):
        for place, one in enumerate(value):
            yield from _wrong(one, get_args(kind)[0], f"{name}[{place}]")
    elif get_origin(kind) is dict and isinstance(value, dict):
        for key, one in value.items():
            yield from _wrong(one, get_args(kind)[1], f"{name}[{shortened(key)}]")
    elif not _has(value, kind):
        yield f"`{name}` (={shortened(value)}) must be {_shown(kind)}."


def _has(value: Any, kind: Any) -> bool:
    """Whether a value that holds no others has a type."""
    if get_origin(kind) in (Union, types.UnionType):
        return any(not list(_wrong(value, one, "")) for one in get_args(kind))
    if kind is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return kind is Any or (isinstance(kind, type) and isinstance(value, kind))


def _shown(kind: Any) -> str:
    if get_origin(kind) in (Union, types.UnionType):
        return " or ".join(_shown(one) for one in get_args(kind))
    names = {float: "a finite number", int: "an integer", str: "a string", bool: "true or false", types.NoneType: "null"}
    if kind in names:
        return names[kind]
    return "a list" if get_origin(kind) is list else "an object"
