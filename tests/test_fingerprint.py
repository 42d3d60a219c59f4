"""Fingerprints: what a kernel is made of changes them, how it is written down does not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from im2win.algorithms import ALGORITHMS
from im2win.fingerprint import _cuda_sources, _fused_sources, _persistent_sources, _streamed_sources, code_hash, fingerprint
from im2win.schedules import cuda

CODE = '''
"""A module."""
SIZE: int = 4

def area(width, *, height=1.5):
    """Of a rectangle."""
    total = [w for w in (width,) if w is not None]
    return f"{total[0] * height:.1f}"
'''


@pytest.mark.parametrize(
    "same",
    [
        CODE.replace("A module.", "Another text, longer."),
        CODE.replace('"""Of a rectangle."""', "# no docstring"),
        CODE.replace("height=1.5", "height = 1.50"),
        CODE.replace('f"{total[0] * height:.1f}"', "(\n        f'{(total[0] * height):.1f}'\n    )"),
    ],
)
def test_wording_and_layout_do_not_count(same: str) -> None:
    assert same != CODE and code_hash({"m": same}) == code_hash({"m": CODE})


@pytest.mark.parametrize(
    "other",
    [
        CODE.replace("= 4", "= 5"),
        CODE.replace("1.5", "None"),
        CODE.replace("* height", "+ height"),
        CODE.replace("is not None", "is None"),
        CODE.replace("(width,)", "[width]"),
        CODE.replace(":.1f", ":.2f"),
        CODE.replace("return", "yield"),
    ],
)
def test_everything_that_runs_counts(other: str) -> None:
    assert other != CODE and code_hash({"m": other}) != code_hash({"m": CODE})


def test_modules_count_by_name_in_any_order() -> None:
    assert code_hash({"a": "x = 1", "b": "x = 2"}) == code_hash({"b": "x = 2", "a": "x = 1"})
    assert code_hash({"a": "x = 1", "b": "x = 2"}) != code_hash({"a": "x = 2", "b": "x = 1"})


def test_the_same_on_every_python() -> None:
    """Records made with one version of Python apply with another."""
    assert code_hash({"m": CODE}) == "4ec4d7fe096f"


def test_every_algorithm_has_one() -> None:
    assert all(re.fullmatch(r"[0-9a-f]{12}", fingerprint(name)) for name in ALGORITHMS)
    assert fingerprint("im2win") == fingerprint("im2win_fused") != fingerprint("mec")


def test_device_functions_and_plans_count() -> None:
    """They are text among sources of Python, and none that says what the code is for."""
    assert len({fingerprint(name, "cuda") for name in ("direct", "im2win", "im2win_fused", "im2col", "implicit_gemm", "mec")}) == 6
    sources = _cuda_sources("direct")
    assert code_hash(sources) != code_hash(sources | {"device": sources["device"].replace("wait_products", "wait_for_products")})


def test_every_file_of_device_functions_counts() -> None:
    """Of the kernels' own folder, and those that all share: theirs, and those of other outputs than sums and of clusters where kernels have
    these."""
    folders = {"persistent": _persistent_sources, "streamed": _streamed_sources, "winograd_tc": _fused_sources}
    shared = Path(cuda.__file__).parent
    found = {path.parent.name for path in shared.parent.glob("*/device.hpp")}
    assert found == {"cuda", *folders}
    for name, sources in folders.items():
        of_boxes = [shared.parent / "persistent" / "device.hpp", shared / "requantise.hpp", shared / "cluster.hpp"]
        own = shared.parent / name / "device.hpp"
        more = {"persistent": of_boxes, "streamed": [*of_boxes, own]}.get(name, [own])
        files = [shared / "device.hpp", *more]
        assert sources()["device"] == f"DEVICE = {''.join(path.read_text() for path in files)!r}"
    assert {path.name for path in shared.glob("*.hpp")} == {"device.hpp", "requantise.hpp", "cluster.hpp"}
