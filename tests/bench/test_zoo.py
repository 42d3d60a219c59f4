"""The zoo: its networks exist, wrong outputs are refused, and the whole path runs."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from scripts import script

from im2win.bench import zoo
from im2win.bench.harness import WorkerError
from im2win.bench.zoo_builds import build_ahead
from im2win.bench.zoo_networks import _TIMM, NETWORKS, UNet, calibrated, edsr, images, vision
from im2win.frontends.torch.report import LayerReport, Report
from im2win.spec.conv2d import Conv2d


def test_the_zoo_has_thirty_networks_and_timm_knows_its_own() -> None:
    assert len(NETWORKS) == len(set(NETWORKS)) >= 30
    assert [name for name in _TIMM if not vision("timm").is_model(name)] == []


def test_own_networks_keep_and_double_the_size() -> None:
    with torch.inference_mode():
        assert UNet(16)(torch.zeros(1, 3, 16, 16)).shape == (1, 3, 16, 16)
        assert edsr(8, 1)(torch.zeros(1, 3, 8, 8)).shape == (1, 3, 16, 16)


def test_calibration_makes_normalised_activations_of_unit_size() -> None:
    first = torch.nn.Sequential(*list(calibrated("tiny").children())[:2])
    with torch.inference_mode():
        assert first(images("tiny", 4)).std().item() == pytest.approx(1, rel=0.1)


@pytest.mark.parametrize("output", [np.full(3, np.nan), np.array([1.0, 2.0, 4.0]), np.ones(2)])
def test_wrong_outputs_are_refused(output: np.ndarray) -> None:
    with pytest.raises(WorkerError, match="wrong result"):
        zoo.check(output, zoo.Expected(np.array([1.0, 2.0, 3.0]), 1e-3))


def test_a_gpu_is_set_up_before_the_reference_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's convolutions are TF32 by default, which is no reference for float32."""
    steps: list[str] = []

    def calibrated(network: str, device: str) -> object:
        steps.append("weights")
        raise RuntimeError("enough")

    monkeypatch.setattr(zoo, "_set_up_gpu", lambda: steps.append("set up"))
    monkeypatch.setattr(zoo, "calibrated", calibrated)
    rows = zoo.measured("tiny", 1, "float32", "cuda", ["ours"], 0.1, 1)
    assert steps == ["set up", "weights"] and rows[0]["subjects"]["ours"]["failed"] == "RuntimeError: enough"


def test_an_output_may_be_twice_as_far_off_as_pytorch_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    setting = zoo.Setting("tiny", 1, "float32", "cpu")
    assert setting.expected().allowed == zoo.ALLOWED["float32"]
    monkeypatch.setitem(zoo.ALLOWED, "float32", 1e-12)
    in_half = zoo.Setting("tiny", 1, "bfloat16", "cpu")
    monkeypatch.setitem(zoo.ALLOWED, "bfloat16", 1e-12)
    assert 1e-5 < in_half.expected().allowed < 0.1


def test_a_report_counts_layers_that_im2win_runs() -> None:
    conv = Conv2d.parse("n1-c8x12x12-k16x1x1")
    layers = [LayerReport("a", conv, "im2win", "exact"), LayerReport("b", None, "", "kept"), LayerReport("c", conv, "", "slower")]
    assert zoo.groups(Report("graph", layers=layers)) == {"layers": 3, "ours": 1, "convs": [str(conv)]}


def test_a_network_that_cannot_be_built_is_a_row_with_the_reason() -> None:
    (row,) = zoo.measured("nonsense", 1, "float32", "cpu", [*zoo.OURS, zoo.NCHW], 1, 1)
    assert set(row["subjects"]) == {*zoo.OURS, zoo.NCHW} and all("KeyError" in one["failed"] for one in row["subjects"].values())


@pytest.mark.slow
def test_the_script_measures_a_network_of_two_layers(tmp_path: Path) -> None:
    path = tmp_path / "zoo.json"
    subjects = "ours,ours_nhwc,torch_nchw,onnxruntime"
    script("benchmarks/zoo.py").main(["--only", "tiny", "--subjects", subjects, "--seconds", "0.1", "--json", str(path)])
    study = json.loads(path.read_text())
    (row,) = study["rows"]
    assert [facts["layers"] for facts in row["groups"].values()] == [2, 2] and study["digests"]["target"] == "cpu"
    assert all(one["median"] > 0 and one["error"] <= study["tolerance"] for one in row["subjects"].values())
    script("benchmarks/zoo.py").main(["--only", "tiny", "--json", str(path)])  # nothing is left to do
    assert json.loads(path.read_text()) == study


def test_the_problems_of_networks_are_those_that_optimize_reports(tmp_path: Path) -> None:
    import im2win.torch
    from im2win.frontends.torch.optimizing import problems

    for name in ("tiny", "squeezenet1_1"):
        module, x = zoo.Way("ours_nhwc", zoo.Setting(name, 1, "float32", "cpu")).given()
        report = im2win.torch.optimize(module, x, untuned="keep", guard=False, cache=tmp_path).im2win_report
        assert [str(conv) for conv, _ in problems(module, x)] == list(dict.fromkeys(str(layer.conv) for layer in report.layers))


@pytest.mark.slow
def test_operators_of_networks_are_built_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IM2WIN_CACHE", str(tmp_path))
    monkeypatch.setattr("im2win.builder.batch.LEAST", 1)
    failed = build_ahead(["tiny", "nonsense"], 1, "float32", "cpu", ["ours", "torch_nchw"])
    assert list(failed) == ["nonsense"] and "KeyError" in failed["nonsense"]
    assert zoo.Way("ours", zoo.Setting("tiny", 1, "float32", "cpu")).optimized(guard=False)[0].im2win_report.built == 0
