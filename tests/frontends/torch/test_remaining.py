"""What reports say of convolutions that PyTorch computes: every kind of them is listed, and nothing is silent."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from optimizing import optimized  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

pytestmark = pytest.mark.usefixtures("direct")


class Kinds(nn.Module):
    """Convolutions over 1 and 2 dimensions, and others: transposed, over 3 dimensions, one not reached, and calls of functions."""

    def __init__(self, *, branches: bool = False) -> None:
        super().__init__()
        self.conv, self.up, self.never = nn.Conv2d(5, 4, 1), nn.ConvTranspose2d(4, 4, 2), nn.Conv1d(2, 2, 1)
        self.line, self.volume = nn.Conv1d(4, 4, 3), nn.Conv3d(1, 2, 1)
        self.filters = nn.Parameter(torch.ones(4, 4, 1, 1))
        self.branches = branches

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(self.conv(x))
        y = functional.conv2d(y, self.filters * 2)
        y = functional.conv_transpose2d(y, self.filters)
        z = self.line(y.flatten(2)).sum() + self.volume(y[:, None]).sum()
        if self.branches and x.sum() > 1e9:
            return self.never(y)
        return y + z


COMMON = {
    "up": "a transposed convolution over 2 dimensions",
    "volume": "a convolution over 3 dimensions",
    "never": "the example did not reach it",
    "conv2d": "its filters are computed",
    "filters": "a transposed convolution over 2 dimensions",
}


@pytest.mark.parametrize("branches", [False, True], ids=["graph", "modules"])
def test_every_kind_is_listed(branches: bool) -> None:
    report = optimized(Kinds(branches=branches).eval()).im2win_report
    assert report.mode == ("modules" if branches else "graph")
    assert {one.name: one.reason for one in report.layers if not one.algorithm} == COMMON
    assert [one.name for one in report.layers if one.algorithm] == ["conv", "line"]


def test_a_function_with_a_parameter_is_listed_once() -> None:
    """A conv call site computes it, if the module is traced; else it is said why not."""

    class Function(nn.Module):
        def __init__(self, branches: bool) -> None:
            super().__init__()
            self.filters, self.branches = nn.Parameter(torch.ones(4, 5, 1, 1)), branches

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = functional.conv2d(x, self.filters)
            return -y if self.branches and x.sum() > 1e9 else y

    (layer,) = optimized(Function(branches=False).eval()).im2win_report.layers
    assert (layer.name, bool(layer.algorithm)) == ("filters", True)
    (layer,) = optimized(Function(branches=True).eval()).im2win_report.layers
    assert (layer.name, layer.reason) == ("filters", "a call of conv2d outside a traced graph, or with computed arguments")


def test_a_warning_says_that_no_layer_is_ours(caplog: pytest.LogCaptureFixture) -> None:
    module = nn.Sequential(nn.ConvTranspose2d(5, 4, 2), nn.ConvTranspose2d(4, 4, 2), nn.Conv2d(4, 4, 3, padding_mode="circular")).eval()
    with caplog.at_level(logging.WARNING, "im2win.torch"):
        assert optimized(module).im2win_report.swapped == 0
    (record,) = caplog.records
    assert record.getMessage().startswith("Sequential: none of its 3 convolutions runs on im2win: a transposed convolution over 2")
    assert "dimensions (2); padding mode 'circular' (1)" in caplog.text


def test_a_report_is_json_and_says_what_would_help() -> None:
    report = optimized(nn.Sequential(nn.Conv2d(5, 4, 1), nn.ReLU(), nn.ConvTranspose2d(4, 4, 2)).eval()).im2win_report
    values = json.loads(report.to_json())
    assert values == report.as_dict() and values["on_im2win"] == 1
    ours, other = values["layers"]
    assert ours["conv"] == "n2-c5x12x14-k4x1x1-bias-relu" and ours["fused"] == ["relu"] and other["conv"] is None
    assert report.advice.startswith("layers without a tuning record of this device: 1 (optimize(..., trials=64)")
    assert values["advice"] == report.advice and report.advice in str(report)


def test_the_advice_repeats_what_optimize_was_told(tmp_path: Path) -> None:
    report = optimized(nn.Sequential(nn.Conv2d(5, 4, 1)).eval(), logs=[tmp_path / "my logs", tmp_path], threads=1).im2win_report
    folder = str(tmp_path / "my logs")
    assert f"optimize(..., logs={folder!r}, threads=1, trials=64)" in report.advice
    assert report.advice.endswith(f"im2win tune layers.jsonl --logs '{folder}' --threads 1)")
