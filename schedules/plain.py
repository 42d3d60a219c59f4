"""Tiles as plain values, for records and manifests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any, TypeVar

Made = TypeVar("Made", bound="PlainTile")


class PlainTile:
    """What frozen dataclasses of integers, words and flags have in common."""

    def as_dict(self) -> dict[str, Any]:
        """The tile as plain values, for a record or a manifest."""
        return asdict(self)  # type: ignore[call-overload, no-any-return]

    @classmethod
    def from_dict(cls: type[Made], values: Mapping[str, Any]) -> Made:
        """The inverse of `as_dict`.

        Raises:
            ValueError: a field is missing, unknown or of the wrong type.
        """
        names = {field.name: field.type for field in fields(cls)}  # type: ignore[arg-type]
        if set(values) != set(names):
            raise ValueError(f"tile: fields {sorted(values)} must be {sorted(names)}.")
        for name, kind in names.items():
            good = isinstance(values[name], str) if kind == "str" else isinstance(values[name], int) and not isinstance(values[name], bool)
            if not good:
                raise ValueError(f"tile: `{name}` (={values[name]!r}) must be of type {kind}.")
        return cls(**values)
