"""`--json`: one JSON value on stdout and nothing else, with the keys that docs/command_line.md lists; progress goes to stderr."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from paths import ROOT
from recorded import ok

from im2win.cli.commands import facts
from im2win.device import gpu
from im2win.device.cpu import Machine
from im2win.records.folders import user_folder
from im2win.records.log import Log
from im2win.records.record import Record, utc_now
from im2win.registry.schedules import SCHEDULES
from im2win.spec.conv2d import Conv2d
from im2win.tuner import layers
from im2win.tuner.tuning import TuneError

ONE, TWO = "n1-c8x10x10-k16x3x3-p1", "n1-c64x28x28-k64x3x3-p1"
TWO_LAYERS = ["papers12", "--layers", "conv9,conv12", "--batch", 1]


def _documented(verb: str) -> set[str]:
    """The keys in the row of a verb's JSON in the guide."""
    text = (ROOT / "docs" / "command_line.md").read_text(encoding="utf-8")
    (row,) = re.findall(rf"^\| `im2win {verb} --json` \| (.*) \|$", text, re.MULTILINE)
    return set(re.findall(r"`(\w+)`", row))


def _keys(value: Any) -> set[str]:
    """The keys of a value and of those in it, but not of tiles and tables by name."""
    if isinstance(value, list):
        return set().union(*map(_keys, value))
    if not isinstance(value, dict):
        return set()
    free = {"tile", "targets", "layouts"}
    return set(value).union(*(_keys(part) for name, part in value.items() if name not in free))


@pytest.fixture
def tuned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """What tuning a layer gives, layer by layer: nothing is measured here."""
    results: list[Any] = []

    def tune(conv: Conv2d, *_: Any, **settings: Any) -> Record:
        result = results.pop(0)
        if isinstance(result, BaseException):
            raise result
        record: Record = result(conv)
        Log(settings["logs"]).append(record)
        return record

    monkeypatch.setattr(layers, "tune", tune)
    monkeypatch.setenv("IM2WIN_LOGS", str(tmp_path / "mine"))
    return results


def _record(conv: Conv2d) -> Record:
    return ok(conv=conv, device=Machine.host().name, extra_bytes=0, date=utc_now())


def test_tune(tuned: list[Any], command: Callable[..., Any]) -> None:
    tuned += [_record, _record]
    done = command("tune", *TWO_LAYERS, "--trials", 3, "--json")
    value = json.loads(done.out)
    assert done.status == 0 and _keys(value) | {"failed"} == _documented("tune")
    assert (value["target"], value["trials"], value["logs"], value["interrupted"]) == ("cpu", 3, str(user_folder()), False)
    first, second = value["layers"]
    assert (first["layer"], first["conv"], first["failed"], second["layer"]) == ("conv9", "n1-c64x56x56-k64x3x3", None, "conv12")
    assert (first["algorithm"], first["schedule"], first["best_s"], first["tile"]) == ("im2win", "stored", 1e-3, {"rows": 4})
    assert done.err.startswith("im2win: tuning: 6 of 6 in "), "progress is on stderr"


def test_tune_tells_what_failed_and_ends_with_1(tuned: list[Any], command: Callable[..., Any]) -> None:
    tuned += [_record, TuneError("found no right kernel")]
    done = command("tune", *TWO_LAYERS, "--json")
    assert done.status == 1 and [layer["failed"] for layer in json.loads(done.out)["layers"]] == [None, "found no right kernel"]
    tuned += [_record, TuneError("found no right kernel")]
    done = command("tune", *TWO_LAYERS)
    assert done.status == 1 and "conv12  not tuned: found no right kernel" in done.out and "Records are in" in done.out
    tuned += [TuneError("found no right kernel")] * 2
    done = command("tune", *TWO_LAYERS, "--json")
    assert (done.status, done.out, done.err) == (2, "", "im2win: found no right kernel\n")


def test_tune_tells_which_layers_had_their_trials_before(tuned: list[Any], command: Callable[..., Any]) -> None:
    def of_before(conv: Conv2d) -> Record:
        return replace(_record(conv), date="2026-01-01T00:00:00+00:00")

    tuned += [of_before, _record]
    done = command("tune", *TWO_LAYERS, "--json")
    assert [layer["tuned_before"] for layer in json.loads(done.out)["layers"]] == [True, False]
    tuned += [of_before, _record]
    text = command("tune", *TWO_LAYERS, "--trials", 3).out
    assert "1 of 2 layers had 3 trials before: nothing was measured for it, and --trials 6 goes on." in " ".join(text.split())
    tuned += [_record, _record]
    assert "before" not in command("tune", *TWO_LAYERS).out


def test_interrupted_tune_tells_what_it_has(tuned: list[Any], command: Callable[..., Any]) -> None:
    tuned += [_record, KeyboardInterrupt()]
    done = command("tune", *TWO_LAYERS, "--json")
    value = json.loads(done.out)
    assert done.status == 130 and value["interrupted"] and [layer["failed"] for layer in value["layers"]] == [None, "interrupted"]


def test_tune_says_where_the_records_are(tuned: list[Any], command: Callable[..., Any], tmp_path: Path) -> None:
    tuned += [_record, _record]
    assert f"Records are in {user_folder()}; `im2win build {ONE} --out DIR`" in command("tune", ONE).out
    assert f"`im2win build {ONE} --logs {tmp_path / 'other'} --out DIR`" in command("tune", ONE, "--logs", tmp_path / "other").out
    assert len(list(Log(user_folder()))) == len(list(Log(tmp_path / "other"))) == 1


def test_logs_show(command: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IM2WIN_LOGS", str(tmp_path))
    log = Log(tmp_path)
    log.append(_record(Conv2d.parse(ONE)))
    failed = ok(conv=TWO, device="other-cpu", outcome="crashed", samples_s=[], message="signal 11")
    log.append(failed)
    with log.path(Conv2d.parse(TWO), "other-cpu").open("a") as file:
        file.write("{broken\n")
    done = command("logs", "show", "--json")
    value = json.loads(done.out)
    assert done.status == 0 and not done.err and _keys(value) == _documented("logs show")
    assert value["folder"] == str(tmp_path) and value["problems"][0]["line"] == 2
    by_conv = {layer["conv"]: layer for layer in value["layers"]}
    assert by_conv[ONE]["best"]["best_s"] == 1e-3 and by_conv[TWO]["best"] is None and by_conv[TWO]["failed"] == 1
    assert ONE in command("logs", "show").out, "the user's own folder"
    only = json.loads(command("logs", "show", tmp_path, "--device", "other-cpu", "--json").out)
    assert [layer["device"] for layer in only["layers"]] == ["other-cpu"]


@pytest.mark.parametrize("verb", ["show", "prune", "restamp"])
def test_there_are_no_own_logs(verb: str, command: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IM2WIN_LOGS", str(tmp_path / "none"))
    done = command("logs", verb)
    assert done.status == 2 and f"`im2win tune` makes {tmp_path / 'none'}, and IM2WIN_LOGS names another" in done.err


def test_device(command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "device_gpu", lambda: gpu.H200)
    both = json.loads(command("device", "--json").out)
    assert both["cpu"]["name"] == Machine.host().name and both["gpu"]["name"] == "nvidia-h200"
    assert both["gpu"]["capability"] == "9.0" and both["gpu"]["measured"] is True and both["cpu"]["threads"] == Machine.host().threads
    assert both["folders"]["tuning_records"] == str(user_folder())
    assert _keys(both) | {"no_gpu"} == _documented("device")
    assert set(json.loads(command("device", "--target", "cpu", "--json").out)) == {"folders", "cpu"}
    assert str(user_folder()) in command("device").out


def test_device_without_a_gpu(command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> None:
        raise gpu.NoGpuError("there is no CUDA device 0 on this machine.")

    monkeypatch.setattr(facts, "device_gpu", none)
    value = json.loads(command("device", "--json").out)
    assert "gpu" not in value and value["no_gpu"] == "there is no CUDA device 0 on this machine."


def test_algorithms(command: Callable[..., Any]) -> None:
    value = json.loads(command("algorithms", "--json").out)
    assert _keys(value) == _documented("algorithms") and [row["name"] for row in value["algorithms"]] == list(SCHEDULES)
    rows = {row["name"]: row for row in value["algorithms"]}
    assert rows["direct/tiled"]["targets"]["stride"] == ["cpu", "cuda"] and "NCHW" in rows["direct/tiled"]["layouts"]["cpu"]["float32"]
    assert set(rows["direct/tiled"]["targets"]) == set(facts.PROBES)


def test_warnings_and_progress_are_lines_on_stderr_while_a_verb_runs(
    command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(facts, "device_gpu", lambda: logging.getLogger("im2win").info("looked") or gpu.H200)
    assert command("device", "--json").err == "im2win: looked\n"
    logging.getLogger("im2win").warning("not a verb's")
    assert "im2win: " not in capsys.readouterr().err
