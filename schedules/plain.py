"""Tiles as mappings of plain values, for tuning records and manifests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields
from typing import Any, ClassVar, TypeVar

Made = TypeVar("Made", bound="PlainTile")


class PlainTile:
    """Base of tiles: frozen dataclasses whose fields are integers, strings and flags."""

    LATER: ClassVar[tuple[str, ...]] = ()
    """Fields that are younger than some records: at their default they are left out, and may be missing."""

    @classmethod
    def _defaults(cls) -> dict[str, Any]:
        return {field.name: field.default for field in fields(cls) if field.default is not MISSING}  # type: ignore[arg-type]

    def as_dict(self) -> dict[str, Any]:
        """The tile as a mapping of field names to plain values. Fields in `LATER` are left out where they have their default."""
        values: dict[str, Any] = asdict(self)  # type: ignore[call-overload]
        return {name: value for name, value in values.items() if name not in self.LATER or value != self._defaults()[name]}

    @classmethod
    def from_dict(cls: type[Made], values: Mapping[str, Any]) -> Made:
        """The inverse of `as_dict`.

        Raises:
            ValueError: a field is missing, unknown or of the wrong type.
        """
        names = {field.name: field.type for field in fields(cls)}  # type: ignore[arg-type]
        given, values = values, {**{name: cls._defaults()[name] for name in cls.LATER}, **values}
        if set(values) != set(names):
            raise ValueError(f"tile: fields {sorted(given)} must be {sorted(names)}.")
        for name, kind in names.items():
            good = isinstance(values[name], str) if kind == "str" else isinstance(values[name], int) and not isinstance(values[name], bool)
            if not good:
                raise ValueError(f"tile: `{name}` (={values[name]!r}) must be of type {kind}.")
        return cls(**values)
