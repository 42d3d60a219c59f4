"""What a CPU is known by."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from im2win.device import cpu


@pytest.fixture
def no_answers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    cpu._facts.cache_clear()
    monkeypatch.setattr(cpu, "_asked", lambda: {"brand_raw": "as asked", "flags": ["avx2"]})
    yield
    cpu._facts.cache_clear()


def test_linux_says_what_py_cpuinfo_says() -> None:
    """Records and kept facts name the brand, and of the flags these are looked for."""
    info, looked_for = cpu._asked(), {*cpu._VECTORS, *cpu.FEATURES.values()}
    brand, flags = cpu._facts()
    assert brand == info.get("brand_raw", "unknown cpu") and flags & looked_for == looked_for & set(info.get("flags", ()))


@pytest.mark.usefixtures("no_answers")
@pytest.mark.parametrize("text", [
    "model name\t: Some CPU @ 2.50GHz\nflags\t\t: fpu avx2 avx512f\n\nmodel name\t: Another\nflags\t\t: fpu\n",
    "flags : avx512f fpu avx2\npower management:\nmodel name : Some CPU @ 2.50GHz",
])  # fmt: skip
def test_the_first_cpu_of_linux_table(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (table := tmp_path / "cpuinfo").write_text(text)
    monkeypatch.setattr(cpu, "_CPUINFO", table)
    assert cpu._facts() == ("Some CPU @ 2.50GHz", frozenset({"fpu", "avx2", "avx512f"}))


@pytest.mark.usefixtures("no_answers")
@pytest.mark.parametrize("text", [None, "", "model name : Some CPU", "processor : 0\nFeatures : fp asimd\n", "flags : fpu\nmodel name :\n"])
def test_without_brand_and_flags_py_cpuinfo_is_asked(text: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arm's tables have neither, and other systems have no table."""
    if text is not None:
        (tmp_path / "cpuinfo").write_text(text)
    monkeypatch.setattr(cpu, "_CPUINFO", tmp_path / "cpuinfo")
    assert cpu._facts() == ("as asked", frozenset({"avx2"}))
