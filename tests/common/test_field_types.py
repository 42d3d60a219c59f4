"""Fields of dataclasses that were read from files: every declared type, and messages that name field, value and type."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from im2win.bench.memory_result import LayerMemory, MemoryResult
from im2win.bench.results import Result, ResultError, Row
from im2win.common.field_types import check_fields


@dataclass
class Inner:
    number: float = 1.0
    maybe: int | None = None


@dataclass
class Outer:
    name: str = "a"
    on: bool = True
    anything: Any = None
    inner: list[Inner] = field(default_factory=list)
    table: dict[str, Inner] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)


def test_what_has_its_types_passes() -> None:
    check_fields(Outer(inner=[Inner(2), Inner(0.5, 3)], table={"a": Inner()}, counts={"b": 1}, anything=[object()]))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (Outer(name=3), r"`name` \(=3\) must be a string\."),
        (Outer(on=1), r"`on` \(=1\) must be true or false\."),
        (Outer(counts=[]), r"`counts` \(=\[\]\) must be an object\."),
        (Outer(counts={"b": True}), r"`counts\['b'\]` \(=True\) must be an integer\."),
        (Outer(inner={}), r"`inner` \(=\{\}\) must be a list\."),
        (Outer(inner=[Inner(), Inner("1")]), r"`inner\[1\]\.number` \(='1'\) must be a finite number\."),
        (Outer(inner=[Inner(float("nan"))]), r"`inner\[0\]\.number` \(=nan\) must be a finite number\."),
        (Outer(table={"a": Inner(maybe=1.5)}), r"`table\['a'\]\.maybe` \(=1.5\) must be an integer or null\."),
        (Outer(table={"a": {}}), r"`table\['a'\]` \(=\{\}\) must be an object\."),
    ],
)  # fmt: skip
def test_the_message_names_field_value_and_type(value: Outer, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        check_fields(value)


def test_result_files_with_other_types_are_refused(tmp_path: Path) -> None:
    row = Row("conv1", "n1-c8x8x8-k8x1x1", ours_ms="fast")  # type: ignore[arg-type]
    result = Result("demo", "float32", 1, "cpu", "A CPU", 2, {}, "abc", "2026-01-02", {"fma_gflops": 1, "copy_gbs": 1}, [row])
    with pytest.raises(ResultError, match=r"r\.json: `layers\[0\]\.ours_ms` \(='fast'\) must be a finite number or null\."):
        Result.load(result.save(tmp_path / "r.json"))
    memory = MemoryResult("demo", "float32", 1, "gpu", "A GPU", {}, "abc", "2026-01-02", [LayerMemory("a", "b", 1, {"direct": 0.5})])  # type: ignore[dict-item]
    with pytest.raises(ResultError, match=r"`layers\[0\]\.formula_bytes\['direct'\]` \(=0\.5\) must be an integer\."):
        MemoryResult.load(memory.save(tmp_path / "memory-r.json"))
