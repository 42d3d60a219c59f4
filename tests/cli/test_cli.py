"""The command line: what its verbs print and write, and that a bad input is one line on stderr and exit status 2."""

from __future__ import annotations

import functools
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import im2win
from im2win.bench.results import Result
from im2win.cli.commands import tables, tensors, workload
from im2win.cli.commands.build import file_stem
from im2win.cli.commands.demo import im2col_product
from im2win.device.cpu import Machine
from im2win.numerics.reference import reference
from im2win.records.log import Log
from im2win.spec.conv2d import Conv2d

SMALL = "n1-c8x10x10-k16x3x3-p1"  # builds and runs in no time; its row of 10 divides by no vector

START = [sys.executable, "-c", "from im2win.cli.main import main; main()"]


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of records of SMALL, made by the command line."""
    folder = tmp_path_factory.mktemp("tuned")
    done = subprocess.run([*START, "tune", SMALL, "--trials", "3", "--logs", folder], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert SMALL in done.stdout and "GFLOPS" in done.stdout and str(folder) in done.stdout
    return folder


# --- bad inputs ----------------------------------------------------------------------------------------------------

BAD = [
    ("buld", "No such command 'buld'"),
    ("tune", "Missing argument"),
    ("tune nosuch", "'nosuch' must be a suite .*papers12.*, a file ending in .onnx or .jsonl or a key"),
    ("tune papers12 --batch 0", r"`batch` \(=0\) must be at least 1"),
    ("tune papers12 --batch -3", r"`batch` \(=-3\) must be at least 1"),
    ("tune papers12 --batch many", "--batch"),
    ("tune papers12 --batch 99999999", "must have at most 2147483647"),
    ("tune papers12 --layers conv13", r"`--layers` \(='conv13'\) must name layers of the workload: conv1, conv2"),
    ("tune papers12 --layers ,", "must name layers of the workload"),
    ("tune {small} --trials 0", r"`trials` \(=0\) must be an integer of at least 1"),
    ("tune {small} --seed -1", r"`seed` \(=-1\) must be an integer of at least 0"),
    ("tune {small} --threads 0", r"`threads` \(=0\) must be an integer from 1 to"),
    ("tune {small} --threads 4096", r"`threads` \(=4096\) must be an integer from 1 to"),
    ("tune {small} --algorithm fastest", r"`algorithm` \(='fastest'\) must be auto, one of direct"),
    ("tune {small} --target cuda9", r"`target` \(='cuda9'\) must be"),
    ("tune {small}-int8-silu", "no algorithm computes"),
    ("tune {small} --logs {file}", r"`--logs` \(=.*\) must be a folder; it exists and is a file"),
    ("tune n1-c8x10x10", "must look like n8-c64x56x56"),
    ("tune n1-c8x10x10-k16x30x3", "must fit the padded `height`"),
    ("tune {small}-g3", r"`groups` \(=3\) must divide `in_channels` \(=8\)"),
    ("tune {small}-sine", "unknown part 'sine'"),
    ("tune missing.onnx", "must be an existing file"),
    ("tune {onnx}", "must be a whole ONNX"),
    ("tune {small} --wrong", "No such option"),
    ("layers", "Missing argument"),
    ("layers {small} --layers other", "must name layers of the workload"),
    ("build {small}", "Missing option '--out'"),
    ("build {small} --out {file}", r"`--out` \(=.*file'\) must be a folder; it exists and is a file"),
    ("build {small} --out {file}/deeper", r"`--out` \(=.*deeper'\) must be a folder that can be written: Not a directory"),
    ("build {small} --out {empty} --algorithm quick", "must be auto, one of"),
    ("build {small} --out {empty} --target tpu", r"`target` \(='tpu'\) must be"),
    ("bench {small} --against cudnn", r"`against` \(='cudnn'\) must be one of torch"),
    ("bench {small} --target cuda --against onnxruntime", r"`against` \(='onnxruntime'\) must be of torch, inductor, .*cudnn-graph"),
    ("bench {small} --against none --rounds 0", r"`rounds` \(=0\) must be at least 1"),
    ("bench {small} --against none --algorithms quick", "must be auto, one of"),
    ("logs", "Missing command"),
    ("logs show {empty}/none", "must be a folder of tuning records"),
    ("logs merge {empty}/none --into {empty}", "must be a folder of tuning records"),
    ("logs merge {empty}", "Missing option '--into'"),
    ("logs prune {empty} --keep 0", r"`keep` \(=0\) must be at least 1"),
    ("demo --layers conv99", "must name layers of the workload"),
]


@pytest.mark.parametrize(("words", "message"), BAD, ids=[words.replace("/", ".") for words, _ in BAD])
def test_bad_input_is_one_line(words: str, message: str, command: Callable[..., Any], tmp_path: Path) -> None:
    file, model, empty = tmp_path / "file", tmp_path / "text.onnx", tmp_path / "empty"
    file.write_text("words")
    model.write_text("this is no model, although it is named like one")
    empty.mkdir()
    done = command(*words.format(small=SMALL, file=file, onnx=model, empty=empty).split())
    assert done.status == 2
    assert done.err.count("\n") == 1 and done.err.startswith("im2win: "), done.err
    assert "Traceback" not in done.err + done.out
    assert re.search(message, done.err), done.err


def test_debug_shows_where_an_error_comes_from(command: Callable[..., Any]) -> None:
    done = command("--debug", "layers", "nosuch")
    assert done.status == 2 and "WorkloadError" in done.err and done.err.splitlines()[-1].startswith("im2win: 'nosuch'")


def test_a_defect_of_ours_is_not_taken_for_a_bad_input(command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr(workload, "read", broken)
    with pytest.raises(RuntimeError, match="a defect"):
        command("layers", SMALL)


def test_a_missing_extra_is_named(command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    done = command("layers", tmp_path / "model.onnx")
    assert done.status == 2 and "onnx" in done.err and "extra" in done.err


# --- tune, logs ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_second_run_repeats_no_trial(tuned: Path, command: Callable[..., Any]) -> None:
    before = len(list(Log(tuned)))
    done = command("tune", SMALL, "--trials", 3, "--logs", tuned)
    assert done.status == 0 and len(list(Log(tuned))) == before


@pytest.mark.slow
def test_interrupted_tuning_keeps_its_records(tmp_path: Path) -> None:
    words = [*START, "tune", "papers12", "--layers", "conv12", "--batch", "1", "--trials", "5000", "--logs", str(tmp_path)]
    # A program started in the background of a script ignores Ctrl-C, and so would what it starts.
    hears = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=hears)
    try:
        deadline = time.monotonic() + 120
        while not list(Log(tmp_path)):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130 and "Traceback" not in err, err
    assert "Stopped" in out and "goes on from there" in out
    log = Log(tmp_path)
    assert list(log) and not log.problems


def test_logs_show_merge_prune(tuned: Path, command: Callable[..., Any], tmp_path: Path) -> None:
    count = len(list(Log(tuned)))
    shown = command("logs", "show", tuned).out
    assert Machine.host().name in shown and SMALL in shown
    merged = command("logs", "merge", tuned, tuned, "--into", tmp_path)
    assert merged.out.startswith(f"{count} records added, {count} there before, 0 lines")
    path = Log(tmp_path).path(Conv2d.parse(SMALL), Machine.host().name)
    path.write_text(path.read_text() + "{broken\n")
    assert f"{path}:{count + 1}: " in command("logs", "show", tmp_path).out
    before = path.read_text()
    assert "would be kept" in command("logs", "prune", tmp_path, "--dry-run").out and path.read_text() == before
    assert "1 unreadable" in command("logs", "prune", tmp_path, "--stale").out
    kept = list(Log(tmp_path))
    assert 1 <= len(kept) <= count and len({record.algorithm for record in kept}) == len(kept)


# --- build, bench, demo --------------------------------------------------------------------------------------------


def test_built_libraries_give_right_answers(tuned: Path, command: Callable[..., Any], tmp_path: Path) -> None:
    done = command("build", SMALL, "--logs", tuned, "--out", tmp_path)
    assert done.status == 0 and " yes " in done.out
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{SMALL}.so", f"{SMALL}.so.json"]
    op = im2win.load(tmp_path / f"{SMALL}.so")
    generator = np.random.default_rng(0)
    x = generator.integers(-4, 5, op.conv.input_shape).astype("float32")  # small integers: every order of the sum is exact
    w = generator.integers(-4, 5, op.conv.filter_shape).astype("float32")
    rounding = 1e-3 if op.algorithm.startswith("winograd") else 0  # its transforms divide; which algorithm was the fastest is chance
    assert op.tuned and np.abs(op(x, w) - reference(op.conv, x, w)).max() <= rounding


def test_build_without_logs_takes_the_default_tile(command: Callable[..., Any], tmp_path: Path) -> None:
    done = command("build", SMALL, "--logs", tmp_path / "none", "--algorithm", "im2win", "--out", tmp_path / "made" / "here")
    assert done.status == 0 and "im2win" in done.out and " no " in done.out
    assert (tmp_path / "made" / "here" / f"{SMALL}.so").is_file()


def test_file_names_of_layers() -> None:
    taken: set[str] = set()
    assert file_stem("/layer1/conv.2", "key", taken) == "layer1_conv.2"
    assert file_stem("layer1 conv.2", "key", taken) == "layer1_conv.2-key"
    assert file_stem("layer1:conv.2", "key", taken) == "layer1_conv.2-key-2"
    assert file_stem("../..", "key", taken) == "key"


@pytest.mark.slow
def test_bench_writes_its_result(command: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "new" / "result.json"
    done = command("bench", SMALL, "--against", "none", "--algorithms", "direct,im2win", "--rounds", 2, "--json", path)
    assert done.status == 0 and done.out.count("1/1") == 2, done.out
    for name in ("direct", "im2win"):
        result = Result.load(path.with_name(f"result-{name}.json"))
        (row,) = result.layers
        assert row.failed is None and row.algorithm.startswith(f"{name}/") and row.gflops and row.error is not None and row.error < 1e-5
        assert json.loads(path.with_name(f"result-{name}.json").read_text())["suite"] == SMALL
    path.with_name("result-direct.json").rename(path)
    done = command("bench", SMALL, "--against", "none", "--algorithms", "direct", "--json", path, "--resume", "--accuracy", "exact")
    assert done.status == 2 and f"suite (='{SMALL}'), this run has '{SMALL}-exact'; leave out --resume" in done.err, done.err


@pytest.mark.parametrize("key", ["n2-c8x9x7-k4x3x2-s2x1-p1.0.2.1-d1x2-g2", SMALL, "n1-c3x8x8-k6x1x1"])
def test_the_demos_numpy_baseline_is_right(key: str) -> None:
    conv = Conv2d.parse(key)
    generator = np.random.default_rng(1)
    x = generator.integers(-4, 5, conv.input_shape).astype("float32")
    w = generator.integers(-4, 5, conv.filter_shape).astype("float32")
    assert np.array_equal(im2col_product(conv, x, w), reference(conv, x, w))


@pytest.mark.slow
def test_demo(command: Callable[..., Any]) -> None:
    done = command("demo", "--layers", "conv12", "--trials", 2)
    assert done.status == 0 and "failed" not in done.out, done.out
    table = next(line for line in done.out.splitlines() if line.startswith("layer") and "numpy ms" in line)
    assert "GFLOPS" in table and "extra memory" in table and re.search(r"conv12 .* GFLOPS  \w+ / \w+", done.out)


# --- how numbers are printed ---------------------------------------------------------------------------------------


def test_numbers() -> None:
    assert [tables.bytes_text(n) for n in (0, 1023, 1024, 36 << 10, 3 << 29, 5 << 40)] == [
        "0 B", "1023 B", "1.0 KiB", "36.0 KiB", "1.5 GiB", "5120.0 GiB",
    ]  # fmt: skip
    assert [tables.milliseconds(s) for s in (None, 1e-4, 2.0)] == ["-", "0.100", "2000"]
    assert [tables.duration(s) for s in (None, 45.2, 185)] == ["-", "45 s", "3:05"]


@pytest.mark.parametrize(
    "words, message",
    [
        (["--target", "gpu"], "`target` (='gpu') must be one of cpu, cuda."),
        (["--target", "cuda", "--threads", "2"], "`--threads` is for target cpu"),
        (["--target", "cuda", "--memory"], "`--memory` is for target cpu"),
        (["--resume"], "`--resume` needs `--json FILE`"),
    ],
)
def test_bench_refuses_what_it_would_ignore(command: Callable[..., Any], words: list[str], message: str) -> None:
    done = command("bench", "n1-c8x8x8-k8x3x3", *words)
    assert done.status == 2 and message in done.err


def test_tensors_of_bfloat16_keep_their_type(tmp_path: Path) -> None:
    """numpy stores them as pairs of bytes."""
    values = np.array([1.5, -2.0], "bfloat16")
    np.save(tmp_path / "x.npy", values)
    found = tensors.named([f"x={tmp_path / 'x.npy'}"])["x"]
    assert found.dtype == values.dtype and (found == values).all()
