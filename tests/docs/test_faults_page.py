"""docs/faults.md lists the faults that tests inject; nobody types their number."""

from __future__ import annotations

from collections import Counter

import injected_faults
import pytest
from injected_faults import PAGE, Fault, FaultError, faults, of_source, page


def test_the_page_is_what_the_markers_say() -> None:
    """`python tests/support/injected_faults.py --write` mends it."""
    text = PAGE.read_text(encoding="utf-8")
    assert page(text) == text


def test_there_are_many_kinds_and_each_is_marked_once() -> None:
    kinds = Counter(fault.kind for fault in faults())
    assert len(kinds) >= 40 and [kind for kind, count in kinds.items() if count > 1] == []
    assert len({fault.subject for fault in faults()}) < 10


def test_markers_are_read() -> None:
    source = """
@pytest.mark.fault("disks", "a disk is full")
@pytest.mark.parametrize("a", [1, pytest.param(2, marks=pytest.mark.fault("disks", "a disk is gone"))])
def test_a() -> None: ...

class TestB:
    @pytest.mark.slow
    def test_b(self) -> None: ...
"""
    assert list(of_source(source, "f.py")) == [
        Fault("disks", "a disk is full", "f.py", "test_a"), Fault("disks", "a disk is gone", "f.py", "test_a"),
    ]  # fmt: skip
    with pytest.raises(FaultError, match=r"f\.py: the marker `fault` of test_c must have a subject and a kind"):
        list(of_source('@pytest.mark.fault("disks")\ndef test_c() -> None: ...\n', "f.py"))


def test_a_changed_marker_changes_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Fault("disks", "a disk is full", "tests/f.py", "test_a")
    monkeypatch.setattr(injected_faults, "faults", lambda: [one])
    text = page(PAGE.read_text(encoding="utf-8"))
    assert "1 kinds of faults." in text and "| disks | a disk is full | `tests/f.py::test_a` |" in text
