"""Rooflines: points and roofs against numbers by hand, and that no label covers anything, on committed results and where layers crowd."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from paths import ROOT

from im2win.bench.results import Result, Row, peak_name
from im2win.reports import roofline
from im2win.reports import tables as report

RESULTS = {name: one for name, one in report.load_all(ROOT / "benchmarks" / "results").items() if "cuda" in one.versions}
CEILINGS = {"fma_gflops": 50e3, "tf32_gflops": 390e3, "f16_gflops": 750e3, "s8_gflops": 1500e3, "copy_gbs": 4000.0}


def result(rows: list[Row], suite: str = "demo", dtype: str = "float32") -> Result:
    return Result(suite, dtype, 8, "gpu", "A GPU", 1, {"cuda": "13.0"}, "abc", "2026-01-02", dict(CEILINGS), rows)


def row(name: str, ours_ms: float | None, peer_ms: float | None, key: str = "n8-c64x56x56-k64x3x3") -> Row:
    peers = {} if peer_ms is None else {"torch_nchw": peer_ms}
    return Row(name, key, ours_ms=ours_ms, peers=peers, best_peer="torch_nchw" if peers else None)


def test_points_by_hand() -> None:
    """1x1x3x3 input, one 2x2 filter: 4 outputs of 4 products; 9 + 4 + 4 elements of 4 bytes."""
    one = row("a", 2e-6, 4e-6, "n1-c1x3x3-k1x2x2")
    [point, ours, peer] = roofline.points(result([one, row("b", 1.0, None), row("c", None, 1.0), row("d", None, None)]))
    assert (point.layer, point.intensity, point.ours, point.peer) == ("a", 32 / 68, pytest.approx(16.0), pytest.approx(8.0))
    assert (ours.layer, ours.peer) == ("b", None) and (peer.layer, peer.ours) == ("c", None)


@pytest.mark.parametrize(
    ("suite", "dtype", "found"),
    [
        ("papers12", "float32", {"FMA": 50e3, "three TF32 products": 130e3}),
        ("papers12-exact", "float32", {"FMA": 50e3}),
        ("papers12-tf32-nhwc", "float32", {"FMA": 50e3, "TF32 products": 390e3}),
        ("papers12-nhwc", "float16", {"float16 products": 750e3}),
        ("papers12-nhwc", "int8", {"int8 products": 1500e3}),
        ("papers12-nhwc", "int8-out.int8", {"int8 products": 1500e3}),
    ],
)
def test_roofs_are_those_of_the_arithmetic(suite: str, dtype: str, found: dict[str, float]) -> None:
    assert roofline.roofs(result([], suite, dtype)) == found


def test_the_ceiling_of_a_type_is_the_nearest_that_was_measured() -> None:
    assert [peak_name("int8", dict.fromkeys(known, 1.0)) for known in (CEILINGS, ("fma_gflops", "f16_gflops"), ("fma_gflops",))] == [
        "s8_gflops", "f16_gflops", "fma_gflops",
    ]  # fmt: skip


def boxes(figure: Any) -> list[tuple[str, Any]]:
    """Where the texts inside the axes stand, in pixels, without the lines that lead to some."""
    from matplotlib.text import Text

    [axes] = figure.axes
    renderer = figure.canvas.get_renderer()
    for text in axes.texts:
        text.update_positions(renderer)
    return [(text.get_text(), Text.get_window_extent(text, renderer)) for text in axes.texts]


def assert_readable(one: Result) -> None:
    pytest.importorskip("matplotlib")
    figure = roofline.draw(one)
    [axes] = figure.axes
    written = boxes(figure)
    names = set(roofline.labels(roofline.points(one)))
    assert names <= {text for text, _ in written} and len(written) == len(names) + len(roofline.roofs(one)) + 1
    for (text, box), (other, another) in itertools.combinations(written, 2):
        assert not box.overlaps(another), f"{text} and {other}"
    for text, box in written:
        assert axes.bbox.contains(*box.min) and axes.bbox.contains(*box.max), f"{text} is outside"
        for point in roofline.points(one):
            for speed in (point.ours, point.peer):
                assert not speed or not box.contains(*axes.transData.transform((point.intensity, speed))), f"{text} covers {point.layer}"


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", RESULTS)
def test_committed_results_are_readable(name: str) -> None:
    assert_readable(RESULTS[name])
    assert (ROOT / "benchmarks" / "results" / f"{name}-roofline.png").read_bytes().startswith(b"\x89PNG"), "run: im2win report README.md"


def test_a_crowd_is_readable() -> None:
    """Twelve layers of one problem, a percent apart."""
    assert_readable(result([row(f"layer{i}", 0.5 * 1.01**i, 0.55 * 1.01**i) for i in range(12)]))


def test_many_layers_have_numbers_and_a_key() -> None:
    one = result([row(f"layer{i}", 0.5 * 1.05**i, 0.7 * 1.04**i) for i in range(23)])
    assert_readable(one)
    key = [text.get_text() for legend in roofline.draw(one).legends for text in legend.get_texts()]
    assert key[-23:] == [f"{i + 1}  layer{i}" for i in range(23)]


def test_one_layer_without_a_peer(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    one = result([row("conv1", 0.5, None)])
    assert_readable(one)
    assert roofline.plot(one, tmp_path / "a" / "b.png").read_bytes().startswith(b"\x89PNG")


def test_reports_draw_rooflines_of_gpus_only(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for device, versions in (("gpu", {"cuda": "13.0"}), ("cpu", {"torch": "2.0"})):
        one = result([row("conv1", 0.5, 1.0)])
        one.device, one.versions = device, versions
        one.save(tmp_path / f"{device}/demo.json")
    drawn = report.plot_all(tmp_path)
    assert [path.relative_to(tmp_path).as_posix() for path in drawn] == ["cpu/demo.png", "gpu/demo.png", "gpu/demo-roofline.png"]
