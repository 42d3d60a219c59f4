"""The study of Winograd's form on tensor cores, as far as it needs no GPU: its tiles, what it notes, its table and its plot."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from scripts import script

from im2win.bench import cuda_builds, cuda_harness
from im2win.bench.cuda_builds import TileRecipe
from im2win.bench.cuda_harness import Subject
from im2win.bench.source import digests
from im2win.device.gpu import H200
from im2win.reports import studies
from im2win.reports import winograd_tc as fused_report
from im2win.reports.tables import fill, plot_all
from im2win.spec.conv2d import Conv2d
from im2win.spec.suites import Layer, suite
from im2win.studies import gpu_study
from im2win.studies import winograd_tc as cuda_fused_study
from im2win.studies.entries import FUSED, INT8, INTEGERS, OTHERS, PROTOTYPE, REQUANTISED, SCHEMA, SYNCHRONOUS, WHOLE
from im2win.studies.winograd_tc import ACCURACY, FORMS, INT8_FORMS, ROW, integers, recipes
from im2win.tuner.build_worker import RankJob, rank

MS = {SYNCHRONOUS: 6.0, PROTOTYPE: 4.0, WHOLE: 0.75,
      "pkf-shmem-16": 1.0, "pkf-shmem-32": 2.0, "pkf-llc-16": 3.0, OTHERS: 0.5, INTEGERS: 0.25, REQUANTISED: 0.125}  # fmt: skip
MS |= {form: 0.125 * place for place, form in enumerate(INT8, 1)}
BANDS, ROWS = {"outputs": 4, "rows": 0, "band": 64}, {"outputs": 2, "rows": 4, "band": 0}  # of tiles of winograd/tiled
REFUSED = "pkf-llc does not apply: no workspace lies between any two kernels"


class FakeBench:
    """Stands in for the tensors of a problem."""

    def __init__(self, conv: Conv2d, seed: int) -> None:
        self.conv = conv


def ranked(conv: Conv2d) -> list[tuple[float, Any]]:
    """The tiles of a problem, best estimate first."""
    return rank(RankJob(conv, ROW, H200, ACCURACY))


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU on which a form's first tile takes what `MS` says and every other one longer; one form is refused, one cuDNN wrong."""

    @contextlib.contextmanager
    def begun(builders: Any, made: dict[Any, Any], folder: Path) -> Iterator[dict[Any, Any]]:
        yield {one: REFUSED if one[-1][0] == "pkf-llc-32" else one[-1] for one in made}

    def subject(bench: Any, built: Any, allowed: float) -> Subject:
        if isinstance(built, str):
            raise cuda_builds.BuildError(built)
        form, place = built
        assert (allowed > 1e-3) == (form not in (OTHERS, INTEGERS, REQUANTISED)), "only Winograd's form has its tolerance"
        algorithm = {OTHERS: "implicit_gemm/tiled", WHOLE: "winograd/tiled"}.get(form, "winograd/tensor_cores")
        tile = BANDS if bench.conv.layout == "NCHW" else ROWS
        return Subject(lambda: 1e-3 * (MS[form] + place), 0, 1e-4, algorithm, tile=tile if form == WHOLE else {"block": 1})

    def wrong() -> Subject:
        raise cuda_harness.WrongError("wrong result: relative error 1 is above 0.05.")

    @contextlib.contextmanager
    def peers(bench: Any) -> Iterator[list[tuple[str, Callable[[], Subject]]]]:
        times = {"cudnn_winograd_nonfused": 8e-3} if bench.conv.layout == "NCHW" else {}
        times["cudnn_implicit_precomp_gemm"] = 2e-3
        named = [(name, lambda seconds=seconds: Subject(lambda: seconds, 0, 1e-3)) for name, seconds in times.items()]
        yield [("cudnn_winograd", wrong), *named]  # type: ignore[list-item]

    monkeypatch.setattr(cuda_fused_study, "device_gpu", lambda: H200)
    monkeypatch.setattr(cuda_fused_study.backend_for(H200).__class__, "check_tools", lambda self: None)
    monkeypatch.setattr(cuda_fused_study, "set_up_peers", lambda accuracy: None)
    monkeypatch.setattr(cuda_fused_study, "Bench", FakeBench)
    monkeypatch.setattr(cuda_builds.Builders, "begun", begun)
    monkeypatch.setattr(cuda_builds.Builders, "ranked", lambda builders, jobs: list(map(rank, jobs)))
    monkeypatch.setattr(cuda_fused_study, "kernel_subject", subject)
    monkeypatch.setattr(cuda_fused_study, "every_peer", peers)
    monkeypatch.setattr(cuda_fused_study, "verify", lambda bench, call, allowed: ("", 0.0))
    monkeypatch.setattr(cuda_harness, "sample", lambda bench, call: call())


@pytest.mark.slow
def test_the_script_writes_what_table_and_plot_show(fake_gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    layer = next(iter(suite("winograd64"))).name
    file = tmp_path / "studies" / "nvidia-h200" / "winograd-tensor-cores.json"
    words = ["--json", str(file), "--layers", layer, "--tries", "2", "--int8-tries", "2", "--rounds", "3"]
    monkeypatch.setattr(sys, "argv", ["winograd_tensor_cores.py", *words])
    script("benchmarks/winograd_tensor_cores.py").main()
    study = json.loads(file.read_text())
    assert study["schema"] == SCHEMA and study["digests"] == digests("cuda")
    assert {entry["batch"] for entry in study["entries"]} == {1, 16}
    assert len(study["entries"]) == 4 * (len(FORMS) * 2 + 2 + 2 + 1 + len(INT8) * 2 + 1 + 2) + 2 * 2
    by_form = {form: [entry for entry in study["entries"] if entry["form"] == form] for form in FORMS}
    assert all(entry["tile"]["fusion"] in form for form, here in by_form.items() if form in FUSED for entry in here)
    assert all(entry["ms"] is None and entry["failed"] == REFUSED for entry in by_form["pkf-llc-32"])
    (tmp_path / "results").mkdir()
    text = fill("<!-- table:winograd-tensor-cores -->\n<!-- /table -->", {}, studies.load_all(tmp_path / "results"))
    forms = "2.000 | 6.000 | 4.000 | 1.000 | 2.000 | 3.000 | failed | 0.7500 |"
    ratios = "4.00 | 4.00 | 2.00 | 4.00 | 16.00 |"  # the last two: int8 to int8 over float16 and over cuDNN
    assert f"| NCHW | 1 | 224x224 | 8.000 | {forms} bands, F(4x4) | 0.5000 | 0.2500 | 0.1250 | 8.00 | {ratios}" in text
    assert f"| NHWC | 16 | 224x224 | - | {forms} rows, F(2) | 0.5000 | 0.2500 | 0.1250 | - | {ratios}" in text, "cuDNN has none"
    assert "| NHWC | 16 | geometric mean |" in text and "| NCHW | 1 | geometric mean |" in text
    assert "one scale for all channels" in text
    assert "| pkf-shmem | transformed inputs stay in shared memory | NHWC | 16 | 4.00 | 4.00 | 4.00 |" in text
    line = "0.2500 | 0.1250 | 0.2500 | 0.3750 | 0.5000 | 0.6250 | 2.00 | 0.0 % |"
    assert f"| NCHW | 1 | 224x224 | {line}" in text and "one kernel ms" not in text
    timed: list[tuple[str, ...]] = []
    real = cuda_fused_study.time_part

    def spy(part: Any, conv: Any, ours: Any, libraries: Any, forms: Any, *rest: Any) -> Any:
        timed.append(tuple(forms))
        return real(part, conv, ours, libraries, forms, *rest)

    monkeypatch.setattr(cuda_fused_study, "time_part", spy)
    script("benchmarks/winograd_tensor_cores.py").main()
    assert json.loads(file.read_text())["entries"] == study["entries"] and not timed
    _an_older_study_gets_what_it_lacks(file, study, forms, tmp_path)
    assert timed == [(REQUANTISED,)] * 4
    _forms_that_were_taken_out_are_timed_again(file, study)
    assert timed[4:] == [("pkf-shmem-16",)] * 4
    assert text.count(REFUSED) == 1 and "NVIDIA H200 (`nvidia-h200`)" in text and "PKF-Shmem-16 ms" in text
    pytest.importorskip("matplotlib")
    [drawn] = plot_all(tmp_path / "results")
    assert drawn == file.with_suffix(".png") and drawn.read_bytes().startswith(b"\x89PNG")


def _an_older_study_gets_what_it_lacks(file: Path, study: dict[str, Any], forms: str, folder: Path) -> None:
    """int8 outputs, and nothing else. Without them the table is as it was."""
    older = [entry for entry in study["entries"] if not entry["form"].startswith(REQUANTISED)]
    file.write_text(json.dumps({**study, "entries": older, "versions": {**study["versions"], "system": "another kernel"}}))
    text = fill("<!-- table:winograd-tensor-cores -->\n<!-- /table -->", {}, studies.load_all(folder / "results"))
    line = f"| NCHW | 1 | 224x224 | 8.000 | {forms} bands, F(4x4) | 0.5000 | 0.2500 | 8.00 | 4.00 | 4.00 | 2.00 |"
    assert line in text and "int8 to int8" not in text
    script("benchmarks/winograd_tensor_cores.py").main()
    entries = json.loads(file.read_text())["entries"]
    assert entries[: len(older)] == older and len(entries) == len(study["entries"])
    assert all(entry["form"].startswith(REQUANTISED) and "out.int8" in entry["conv"] for entry in entries[len(older) :])


def _forms_that_were_taken_out_are_timed_again(file: Path, study: dict[str, Any]) -> None:
    """By themselves, without peers."""
    rest = [entry for entry in study["entries"] if entry["form"] != "pkf-shmem-16"]
    file.write_text(json.dumps({**study, "entries": rest}))
    script("benchmarks/winograd_tensor_cores.py").main()
    entries = json.loads(file.read_text())["entries"]
    assert entries[: len(rest)] == rest and [entry["form"] for entry in entries[len(rest) :]] == ["pkf-shmem-16"] * 8


@pytest.mark.parametrize("batch", [1, 16])
def test_every_layer_has_tiles_of_every_form(batch: int) -> None:
    """But those whose tensors between kernels 32 bits cannot index."""
    layers = [layer.conv.with_(dtype="float16") for layer in suite("winograd64", batch)]
    for conv in (layers[0], layers[-1]):
        found = recipes(conv, H200, 2, ranked(conv))
        tiles = {one: recipe.tile for one, recipe in found.items() if isinstance(recipe, TileRecipe) and recipe.tile is not None}
        assert {form for form, _ in tiles} == set(FORMS) and len(tiles) == 2 * len(FORMS) and (OTHERS, 0) in found
        for (form, _), tile in tiles.items():
            assert (tile.mapping == "sync_free") == (form != SYNCHRONOUS)
            assert form not in FUSED or form == f"pkf-{tile.fusion}-{tile.block_m}"


def test_int8_has_tiles_of_every_form() -> None:
    """As far as 32 bits index what lies between the kernels."""
    for batch, size in ((1, 0), (16, -1)):
        conv = list(suite("winograd64", batch))[size].conv.with_(dtype="float16", layout="NHWC")
        found = integers(conv, H200, 2, ranked(conv.with_(dtype="int8")))
        forms = {form for form, _ in found if form != INTEGERS}
        assert forms == (set(INT8_FORMS) if batch == 1 else set()) <= set(INT8)
        assert all(one.conv.dtype == "int8" for one in found.values() if isinstance(one, TileRecipe))


def test_layers_that_the_row_does_not_compute_are_named() -> None:
    with pytest.raises(
        ValueError, match=r"must be of the row winograd/tensor_cores: .* multiplies float16 or int8, not float32"
    ):
        cuda_fused_study.run(list(suite("winograd64"))[:1])


def test_a_study_ends_at_its_limit_and_goes_on(fake_gpu: None) -> None:
    pytest.importorskip("torch")
    layers = [Layer(key, Conv2d.parse(key)) for key in ("n1-c16x16x16-k16x3x3-p1-float16", "n1-c16x20x20-k16x3x3-p1-float16-NHWC")]
    how: dict[str, Any] = {"tries": 1, "int8_tries": 2, "rounds": 1}
    kept: list[dict[str, Any]] = []

    def keep(study: dict[str, Any]) -> None:
        kept.append(study)

    assert not cuda_fused_study.run(layers, **how, limit_s=1e-9, keep=keep)["entries"] and not kept
    first = cuda_fused_study.run(layers[:1], **how, keep=keep)
    assert {entry["size"] for entry in first["entries"]} == {16} and len(kept) == 1
    tiles = [entry for entry in first["entries"] if entry["form"] in FORMS or entry["form"] in INT8_FORMS]
    count = {form: sum(entry["form"] == form for entry in tiles) for form in (PROTOTYPE, "int8-prototype")}
    assert count == {PROTOTYPE: 1, "int8-prototype": 2}
    whole = cuda_fused_study.run(layers, **how, before=first)
    assert whole["entries"][: len(first["entries"])] == first["entries"]
    assert {entry["size"] for entry in whole["entries"]} == {16, 20}
    for wrong, message in (({"int8_tries": 0}, r"`int8_tries` \(=0\)"), ({"limit_s": 0.0}, r"`limit_s` \(=0\)")):
        with pytest.raises(ValueError, match=message):
            cuda_fused_study.run(layers, **{**how, **wrong})


def test_an_interrupted_study_goes_on_with_the_same_kernels_only() -> None:
    made_by = {"target": "cuda", "source": "1", "kernels": "2", "choice": "3"}
    head = {"study": "s", "device": "d", "versions": {"system": "one"}, "digests": made_by}
    assert gpu_study.same(head, {**head, "versions": {"system": "two"}, "digests": {**made_by, "source": "other"}})
    assert not gpu_study.same(head, {**head, "digests": {**made_by, "kernels": "other"}})
    assert not gpu_study.same({name: value for name, value in head.items() if name != "digests"}, head)


def test_a_form_without_a_legal_tile_has_a_reason(fake_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    conv = Conv2d.parse("n1-c64x224x224-k64x3x3-p1-float16")
    ours = {one: recipe for one, recipe in recipes(conv, H200, 1, ranked(conv)).items() if one[0] != PROTOTYPE}
    part = cuda_fused_study.PARTS[0]
    built: dict[Any, Any] = {one: REFUSED if one[0] == "pkf-llc-32" else one for one in ours}
    entries = cuda_fused_study.time_part(part, conv, ours, built, part.forms, 2, 1.0, {})
    [none] = [entry for entry in entries if entry.form == PROTOTYPE]
    assert none.ms is None and none.failed == "no tile of it is legal for the layer"


def test_what_failed_is_told_from_what_was_not_measured() -> None:
    def entry(form: str, ms: float | None, failed: str | None = None, size: int = 224) -> dict[str, Any]:
        return {"form": form, "layout": "NCHW", "batch": 1, "size": size, "ms": ms, "error": ms and 1e-3, "failed": failed, "algorithm": ""}

    entries = [entry("prototype", 2.0), entry("tvm", None, "tvm: searching: no candidate ran"), entry("prototype", 3.0, size=256)]
    head = {"versions": {}, "brand": "B", "device": "d", "date": "2026-01-01"}
    text = fused_report.table([{**head, "entries": entries}])
    assert "| NCHW | 1 | 224x224 | failed | failed | - | 2.000 | - | - | - | - | - | - | - | - | failed |" in text
    assert "| NCHW | 1 | 256x256 | failed | failed | - | 3.000 | - | - | - | - | - | - | - | - | - |" in text
    found = {**entry("tvm", 1.0), "algorithm": "8 trials"}
    assert "default search, 8 trials." in fused_report.table([{**head, "entries": [*entries, found]}]) and "default search." in text
    assert "Failed: tvm: searching: no candidate ran." in text and "| NCHW | 1 | - | - | - | 1.0e-03 |" in text
