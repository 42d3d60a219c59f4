"""A plugin of pytest that notes, line by line in a file, what ran and what failed, so that it is known of a process that died as well."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

EVENTS, TREE = "IM2WIN_MUTATION_EVENTS", "IM2WIN_MUTATION_TREE"  # environment variables: the file, and where the package must lie
_LONGEST = 400  # characters of a reason


def _note(**event: Any) -> None:
    with open(os.environ[EVENTS], "a", encoding="utf-8") as file:
        file.write(json.dumps(event) + "\n")


def pytest_configure(config: pytest.Config) -> None:
    """Refuses to test another copy of the source."""
    from importlib.util import find_spec

    spec = find_spec("im2win")
    where = Path(str(spec.origin)).resolve() if spec else None
    if where is None or not where.is_relative_to(Path(os.environ[TREE]).resolve()):
        raise pytest.UsageError(f"im2win is imported from {where}, not from {os.environ[TREE]}")


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        _note(kind="not collected", test=report.nodeid, reason=_last_line(report.longreprtext))


def pytest_runtest_logstart(nodeid: str) -> None:
    _note(kind="started", test=nodeid)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        _note(kind="failed", test=report.nodeid, reason=_reason(report))
    elif report.skipped and not hasattr(report, "wasxfail"):
        _note(kind="skipped", test=report.nodeid)


def _reason(report: pytest.TestReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    return str(crash.message).splitlines()[0][:_LONGEST] if crash is not None and crash.message else _last_line(report.longreprtext)


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].strip()[:_LONGEST] if lines else ""
