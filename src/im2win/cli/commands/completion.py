"""What a shell may complete: names that im2win knows. Where none fits, the shell completes the names of files."""

from __future__ import annotations

from collections.abc import Callable, Iterable


def choices(*names: str) -> Callable[[str], list[str]]:
    """The completion of an option or argument with these values."""
    return lambda incomplete: _fitting(names, incomplete)


def suites(incomplete: str) -> list[str]:
    """The named suites."""
    from im2win.spec.suites import suite_names

    return _fitting(suite_names(), incomplete)


def algorithms(incomplete: str) -> list[str]:
    """The algorithms, and auto."""
    from im2win.registry.schedules import SCHEDULES

    return _fitting(["auto", *SCHEDULES], incomplete)


def _fitting(names: Iterable[str], incomplete: str) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]
