"""What frozen dataclasses remember of themselves: derived values and their hash. Equality, `repr`, copies and pickles show fields only."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeVar

T = TypeVar("T")

if TYPE_CHECKING:
    import functools

    derived = functools.cached_property
else:

    class derived:
        """A property that is computed once. `functools.cached_property` takes a lock before Python 3.12, which is half of its time."""

        def __init__(self, function):
            self._function, self._name, self.__doc__ = function, function.__name__, function.__doc__

        def __get__(self, instance, owner=None):
            if instance is None:
                return self
            value = instance.__dict__[self._name] = self._function(instance)
            return value


def hashed_once(cls: type[T]) -> type[T]:
    """Decorates a frozen dataclass whose values are keys of caches: each computes its hash once.

    Hashes of strings differ between processes, so that copies and pickles are made of the fields alone.
    """
    made: Any = cls
    compute = made.__hash__

    def remembered(self: Any) -> int:
        known: int | None = self.__dict__.get("_hash")
        if known is None:
            known = self.__dict__["_hash"] = compute(self)
        return known

    def state(self: Any) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    made.__hash__, made.__getstate__ = remembered, state
    return cls
