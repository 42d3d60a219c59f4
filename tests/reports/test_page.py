"""The HTML page: its content from small results and logs, well-formed, with every text escaped, and clear about what is missing."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pages
import pytest
from pages import KEY, Tree
from recorded import bad, fill, ok

pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")

from im2win.cli.main import main
from im2win.records.log import Log
from im2win.reports.page import svg
from im2win.reports.page.sources import SourceError, only, read
from im2win.reports.page.tuned import best_so_far, tuned

HOSTILE = "</td></svg><script>alert(1)</script><img src=x onerror=alert(2)>\"'& $\\frac{$ \x00\u202e"


# --- records -------------------------------------------------------------------------------------------------------


def test_the_best_of_each_method_is_the_last_record_of_a_candidate(tmp_path: Path) -> None:
    [records] = read([], [pages.log(tmp_path)]).tuned.values()
    found = tuned(records)
    assert [(record.method, record.seconds) for record in found.best] == [
        ("im2win/stored", 2.5e-3), ("direct/tiled", 4e-3), ("im2col/tiled", 9e-3),
    ]  # fmt: skip
    assert found.candidates == {"direct/tiled": 1, "im2win/stored": 4, "im2col/tiled": 1}
    assert (found.default_s, found.failed, len(found.trials)) == (4e-3, 2, 6)
    assert {(one.outcome, one.message, one.count) for one in found.failures} == {("crashed", "signal 11", 1), ("wrong", "signal 11", 1)}
    assert best_so_far(found.trials) == [(1, 4e-3), (2, 3e-3), (4, 2e-3), (6, 2e-3)]


def test_threads_and_targets_are_layers_of_their_own(tmp_path: Path) -> None:
    fill(Log(tmp_path), ok(), ok(threads=1), ok(target="cuda"))
    assert [layer[1:3] for layer in read([], [tmp_path]).tuned] == [("cpu", 2), ("cpu", 1), ("cuda", 2)]


# --- the page ------------------------------------------------------------------------------------------------------


def test_the_page_holds_what_was_measured(tmp_path: Path) -> None:
    text = pages.everything(tmp_path)
    tree = Tree(text)
    for words in (
        "1 device, 3 result files, 1 tuned layer with 7 records", "demo, float32, batch 1", "Ladder: demo, float32, batch 1", "A CPU",
        "ONNX Runtime", "2.00x", "0.50x", "it crashed", "im2win failed: no schedule", "Error 1.0e-07, at most",
        "Workspace 1.0 MiB; im2col's matrix takes", "1.0 MiB (25 %)", "im2win / stored, 2500 µs, 92 GFLOPS",
        "2 candidates of 6 failed: 1 crashed, 1 wrong result", "signal 11", "420 GFLOPS",
        "im2col / tiled", "2.0", "0.27.0",
    ):  # fmt: skip
        assert words in tree.text, words
    assert tree.counts["svg"] == 3 and tree.counts["title"] == 4  # a roofline, a ladder and a search
    assert "script" not in tree.counts and not re.search(r"https?://", text)
    assert "prefers-color-scheme: dark" in text and 'name="viewport"' in text


def test_tables_and_figures_are_accessible(tmp_path: Path) -> None:
    tree = Tree(pages.everything(tmp_path))
    assert tree.counts["table"] == tree.counts["caption"] == tree.counts["thead"]
    assert all(values.get("scope") in ("col", "row") for tag, values in tree.attributes if tag == "th")
    named = [values["aria-labelledby"] or "" for tag, values in tree.attributes if tag == "svg"]
    assert all(set(one.split()) <= set(tree.ids) for one in named)
    regions = [values for _, values in tree.attributes if values.get("role") == "region"]
    assert regions and all(values.get("tabindex") == "0" and values.get("aria-label") for values in regions)


def test_texts_of_files_are_escaped(tmp_path: Path) -> None:
    one = pages.result(suite=HOSTILE, brand=HOSTILE, versions={HOSTILE: HOSTILE}, date=HOSTILE)
    names = dict.fromkeys(("layer", "algorithm", "best_peer", "tier", "peak_failed"), HOSTILE)
    one.layers[0] = replace(one.layers[0], **names, peers={HOSTILE: 2.0}, tuned=False)
    one.layers[2] = replace(one.layers[2], failed=HOSTILE, peers_failed={HOSTILE: HOSTILE})
    one.save(tmp_path / "results" / "a<b>&.json")
    ladder, memory = pages.ladder(), pages.memory()
    ladder.layers[0].layer, ladder.layers[0].spread[HOSTILE] = HOSTILE, one.layers[0].spread["ours"]
    ladder.save(tmp_path / "results" / "ladder.json")
    memory.layers[0] = replace(memory.layers[0], layer=HOSTILE, torch_bytes={HOSTILE: 5}, cudnn_choice=HOSTILE, cudnn_bytes={HOSTILE: 7})
    memory.save(tmp_path / "results" / "memory-x.json")
    (tmp_path / "results" / "<img src=x>.json").write_text("{")
    fields = {"tvm": HOSTILE, "im2win": HOSTILE, "tile": {HOSTILE: HOSTILE}}
    fill(Log(tmp_path / "logs"), ok(algorithm=HOSTILE, schedule=HOSTILE, **fields), replace(bad(**fields), message=HOSTILE))
    text = pages.page([tmp_path / "results"], [tmp_path / "logs"])
    tree = Tree(text)
    assert "script" not in tree.counts and "img" not in tree.counts
    assert tree.text.count("<script>alert(1)</script>") >= 10 and "\x00" not in text and "\u202e" not in text
    assert tree.counts["svg"] == 3


def test_lone_surrogates_and_long_texts_can_be_written(tmp_path: Path) -> None:
    one = pages.result(suite="\ud800" * 3)
    one.layers[0].layer = "x" * 100_000
    path = tmp_path / "r.json"
    path.write_text(json.dumps(one.as_dict()))
    text = pages.page([path], [])
    Tree(text)
    assert len(text.encode()) < 300_000


# --- what is missing -----------------------------------------------------------------------------------------------


def test_an_empty_folder_says_what_to_do(tmp_path: Path) -> None:
    text = Tree(pages.page([tmp_path], [tmp_path])).text
    assert f"There are no results in {tmp_path}" in text and f"There are no tuning records in {tmp_path}" in text
    text = Tree(pages.page([], [])).text
    assert "No result files were named" in text and "No tuning records were named" in text


def test_a_device_folder_in_place_of_its_parent_gets_a_hint(tmp_path: Path) -> None:
    fill(Log(tmp_path), one := ok())
    [note] = [note for note in read([tmp_path], [tmp_path / one.device]).notes if "records" in note]
    assert note.endswith(f"Name the folder above it: {tmp_path}.")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"device": "../x"}, "`device` (='../x') must be a device's slug"),
        ({"dtype": "float1"}, "`dtype` (='float1') must begin with one of"),
        ({"ceilings": {"fma_gflops": 1.0}}, "`ceilings['copy_gbs']` (=None) must be from"),
        ({"ceilings": {"fma_gflops": 1e300, "copy_gbs": 1.0}}, "`ceilings['fma_gflops']` (=1e+300) must be from"),
        ({"layers": [{"layer": "a", "conv": "nonsense"}]}, "`conv` (='nonsense') must be the key of a valid Conv2d"),
        ({"layers": [{"layer": "a", "conv": KEY, "ours_ms": 0.0}]}, "`ours_ms` (=0.0) of layer 'a' must be from"),
        ({"layers": [{"layer": "a", "conv": KEY, "best_peer": "b"}]}, "`best_peer` (='b') of layer 'a' must be one of its peers"),
        ({"layers": [{"layer": "a", "conv": KEY, "ours_ms": "1"}]}, "`layers[0].ours_ms` (='1') must be a finite number or null"),
        ({"layers": {}}, "its fields must be those of schema 2 ('layers' is not a list)"),
        ({"schema": 99}, "`schema` must be 1 or 2"),
    ],
)  # fmt: skip
def test_a_result_that_cannot_be_used_is_named_and_left_out(tmp_path: Path, changes: dict[str, object], reason: str) -> None:
    pages.result().save(tmp_path / "good.json")
    (tmp_path / "wrong.json").write_text(json.dumps({**pages.result().as_dict(), **changes}))
    found = read([tmp_path], [])
    [unusable] = found.unusable
    assert list(found.results) == ["good"] and unusable.path.endswith("wrong.json") and unusable.reason.startswith(reason.split("(")[0])
    assert reason in unusable.reason and reason[:20] in Tree(pages.page([tmp_path], [])).text


def test_other_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "study.json").write_text('{"schema": 2, "digests": {}, "study": "zoo"}')
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "binary.json").write_bytes(b"\xff\x00")
    memory = pages.memory()
    memory.layers[0].formula_bytes["direct/tiled"] = -1
    memory.save(tmp_path / "memory-x.json")
    reasons = {Path(one.path).stem: one.reason for one in read([tmp_path], []).unusable}
    assert set(reasons) == {"study", "list", "binary", "memory-x"}
    assert reasons["study"].startswith("a study") and "must be at least 0" in reasons["memory-x"]


def test_broken_lines_of_a_log_are_named(tmp_path: Path) -> None:
    folder = pages.log(tmp_path)
    [path] = folder.glob("*/*.jsonl")
    with path.open("a") as file:
        file.write("{broken\n")
    found = read([], [folder])
    assert [one.path for one in found.unusable] == [f"{path}, line 8"] and len(next(iter(found.tuned.values()))) == 7


def test_a_log_whose_first_records_all_failed_is_shown_without_a_search(tmp_path: Path) -> None:
    fill(Log(tmp_path), bad(), bad("timeout", tile={"rows": 5}), ok())
    tree = Tree(pages.page([], [tmp_path]))
    assert "svg" not in tree.counts and "2 candidates" not in tree.text and "1 candidate of 2 failed: 1 took too long" in tree.text
    fill(Log(tmp_path / "none"), bad())
    assert "nothing was timed; 1 candidate failed" in Tree(pages.page([], [tmp_path / "none"])).text


# --- parts ---------------------------------------------------------------------------------------------------------


def test_devices_and_layers_are_chosen(tmp_path: Path) -> None:
    pages.result().save(tmp_path / "results/a.json")
    pages.result(device="other-cpu-2t").save(tmp_path / "results/b.json")
    found = read([tmp_path / "results"], [pages.log(tmp_path / "logs")])
    other = only(found, "other-cpu-2t", None)
    assert list(other.results) == ["b"] and not other.tuned
    named = only(found, None, ["conv1"])
    assert [len(one.layers) for one in named.results.values()] == [1, 1] and len(named.tuned) == 1  # conv1 has the log's key
    assert not only(found, None, ["conv3"]).tuned
    with pytest.raises(SourceError, match=r"`--device` \(='x'\) must be a device of the results or records: intel-\S+, other-cpu-2t\."):
        only(found, "x", None)
    with pytest.raises(SourceError, match=r"`--layers` \(='conv9'\) must name layers of the results or records: conv1, conv2, conv3, n1-"):
        only(found, None, ["conv1", "conv9"])


def test_figures_are_small_and_take_the_pages_colours(tmp_path: Path) -> None:
    from matplotlib.figure import Figure

    def draw() -> Figure:
        figure = Figure(figsize=(2, 1))
        axes = figure.subplots()
        axes.plot([1, 2], [3, 4], "o-", color="#0072B2")
        axes.set_title(svg.label("a <b> & $x$ 計"))
        return figure

    text = svg.inline(draw, "one", "A <title>", 'a "description"')
    assert text.startswith("<svg viewBox=") and "<?xml" not in text and "metadata" not in text and len(text) < 12_000
    assert "var(--c-0072b2, #0072b2)" in text and "a &lt;b&gt; &amp; $x$ 計" in text and "A &lt;title&gt;" in text
    ids = re.findall(r' id="([^"]*)"', text)
    assert ids and all(one.startswith("one-") for one in ids) and svg.inline(draw, "one", "A <title>", 'a "description"') == text


# --- the command ---------------------------------------------------------------------------------------------------


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["report", *words])
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, err


def test_the_command_writes_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pages.result().save(tmp_path / "r.json")
    out = tmp_path / "new" / "page.html"
    status, said, _ = run(capsys, "--html", str(out), "--results", str(tmp_path / "r.json"), "--logs", str(pages.log(tmp_path / "logs")))
    assert status == 0 and said.startswith(f"{out}: 1 result file, 1 tuned layer, ")
    Tree(out.read_text(encoding="utf-8"))


def test_without_names_the_users_own_records_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("IM2WIN_LOGS", str(pages.log(tmp_path / "own")))
    monkeypatch.chdir(tmp_path)
    status, said, _ = run(capsys, "--html", "page.html")
    assert status == 0 and "No result files were named" in said and "page.html: 0 result files, 1 tuned layer" in said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "name texts to fill, or `--html FILE` for a page"),
        ("a.md --logs .", "`--logs` is for the page"),
        ("a.md --device x", "`--device` is for the page"),
        ("a.md --results r.json", "`--results` (='r.json') must be one folder that exists, to fill texts"),
        ("a.md", "`--results` (='benchmarks/results') must be one folder that exists"),
        ("--html . --logs .", "`--html` (='.') must be a file; it is a folder"),
        ("--html p.html --results nowhere", "'nowhere' does not exist"),
        ("--html p.html --logs r.json", "is a file"),
        ("--html p.html --results r.json --layers ,", "`--layers` (='') must name layers"),
    ],
)  # fmt: skip
def test_nonsense_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    pages.result().save(tmp_path / "r.json")
    (tmp_path / "a.md").write_text("no table\n")
    status, said, err = run(capsys, *words.split())
    assert status == 2 and said == "" and message in err and not (tmp_path / "p.html").exists()
