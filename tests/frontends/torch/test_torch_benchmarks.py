"""The benchmarks of PyTorch modules, run once without a claim: they check outputs and write what they say they write."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from paths import ROOT  # noqa: E402

from im2win.bench.source import digests  # noqa: E402
from im2win.studies.entries import SCHEMA  # noqa: E402


def run(name: str, monkeypatch: pytest.MonkeyPatch, *words: object) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.setattr(sys, "argv", [name, *map(str, words)])
    module = __import__(name)
    module.main()
    return module


@pytest.mark.slow
def test_models(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path, ways = tmp_path / "new" / "models.json", "plain_eager_nchw,ours_eager_nhwc"
    few = ("--model", "resnet18", "--size", 32, "--rounds", 1, "--untuned", "keep", "--ways", ways)
    module = run("pytorch_models", monkeypatch, *few, "--json", path)
    result = json.loads(path.read_text())
    assert result["schema"] == module.SCHEMA and result["digests"] == digests("cpu")
    assert list(result["ways"]) == ways.split(",") and len(module.WAYS) == 8
    assert all(row["median"] > 0 and row["error"] < 1e-5 and row["samples"] == 1 for row in result["ways"].values())
    assert len(result["layers"]) == 20 and result["layers"][0]["conv"] == "n1-c3x32x32-k64x7x7-s2-p3-NHWC-bias-relu"
    with pytest.raises(SystemExit):
        run("pytorch_models", monkeypatch, "--ways", "ours", "--json", path)


def test_overhead(direct: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "overhead.json"
    run("op_overhead", monkeypatch, "--rounds", 1, "--json", path)
    result = json.loads(path.read_text())
    assert result["schema"] == SCHEMA and result["digests"] == digests("cpu")
    for rows in result["layouts"].values():
        assert {"kernel", "layer", "site", "module", "place", "operator", "torch_conv2d", "operator_no_grad"} < set(rows)
        assert all(row["median"] > 0 and row["overhead"] < row["median"] for row in rows.values())
        assert rows["kernel"]["overhead"] == 0
