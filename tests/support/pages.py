"""Results, records and HTML pages for tests of the page."""

from __future__ import annotations

from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from recorded import bad, fill, ok

from im2win.bench.memory_result import LayerMemory, MemoryResult
from im2win.bench.results import Result, Row, Spread
from im2win.records.log import Log
from im2win.reports.page.page import render
from im2win.reports.page.sources import read
from im2win.studies.entries import LADDER

KEY = "n1-c64x56x56-k64x3x3-p1"
VOID = {"meta", "link", "br", "hr", "img", "input", "col", "wbr"}


class Tree(HTMLParser):
    """Reads a page, and fails where its elements are not nested, ids are used twice, or something is loaded from elsewhere."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.counts: dict[str, int] = {}
        self.ids: list[str] = []
        self.links: list[str] = []
        self.attributes: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert not self.open, f"not closed: {self.open}"
        assert len(self.ids) == len(set(self.ids)), "an id is used twice"
        missing = {link[1:] for link in self.links if link.startswith("#")} - set(self.ids)
        assert not missing, f"links lead nowhere: {missing}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.counts[tag] = self.counts.get(tag, 0) + 1
        values = dict(attrs)
        self.attributes.append((tag, values))
        self.ids += [values["id"] or ""] if "id" in values else []
        self.links += [values["href"] or ""] if "href" in values else []
        assert "src" not in values and not any(name.startswith("on") for name in values), f"{tag} {values}"
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> inside {self.open}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        self.text += " " if not data.strip() else data


def result(**changes: Any) -> Result:
    rows = [
        Row("conv1", KEY, 1, 1.0, "im2win/stored", True, 231.2, 0.5, 1 << 20, 1e-7, {"torch_nchw": 4.0, "onnxruntime": 2.0}, "onnxruntime",
            2.0, 1.25, 1.6, spread={"ours": Spread(1.0, 0.9, 1.1, 15)}),
        Row("conv2", "n1-c64x28x28-k64x3x3", 1, 4.0, "direct/tiled", False, 12.0, 0.03, 64, 1e-7, {"onnxruntime": 2.0}, "onnxruntime", 0.5,
            peers_failed={"torch_nchw": "it crashed"}),
        Row("conv3", "n1-c64x14x14-k64x3x3", failed="no schedule"),
    ]  # fmt: skip
    ceilings = {"fma_gflops": 420.4, "copy_gbs": 27.0}
    one = Result("demo", "float32", 1, "intel-xeon-rocketlake-2t", "A CPU", 2, {"torch": "2.0"}, "abc", "2026-01-02", ceilings, rows)
    return replace(one, **changes)


def ladder() -> Result:
    row = Row("conv1", KEY, spread={"plain": Spread(8.0, 8.0, 8.0, 3), "blocked": Spread(2.0, 2.0, 2.0, 3)})
    return result(suite=f"{LADDER}demo", layers=[row])


def memory() -> MemoryResult:
    ours = {"direct/tiled": 0, "im2col/tiled": 4 << 20, "im2win/stored": 1 << 20}
    row = LayerMemory("conv1", KEY, 1 << 21, ours, {}, {"torch_nchw": 512})
    return MemoryResult("demo", "float32", 1, "intel-xeon-rocketlake-2t", "A CPU", {}, "abc", "2026-01-02", [row])


def log(folder: Path) -> Path:
    """A search of six candidates: the default tile first, two failures, and the best measured again."""
    tile = {"tile": {"rows": 8}, "trial": 3}
    fill(
        Log(folder), ok(4e-3, rivals="float32:0123456789abcdef:default", algorithm="direct", error=1e-7, tolerance=1e-5), ok(3e-3),
        bad("crashed", tile={"rows": 5}), ok(2e-3, **tile), bad("wrong", tile={"rows": 6}),
        ok(9e-3, algorithm="im2col", extra_bytes=1 << 20), ok(2.5e-3, **tile),
    )  # fmt: skip
    return folder


def page(results: list[Path], logs: list[Path]) -> str:
    return render(read(results, logs))


def everything(folder: Path) -> str:
    """The page of a folder with all kinds of results, and of a log."""
    result().save(folder / "results/a/demo.json")
    ladder().save(folder / "results/a/ladder-demo.json")
    memory().save(folder / "results/a/memory-demo.json")
    return page([folder / "results"], [log(folder / "logs")])
