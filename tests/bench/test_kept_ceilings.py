"""Ceilings that explanations keep: measured again when they are old, of other versions, or lack a type."""

from __future__ import annotations

import json
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

from im2win.bench import ceilings
from im2win.bench.ceilings import Ceilings
from im2win.spec.dtypes import ELEMENT_TYPES

INT8 = ELEMENT_TYPES["int8"].ceilings[0]


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """The types of each measurement."""
    calls: list[tuple[str, ...]] = []

    def measure(threads: int, repeats: int = 15, seconds_warmup: float = 0.5, dtypes: Collection[str] = ()) -> Ceilings:
        calls.append(tuple(dtypes))
        return Ceilings(100.0 + len(calls), 10.0, {ELEMENT_TYPES[dtype].ceilings[0]: 400.0 for dtype in dtypes if dtype != "float32"})

    monkeypatch.setenv("IM2WIN_CACHE", str(tmp_path))
    monkeypatch.setattr(ceilings, "measure", measure)
    monkeypatch.setattr(ceilings.product_peak, "fastest", lambda dtype, machine: None if dtype == "float32" else "an instruction")
    return calls


def kept_file(folder: Path) -> Path:
    [path] = folder.glob("*/ceilings.json")
    return path


def test_measured_once(measured: list[tuple[str, ...]]) -> None:
    first = ceilings.kept(1, ["float32"])
    assert ceilings.kept(1, ["float32"]) == ceilings.kept(1) == first == Ceilings(101.0, 10.0) and len(measured) == 1
    assert ceilings.kept(2, ["float32"]).fma_gflops == 102.0, "another number of threads is another machine"


def test_a_type_that_is_missing_is_measured_and_the_others_stay(measured: list[tuple[str, ...]], tmp_path: Path) -> None:
    ceilings.kept(1)
    assert ceilings.kept(1, ["int8"]).products == {INT8: 400.0} and measured == [(), ("int8",)]
    ceilings.kept(1, ["bfloat16"])
    assert INT8 in json.loads(kept_file(tmp_path).read_text())["ceilings"] and len(measured) == 3
    assert len(ceilings.kept(1, ["int8", "bfloat16"]).products) == 2 and len(measured) == 3


@pytest.mark.parametrize(
    "change",
    [
        {"made": time.time() - 8 * 86400}, {"made": time.time() + 3600}, {"made": "today"}, {"versions": ["0.0", "0.0"]},
        {"ceilings": {"fma_gflops": -1.0, "copy_gbs": 10.0}}, {"ceilings": {"fma_gflops": 1.0}}, {"ceilings": []},
    ],
)  # fmt: skip
def test_what_is_old_or_no_ceiling_is_measured_again(measured: list[tuple[str, ...]], tmp_path: Path, change: dict[str, Any]) -> None:
    ceilings.kept(1)
    path = kept_file(tmp_path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    assert ceilings.kept(1).fma_gflops == 102.0


def test_without_a_folder_they_are_measured(measured: list[tuple[str, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("IM2WIN_CACHE", str(tmp_path / "file" / "cache"))
    assert ceilings.kept(1).fma_gflops == 101.0
