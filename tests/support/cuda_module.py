"""A stand-in for a compiled CUDA library."""

from __future__ import annotations

from typing import Any


class Module:
    """A library with these functions, which note their calls."""

    def __init__(self, *names: str) -> None:
        self.names, self.calls = names, list[tuple[Any, ...]]()

    def implements_function(self, name: str) -> bool:
        return name in self.names

    def __getitem__(self, name: str) -> Any:
        assert name in self.names
        return lambda *arguments: self.calls.append((name, *arguments))
