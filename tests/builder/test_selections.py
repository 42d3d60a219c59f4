"""Selections that are kept: found as long as nothing changes that the look-up reads, by processes that import no compiler."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from recorded import fill, ok

from im2win import Conv2d
from im2win.builder import devices, selections
from im2win.builder.batch import DEFAULT, Chooser
from im2win.builder.cache import Artefacts
from im2win.builder.selections import Question, Selection, Selections
from im2win.device.cpu import Machine
from im2win.records.log import Log
from im2win.records.tiers import NO_RECORD

CONV = Conv2d(1, 3, 8, 8, 4, 3)
QUESTION = Question(CONV, "float32", "default")
FOUND = Selection("direct/tiled", {"rows": 2, "vectors": [1, 2]}, "exact", "artefact")


@pytest.fixture
def device() -> Machine:
    return Machine.host()


def kept(folder: Path, device: Machine, logs: Path | None = None) -> Selection | None:
    return Selections(folder, device, logs).find(QUESTION)


def test_a_selection_is_found_again(tmp_path: Path, device: Machine) -> None:
    assert kept(tmp_path, device) is None
    Selections(tmp_path, device, None).keep({QUESTION: FOUND})
    assert kept(tmp_path, device) == FOUND
    other = Question(CONV.with_(batch=2), "float32", "default")
    Selections(tmp_path, device, None).keep({other: Selection("", {}, "why", "")})
    assert kept(tmp_path, device) == FOUND, "more selections join the first"


@pytest.mark.parametrize(
    "question",
    [Question(CONV, "exact", "default"), Question(CONV, "float32", "keep"), Question(CONV.with_(bias=True), "float32", "default")],
    ids=["accuracy", "untuned", "layer"],
)
def test_another_question_has_its_own_selection(tmp_path: Path, device: Machine, question: Question) -> None:
    Selections(tmp_path, device, None).keep({QUESTION: FOUND})
    assert Selections(tmp_path, device, None).find(question) is None


def test_another_device_has_its_own_selections(tmp_path: Path, device: Machine) -> None:
    """Also one of the same name, whose caches differ."""
    Selections(tmp_path, device, None).keep({QUESTION: FOUND})
    for other in (replace(device, threads=device.threads + 1), replace(device, l2_bytes=2 * device.l2_bytes)):
        assert kept(tmp_path, other) is None


def _append(log: Log) -> None:
    fill(log, ok(2e-3, CONV))


def _touch(log: Log) -> None:
    path = next(path for path in log.folder.rglob("*.jsonl"))
    os.utime(path, ns=(1, 1))


def _remove(log: Log) -> None:
    next(path for path in log.folder.rglob("*.jsonl")).unlink()


@pytest.mark.parametrize("change", [_append, _touch, _remove])
@pytest.mark.parametrize("whose", ["named", "user"])
def test_a_change_of_a_log_voids_them(
    tmp_path: Path, device: Machine, monkeypatch: pytest.MonkeyPatch, change: Callable[[Log], None], whose: str
) -> None:
    log = fill(Log(tmp_path / "logs"), ok(1e-3, CONV))
    monkeypatch.setenv("IM2WIN_LOGS", str(log.folder if whose == "user" else tmp_path / "none"))
    logs = log.folder if whose == "named" else None
    Selections(tmp_path, device, logs).keep({QUESTION: FOUND})
    assert kept(tmp_path, device, logs) == FOUND
    change(log)
    assert kept(tmp_path, device, logs) is None


def test_a_new_log_and_other_code_void_them(tmp_path: Path, device: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    Selections(tmp_path, device, None).keep({QUESTION: FOUND})
    assert kept(tmp_path, device, tmp_path / "logs") is None, "another folder is searched"
    assert kept(tmp_path, device, tmp_path / "new") is None
    Selections(tmp_path, device, tmp_path / "new").keep({QUESTION: FOUND})
    (tmp_path / "new").write_text("")
    assert kept(tmp_path, device, tmp_path / "new") is None, "a file is no folder of records"
    package = tmp_path / "package"
    (package / "room").mkdir(parents=True)
    (package / "room" / "module.py").write_text("x = 1\n")
    before = selections._files(package)
    (package / "room" / "__pycache__").mkdir()
    (package / "room" / "__pycache__" / "module.pyc").write_text("")
    assert selections._files(package) == before
    (package / "room" / "module.py").write_text("x = 10\n")
    assert selections._files(package) != before
    monkeypatch.setattr(selections, "_installed", lambda: "another")
    assert kept(tmp_path, device) is None


def test_few_states_are_kept(tmp_path: Path, device: Machine) -> None:
    for number in range(8):
        Selections(tmp_path, device, tmp_path / str(number)).keep({QUESTION: FOUND})
    states = json.loads((tmp_path / device.name / "selections.json").read_text())
    assert len(states) == selections._MOST_STATES
    assert kept(tmp_path, device, tmp_path / "7") == FOUND and kept(tmp_path, device, tmp_path / "1") is None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"a": 1}', '{"STATE": {"QUESTION": {"algorithm": 1}}}'])
def test_a_damaged_file_is_no_file(tmp_path: Path, device: Machine, text: str) -> None:
    mine = Selections(tmp_path, device, None)
    path = tmp_path / device.name / "selections.json"
    path.parent.mkdir()
    path.write_text(text.replace("STATE", mine._state).replace("QUESTION", str(QUESTION)))
    assert mine.find(QUESTION) is None
    mine.keep({QUESTION: FOUND})
    assert mine.find(QUESTION) == FOUND


def test_where_nothing_can_be_written_nothing_is_kept(tmp_path: Path, device: Machine) -> None:
    (tmp_path / "file").write_text("")
    mine = Selections(tmp_path / "file", device, None)
    mine.keep({QUESTION: FOUND})
    assert mine.find(QUESTION) is None


def test_a_chooser_looks_up_once(tmp_path: Path, device: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    chooser = Chooser(tmp_path)
    first = chooser.select(CONV, device)
    assert first.tier == DEFAULT and first.algorithm
    unsupported = Conv2d(1, 3, 8, 8, 4, 3, dtype="int8", activation="silu")
    refused = chooser.select(unsupported, device)
    assert not refused.algorithm and "int8" in refused.tier
    assert Chooser(tmp_path, untuned="keep").select(CONV, device) == Selection("", {}, NO_RECORD, "")
    name, op = Artefacts(tmp_path).selected(first, CONV, device)
    assert (name, op.conv) == (first.name, CONV)
    monkeypatch.setattr(Chooser, "choose", None)
    assert chooser.select(CONV, device) == first and chooser.select(unsupported, device) == refused


_AGAIN = """
import sys, torch
import im2win.torch
from im2win.frontends.torch import native
from torch import nn
native.begin = native.load = lambda **_: False  # calls pass through Python: no C++ compiler runs
torch.manual_seed(0)
module = nn.Sequential(*(nn.Conv2d(3, 3, 3 + 2 * i, padding=i + 1) for i in range(4))).eval()
fast = im2win.torch.optimize(module, torch.rand(1, 3, 12, 12), guard=False)
report = fast.im2win_report
print(report.swapped, report.built, int("tvm" in sys.modules), int("im2win.registry.ranking" in sys.modules))
"""


def test_a_second_process_imports_no_compiler_and_ranks_nothing(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    environment = {**os.environ, "IM2WIN_CACHE": str(tmp_path), "PYTHONPATH": str(Path(selections.__file__).parents[2])}

    def run() -> list[str]:
        done = subprocess.run([sys.executable, "-c", _AGAIN], capture_output=True, text=True, timeout=200, env=environment, check=True)
        return done.stdout.split()

    assert run()[:2] == ["4", "4"]
    assert run() == ["4", "0", "0", "0"]


# --- the CPU's facts


def test_the_cpus_facts_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IM2WIN_CACHE", str(tmp_path))
    asked = Machine.host()
    assert devices.host() == asked
    if not devices._said():
        pytest.skip("this system does not say which CPU it has")
    assert [path.parent.name for path in tmp_path.rglob("*.json")] == ["cpus"]
    devices._KNOWN.clear()
    with monkeypatch.context() as patch:
        patch.setattr("im2win.device.cpu._facts", None)
        assert devices.host() == asked
        assert devices.host(1) == Machine(**{**vars(asked), "threads": 1})
    for threads in (0, asked.threads + 1, True, "2"):
        with pytest.raises(ValueError, match="`threads`"):
            devices.host(threads)  # type: ignore[arg-type]
    damaged = next(tmp_path.rglob("*.json"))
    damaged.write_text('{"brand": 1}')
    devices._KNOWN.clear()
    assert devices.host() == asked


def test_a_cpu_is_known_by_what_the_system_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_CACHES", tmp_path / "cache")

    def said(text: str) -> str:
        (tmp_path / "cpuinfo").write_text(text)
        monkeypatch.setattr(devices, "_CPUINFO", tmp_path / "cpuinfo")
        return devices._said()

    first = said("processor\t: 0\nmodel name\t: A\ncpu MHz\t\t: 1000\n\nprocessor\t: 1\n")
    assert first and said("processor\t: 7\nmodel name\t: A\ncpu MHz\t\t: 2000.5\n") == first
    assert said("processor\t: 0\nmodel name\t: B\n") != first
    (tmp_path / "cache" / "index0").mkdir(parents=True)
    (tmp_path / "cache" / "index0" / "size").write_text("32K\n")
    assert said("processor\t: 0\nmodel name\t: A\n") != first
    monkeypatch.setattr(devices, "_CPUINFO", tmp_path / "none")
    assert devices._said() == ""
