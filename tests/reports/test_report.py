"""Reports: summaries, tables between markers, plots; and that what is committed still says what the results say."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from paths import ROOT

from im2win.bench.results import Result, ResultError, Row, Spread, geometric_mean, mean_at_roof, roofline_fraction, summarise
from im2win.reports import memory as memory_report
from im2win.reports import papers, studies
from im2win.reports import tables as report

RESULTS = ROOT / "benchmarks" / "results"


def result() -> Result:
    rows = [
        Row("conv1", "n1-c64x56x56-k64x3x3", 3, 1.0, "im2win", True, 215.0, 0.512, 0, 1e-7,
            {"torch_nchw": 4.0, "onnxruntime": 2.0}, "onnxruntime", 2.0, 1.25, 1.6,
            None, None, None, {}, {}, {"ours": Spread(1.0, 0.9, 1.1, 15)}),
        Row("conv2", "n1-c64x28x28-k64x3x3", 1, 4.0, "direct/tiled", False, 12.0, 0.03, 64, 1e-7,
            {"onnxruntime": 2.0}, "onnxruntime", 0.5, 4.0, 0.5, None, None, None, {"torch_nchw": "it crashed"}),
        Row("conv3", "n1-c64x14x14-k64x3x3", failed="no schedule", peers={"onnxruntime": 0.123456}, best_peer="onnxruntime"),
    ]  # fmt: skip
    ceilings = {"fma_gflops": 420.4, "copy_gbs": 27.0}
    versions, date = {"torch": "2.0", "python": "3.12"}, "2026-01-02T03:04:05+00:00"
    return Result("demo", "float32", 1, "cpu-2t", "A CPU", 2, versions, "abc", date, ceilings, rows)


def test_geometric_mean() -> None:
    assert geometric_mean([1.0, 4.0]) == pytest.approx(2.0)
    assert geometric_mean([]) is None


def test_summary_counts_failures_apart() -> None:
    facts = summarise(result())
    assert facts["layers"] == 3 and facts["failed"] == 1
    assert facts["geomean_ratio"] == pytest.approx(1.0) and (facts["min_ratio"], facts["min_layer"]) == (0.5, "conv2")
    assert facts["untuned_geomean_ratio"] == pytest.approx(math.sqrt(0.8)) and facts["untuned_min_ratio"] == 0.5
    assert facts["total_ms"] == pytest.approx(7.0) and facts["total_ratio"] == pytest.approx(8 / 7)


def test_summary_of_nothing() -> None:
    empty = result()
    empty.layers = []
    assert summarise(empty)["geomean_ratio"] is None and summarise(empty)["total_ratio"] is None


def test_layer_table() -> None:
    lines = report.layer_table(result()).splitlines()
    assert lines[0] == (
        "| layer | algorithm | ours ms | GFLOPS | % of roofline | PyTorch NCHW ms | ONNX Runtime ms | ratio | untuned ratio |"
    )
    assert lines[2] == "| conv1 | im2win / stored | 1.000 | 215 | 51 | 4.000 | **2.000** | 2.00 | 1.60 |"
    assert lines[3] == "| conv2 | direct / tiled (untuned) | 4.000 | 12 | 3 | failed | **2.000** | 0.50 | 0.50 |"
    assert lines[4].startswith("| conv3 |  | failed | ") and "**0.123**" in lines[4]
    assert lines[5] == "| sum |  | 7.000 |  |  | – | 8.000 | 1.14 |  |"  # noqa: RUF001
    assert lines[6].split("|")[1].strip() == "geometric mean" and lines[6].endswith("| 1.00 | 0.89 |")
    assert len({line.count("|") for line in lines[:7]}) == 1
    assert "A CPU, 2 threads" in lines[-1] and "torch 2.0" in lines[-1] and "2026-01-02" in lines[-1]


def test_the_transform_is_shown_where_it_was_timed() -> None:
    one = result()
    one.layers[0].transform_ms = 0.25
    lines = report.layer_table(one).splitlines()
    assert lines[0].endswith("| ratio | ours: transform ms | untuned ratio |")
    assert lines[2].endswith("| 2.00 | 0.250 | 1.60 |") and lines[3].endswith("| 0.50 | – | 0.50 |")  # noqa: RUF001
    assert lines[5].endswith("| 1.14 |  |  |") and lines[6].endswith("| 1.00 |  | 0.89 |")
    assert len({line.count("|") for line in lines[:7]}) == 1


def test_results_without_a_transforms_time_load(tmp_path: Path) -> None:
    saved = result()
    values = saved.as_dict()
    for row in values["layers"]:
        del row["transform_ms"]
    path = tmp_path / "r.json"
    path.write_text(json.dumps(values))
    assert Result.load(path) == saved
    saved.layers[0].transform_ms = 0.5
    assert Result.load(saved.save(path)).layers[0].transform_ms == 0.5


def test_results_of_the_first_schema_load_without_digests(tmp_path: Path) -> None:
    saved = result()
    saved.digests = {"target": "cpu", "kernels": "0"}
    saved.layers[0].tier, saved.layers[0].tile, saved.layers[0].untuned_tile = "exact", {"co": 8}, {"co": 4}
    path = saved.save(tmp_path / "r.json")
    assert Result.load(path) == saved
    values = {**json.loads(path.read_text()), "schema": 1}
    del values["digests"]
    for row in values["layers"]:
        for name in ("tier", "tile", "untuned_algorithm", "untuned_tile"):
            del row[name]
    path.write_text(json.dumps(values))
    old = Result.load(path)
    assert old.digests == {} and old.layers[0].tier == "" and old.layers[0].untuned_tile == {} and old.commit == saved.commit


def test_fill_replaces_only_between_markers_and_settles() -> None:
    text = "a\n<!-- table:cpu-2t/demo -->\nold\n<!-- /table -->\nb\n<!-- table:summary -->\n<!-- /table -->\nc\n"
    filled = report.fill(text, {"cpu-2t/demo": result()})
    assert filled.startswith("a\n<!-- table:cpu-2t/demo -->\n| layer") and "old" not in filled and filled.endswith("<!-- /table -->\nc\n")
    assert "| demo float32 | 1 | cpu-2t | 3 | 1.00 | 0.50 (conv2) | 0.89 | 1.14 |" in filled
    assert report.fill(filled, {"cpu-2t/demo": result()}) == filled


def on_gpu(layers: list[Row], suite: str = "demo") -> Result:
    one = result()
    one.suite, one.versions, one.layers = suite, {"cuda": "13.0"}, layers
    one.ceilings = {"fma_gflops": 50e3, "tf32_gflops": 390e3, "copy_gbs": 4000.0}
    return one


def test_a_fraction_is_of_the_arithmetic_that_ran() -> None:
    """float32 on a GPU: three TF32 products where the accuracy allows them; Winograd's form takes fewer products than a roof counts."""
    layer = Row("a", "n8-c512x56x56-k512x3x3", ours_ms=1.0, algorithm="direct", peers={"torch_nchw": 2.0}, best_peer="torch_nchw")
    flops = 2 * 8 * 512 * 54 * 54 * 512 * 9
    assert roofline_fraction(layer, [], on_gpu([]).ceilings) == pytest.approx(flops / 130e9)
    assert roofline_fraction(layer, ["exact"], on_gpu([]).ceilings) == pytest.approx(flops / 50e9)
    assert roofline_fraction(replace(layer, algorithm="winograd"), [], on_gpu([]).ceilings) is None
    lines = report.layer_table(on_gpu([layer, replace(layer, algorithm="winograd")])).splitlines()
    assert [line.split("|")[5].strip() for line in lines[2:4]] == ["85", "–"]  # noqa: RUF001
    assert "50000 GFLOPS (FMA) and 130000 GFLOPS (three TF32 products)" in lines[-1] and "none for Winograd's form" in lines[-1]


def test_the_mean_at_the_roofline_leaves_winograd_as_it_was() -> None:
    times = {"ours_ms": 1.0, "peers": {"torch_nchw": 2.0}, "best_peer": "torch_nchw", "ratio": 2.0}
    direct = Row("a", "n8-c512x56x56-k512x3x3", algorithm="direct/tiled", **times)  # type: ignore[arg-type]
    winograd = replace(direct, algorithm="winograd/tiled", ours_ms=0.5, ratio=4.0)
    both = on_gpu([direct, winograd])
    share = roofline_fraction(direct, [], both.ceilings)
    assert share is not None and mean_at_roof(both) == pytest.approx(math.sqrt(2 / share * 4))
    sentence = "With all others at their roofline the geometric mean would be"
    assert sentence in report.caption(both)
    assert sentence not in report.caption(on_gpu([direct])) and sentence not in report.caption(on_gpu([winograd]))
    assert mean_at_roof(on_gpu([])) is None


def test_workspaces_are_shown_where_they_were_measured() -> None:
    layer = Row("a", "n8-c512x56x56-k512x3x3", ours_ms=1.0, algorithm="winograd", extra_bytes=64 << 20)
    named = {"cudnn_fft": 2.0, "cudnn_gemm": 1.5}
    layer = replace(layer, peers=named, best_peer="cudnn_gemm", peers_extra_bytes={"cudnn_fft": 1 << 20, "cudnn_gemm": 32 << 20})
    head, _, line, *_ = report.layer_table(on_gpu([layer])).splitlines()
    cells = dict(zip(head.split(" | "), line.split(" | "), strict=True))
    assert (cells["ours: workspace MiB"], cells["best peer's workspace MiB |"]) == ("64", "32 |")


def test_no_committed_fraction_of_a_gpu_is_above_its_roof() -> None:
    """Level-2 cache is overwritten before every call there, so no layer can beat memory."""
    for name, one in report.load_all(RESULTS).items():
        if "cuda" in one.versions and not one.suite.startswith("ladder"):
            assert all((roofline_fraction(row, one.accuracy, one.ceilings) or 0) <= 1 for row in one.layers), name


def test_untuned_table() -> None:
    def row(conv: str, default: float, tuned: float) -> dict[str, object]:
        return {"conv": conv, "default": {"ms": default}, "tuned": {"ms": tuned}}

    rows = [row("n1-c8x9x9-k8x3x3", 2.0, 1.0), row("n1-c8x9x9-k9x3x3", 1.0, 1.0), row("n1-c8x9x9-k8x3x3-g8", 1.0, 0.81)]
    failed = {"conv": "n1-c8x9x9-k8x5x5", "failed": "no tile is legal"}
    study = {"study": "untuned", "device": "cpu-2t", "layers_from": "drawn", "rows": [*rows, failed]}
    filled = report.fill("<!-- table:untuned -->\n<!-- /table -->", {}, [study])
    assert "| drawn | cpu-2t | all | n1-c8x9x9-k8x3x3 | 3 | 0.74 | 0.50 | 1 |" in filled
    assert "| drawn | cpu-2t | depthwise | n1-c8x9x9-k8x3x3-g8 | 1 | 0.81 | 0.81 | 0 |" in filled
    assert "| drawn | cpu-2t | 3x3 | n1-c8x9x9-k8x3x3 | 2 | 0.71 | 0.50 | 1 |" in filled and "others" not in filled


def test_epilogues_table() -> None:
    def row(cost: float, activation: str = "silu") -> dict[str, object]:
        return {"conv": f"n1-{cost}", "activation": activation, "cost": cost, "ms": 1 + cost, "without_ms": 1.0}

    layers = [row(0.21), row(0.0), row(0.0), {"conv": "n1-x", "activation": "silu", "failed": "it crashed"}, row(0.5, "relu")]
    filled = report.fill("<!-- table:epilogues -->\n<!-- /table -->", {}, [{"study": "epilogues", "device": "cpu-2t", "layers": layers}])
    assert "| silu | cpu-2t | n1-0.21 | 3 | 7 % | 0 % | 21 % | 1.210 | 1.000 |" in filled
    assert "| relu | cpu-2t | n1-0.5 | 1 | 50 % | 50 % | 50 % | 1.500 | 1.000 |" in filled


def test_a_study_that_is_not_json_is_named(tmp_path: Path) -> None:
    path = tmp_path / "studies" / "cpu-2t" / "untuned.json"
    path.parent.mkdir(parents=True)
    path.write_text("{")
    with pytest.raises(studies.StudyError, match=r"untuned\.json: not a readable JSON"):
        studies.load_all(tmp_path / "results")


@pytest.mark.parametrize("text", ["{}", "[]", '{"study": "nope"}'])
def test_a_study_that_has_no_table_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "studies" / "cpu-2t" / "mine.json"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    with pytest.raises(studies.StudyError, match=r"mine\.json: `study` \(=.*\) must be one of untuned, "):
        studies.load_all(tmp_path / "results")


FACTS = {"device": "cpu-2t", "brand": "CPU", "threads": 2, "versions": {"torch": "2"}, "batch": 1, "date": "2026-11-21T00:00:00Z"}


def test_models_table() -> None:
    whole = {"model": "a", "ours_ms": 2.0, "peers": {"onnxruntime": 3.0, "torch": 8.0}, "failed": None, "peers_failed": {}}
    half = {**whole, "model": "b", "peers": {"onnxruntime": 3.0}, "peers_failed": {"torch": "differs"}}
    none = {**whole, "model": "c", "ours_ms": None, "failed": "differs too"}
    filled = report.fill("<!-- table:models -->\n<!-- /table -->", {}, [{"study": "models", **FACTS, "models": [whole, half, none]}])
    assert "| model | ours ms | ONNX Runtime ms | PyTorch eager ms | over ONNX Runtime | over PyTorch eager |" in filled
    assert "| a | 2.000 | 3.000 | 8.000 | 1.50 | 4.00 |" in filled and "| geometric mean |  |  |  | 1.50 | 4.00 |" in filled
    assert "Failed: b, PyTorch eager: differs; c, ours: differs too" in filled and "1 image, CPU (`cpu-2t`), threads: 2" in filled


def test_pytorch_table() -> None:
    ways = {"plain_eager_nchw": {"median": 3.0}, "ours_eager_nchw": {"median": 2.0}, "plain_compile_nhwc": {"failed": "no compiler"}}
    study = {"study": "pytorch-models", **FACTS, "model": "resnet50", "dtype": "float16", "ways": ways}
    filled = report.fill("<!-- table:pytorch-models -->\n<!-- /table -->", {}, [study])
    assert "| resnet50 | 1 | float16 | `cpu-2t` | eager, NCHW | 3.000 | 2.000 | 1.50 |" in filled
    assert "Failed: resnet50 float16 plain_compile_nhwc: no compiler" in filled


def test_overhead_table() -> None:
    study = {"study": "op-overhead", "device": "cpu-2t", "layouts": {"NCHW": {"operator_no_grad": {"median": 9.5, "overhead": 8.4}}}}
    filled = report.fill("<!-- table:op-overhead -->\n<!-- /table -->", {}, [study])
    assert "| `cpu-2t` | NCHW | `torch.ops.im2win.conv2d`, under no_grad | 9.5 | 8.4 |" in filled


def test_shared_process_table() -> None:
    times = {"im2win": {"alone": 2.0, "another": 2.1, "numpy": 3.0}, "onnxruntime": {"alone": 4.0, "im2win": 2.0}}
    study = {"study": "shared-process", "device": "cpu-2t", "layers": {"n1-c3x9x9-k3x3x3": times}}
    filled = report.fill("<!-- table:shared-process -->\n<!-- /table -->", {}, [study]).replace("\N{EN DASH}", "-")
    assert "| n1-c3x9x9-k3x3x3 | `cpu-2t` | im2win | 2.000 | 1.05 | - | - | - | - | 1.50 |" in filled
    assert "| n1-c3x9x9-k3x3x3 | `cpu-2t` | ONNX Runtime | 4.000 | - | - | 0.50 | - | - | - |" in filled


def test_papers_table() -> None:
    """Formulas always; measurements where there are any."""
    layers = [Row("a", "n8-c3x9x9-k3x3x3", ratio=1.0), Row("b", "n8-c3x9x9-k3x3x3", ratio=4.0), Row("c", "n8-c3x9x9-k3x3x3")]
    one = on_gpu(layers, "papers12")
    forms = {"cudnn_winograd": 8.0, "cudnn_winograd_nonfused": 6.0, "pkf-shmem-16": 2.0, "pkf-shmem-32": 1.0}
    entries = [{"size": 224, "batch": 1, "layout": "NCHW", "form": form, "ms": ms} for form, ms in forms.items()]
    study = {"study": "winograd-tensor-cores", "brand": "A GPU", "entries": entries}
    measured = papers.table({"x": one}, [study], []).splitlines()
    assert "| 0.35 by formula (0.24 to 0.47) |" in measured[2] and "| 2.00 on average, 1.00 to 4.00 (A CPU) |" in measured[3]
    assert "not measured" in measured[4] and "3.00 to 3.00 (A GPU, NCHW)" in measured[5] and "not measured" in measured[6]
    assert papers.table({}, [], []).count("not measured") == 8


def test_unknown_marker() -> None:
    with pytest.raises(report.ReportError, match="table marker 'nope' must name a result: cpu/x"):
        report.fill("<!-- table:nope -->\n<!-- /table -->", {"cpu/x": result()})


def test_refresh_reads_a_folder(tmp_path: Path) -> None:
    saved = result()
    saved.save(tmp_path / "results" / f"{saved.stem}.json")
    readme = tmp_path / "README.md"
    readme.write_text("<!-- table:cpu-2t/demo-float32-b1 -->\n<!-- /table -->\n")
    assert report.refresh(readme, tmp_path / "results") is True
    assert "conv1" in readme.read_text() and report.refresh(readme, tmp_path / "results") is False


def test_plot_is_a_png_beside_the_result(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    saved = result()
    saved.save(tmp_path / f"{saved.stem}.json")
    (path,) = report.plot_all(tmp_path)
    assert path == tmp_path / "cpu-2t" / "demo-float32-b1.png"
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10_000


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "not a readable JSON"), ("[]", "`schema` must be 1 or 2"), ('{"schema": 3}', "`schema` must be 1 or 2"),
     ('{"schema": 2, "layers": []}', "no 'digests'"),
     ('{"schema": 1}', "fields must be"), ('{"schema": 1, "layers": [{"layer": "a"}]}', "fields must be")],
)  # fmt: skip
def test_foreign_results_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "r.json"
    path.write_text(text)
    with pytest.raises(ResultError, match=message):
        Result.load(path)
    with pytest.raises(ResultError, match="not a readable JSON"):
        Result.load(tmp_path / "none.json")


def test_committed_results_are_whole() -> None:
    for name, one in report.load_all(RESULTS).items():
        assert name == one.stem
        for row in one.layers:
            assert row.failed is None or row.ours_ms is None, f"{name} {row.layer}: a failure is not a number"
            if row.ratio is not None and row.ours_ms is not None:
                assert row.ratio == pytest.approx(min(row.peers.values()) / row.ours_ms), f"{name} {row.layer}"


TEXTS = ["README.md", "benchmarks/README.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")))]


@pytest.mark.parametrize("name", TEXTS)
def test_committed_tables_are_those_of_the_results(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    filled = report.fill(text, report.load_all(RESULTS), studies.load_all(RESULTS), memory_report.load_all(RESULTS))
    assert filled == text, f"{name} is stale: refresh its tables"
