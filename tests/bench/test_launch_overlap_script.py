"""The device script that measures launch overlap: what it builds, its chains and its table, without a GPU."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
from paths import ROOT

from im2win.device.gpu import H200
from im2win.reports import launch_overlap as report
from im2win.spec.conv2d import Conv2d
from im2win.studies.entries import OVERLAP_KINDS

torch = pytest.importorskip("torch")


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "gpu"))
    sys.modules.pop("launch_overlap", None)
    import launch_overlap

    return launch_overlap


class _Layer:
    """A layer whose outputs are the sum of its input and one, as far as the shape goes; it notes what it was given."""

    def __init__(self, conv: Conv2d) -> None:
        self.conv, self.calls = conv, list[tuple[int, int]]()

    def bind(self, filters: Any) -> _Layer:
        return self

    def __call__(self, x: Any, out: Any) -> None:
        self.calls.append((x.data_ptr(), out.data_ptr()))
        out.view(-1)[:] = 1 + x.view(-1)[: out.numel()]


@pytest.mark.parametrize("key", ["n1-c4x5x5-k4x3x3-p1", "n1-c4x5x5-k2x3x3-p1"])
def test_each_call_of_a_chain_reads_what_the_one_before_wrote(script: Any, key: str) -> None:
    conv = Conv2d.parse(key)
    op, first = _Layer(conv), torch.zeros(conv.input_shape)
    for _ in range(2):
        last = script.Chain(op, first, None, calls=4).run()
        assert last.shape == conv.output_shape and bool((last == 4).all())
    if conv.input_shape == conv.output_shape:
        assert all(before == after[::-1] for before, after in zip(op.calls, op.calls[1:4], strict=False))


def test_layers_and_table(script: Any) -> None:
    made = script.recipes(list(script.LAYERS), H200)
    assert len(made) == 2 * len(script.LAYERS) and {one.overlap for one in made.values()} == {False, True}
    assert all(str(Conv2d.parse(key)) == key for key in script.LAYERS)
    samples = {kind: {"without": [2e-5, 3e-5], "with": [2e-5, 2e-5]} for kind in OVERLAP_KINDS}
    result = {"layer": script.LAYERS[0], "algorithm": "direct/warp_specialized", "tile": {"tma_boxes": "taps"}, "samples_s": samples}
    assert script.line(result).split() == [script.LAYERS[0], "warp_specialized", "taps", *["25.0", "1.250"] * 3]
    facts = {"brand": "GPU", "device": "gpu", "date": "2026-01-01", "versions": {"cuda": "13"}}
    lines = report.table([{"layers": [result], "failed": {"other": "no time left"}, **facts}]).splitlines()
    assert [line.count(text) for line, text in ((lines[2], "25.0"), (lines[2], "1.25"), (lines[3], "1.25"))] == [3, 3, 3]
    assert "other failed: no time left." in lines[-1]


def test_different_kernels_are_not_compared(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "load", lambda one: SimpleNamespace(method="direct", tile={"rows": one}))
    with pytest.raises(script.WrongError, match=r"different kernels: direct \{'rows': 1\} and direct \{'rows': 2\}"):
        script.measured(script.LAYERS[0], {"without": 1, "with": 2}, check=True)
