"""The command line in a shell: closed pipes, completion, `python -m im2win`, and options that name what cannot be written."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from im2win.cli.commands.outputs import OutputError, file, folder
from im2win.spec.suites import suite_names

MODULE = [sys.executable, "-m", "im2win"]
SMALL = "n1-c8x10x10-k16x3x3-p1"

# --- pipes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", ["--help", "layers resnet50", "--version", "--show-completion"])
def test_a_closed_pipe_is_no_error(words: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)  # as `head` does when it has its lines, but before the first byte is written
    environment = {**os.environ, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    given = [*words.split(), *(["bash"] if words == "--show-completion" else [])]
    with open(writing, "wb") as closed:
        done = subprocess.run([*MODULE, *given], stdout=closed, stderr=subprocess.PIPE, text=True, timeout=60, env=environment)
    assert (done.returncode, done.stderr) == (0, "")


def test_output_through_head() -> None:
    line = f"set -o pipefail; {sys.executable} -m im2win --help | head -n 2"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stderr == "" and "im2win" in done.stdout


def test_a_wrong_word_still_fails_with_a_closed_pipe() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "wb") as closed:
        done = subprocess.run([*MODULE, "nosuch"], stdout=closed, stderr=subprocess.PIPE, text=True, timeout=60)
        unread = subprocess.run([*MODULE, "nosuch"], stdout=subprocess.PIPE, stderr=closed, text=True, timeout=60)
    assert done.returncode == 2 and "No such command 'nosuch'" in done.stderr
    assert unread.returncode == 2 and unread.stdout == ""


# --- completion ----------------------------------------------------------------------------------------------------


def completed(words: str) -> list[str]:
    """What bash is offered for the last word; a space at the end begins a new one."""
    environment = {
        **os.environ, "_IM2WIN_COMPLETE": "complete_bash", "COMP_WORDS": f"im2win {words}", "COMP_CWORD": str(len(words.split(" "))),
    }  # fmt: skip
    done = subprocess.run(MODULE, capture_output=True, text=True, timeout=60, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.split()


def test_verbs_and_suites_are_completed() -> None:
    assert {"tune", "build", "bench", "compile", "onnxruntime", "logs"} <= set(completed(""))
    assert completed("la") == ["layers"]
    assert completed("logs me") == ["merge"]
    assert sorted(completed("tune ")) == sorted(suite_names())
    assert completed("bench papers") == [name for name in suite_names() if name.startswith("papers")]


def test_values_of_options_are_completed() -> None:
    assert completed("tune resnet50 --target c") == ["cpu", "cuda"]
    assert completed("tune resnet50 --accuracy wi") == ["winograd"]
    assert completed("tune resnet50 --algorithm au") == ["auto"]
    assert completed("tune model.o") == []  # the shell completes names of files


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_shown_and_installed(shell: str, tmp_path: Path) -> None:
    # Outside a terminal no shell can be found out; typer then takes its name.
    environment = {**os.environ, "HOME": str(tmp_path), "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    shown, installed = (
        subprocess.run([*MODULE, option, shell], capture_output=True, text=True, timeout=60, env=environment, check=True).stdout
        for option in ("--show-completion", "--install-completion")
    )
    assert f"_IM2WIN_COMPLETE=complete_{shell}" in shown
    assert f"{shell} completion installed in {tmp_path}" in " ".join(installed.split())
    texts = [path.read_text() for path in tmp_path.rglob("*") if path.is_file()]
    assert any(f"_IM2WIN_COMPLETE=complete_{shell}" in text for text in texts)


# --- what is written -----------------------------------------------------------------------------------------------

WRITERS = [
    ("tune {small} --logs {bad}", "--logs", "a folder"),
    ("build {small} --out {bad}", "--out", "a folder"),
    ("bench {small} --json {bad}/a.json", "--json", "a file"),
    ("bench {small} --tvm-cache {bad}", "--tvm-cache", "a folder"),
    ("ablation --json {bad}/a.json", "--json", "a file"),
    ("ablation --plot {bad}/a.png", "--plot", "a file"),
    ("layers {small} --memory --target cuda --json {bad}/memory-a.json", "--json", "a file"),
    ("compile m.onnx --out {bad}/m.so", "--out", "a file"),
    ("run m.so --out {bad}/y.npz", "--out", "a file"),
    ("onnxruntime m.onnx --out {bad}/o.onnx", "--out", "a file"),
    ("onnxruntime m.onnx --out o.onnx --library {bad}/o.so", "--library", "a file"),
    ("reconstruct a.cu --out {bad}/b.cu", "--out", "a file"),
    ("logs merge . --into {bad}", "--into", "a folder"),
]


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc, where nobody can make a file")
@pytest.mark.parametrize(("words", "option", "kind"), WRITERS, ids=[f"{words.split()[0]}{option}" for words, option, _ in WRITERS])
def test_what_cannot_be_written_is_named(words: str, option: str, kind: str, command: Callable[..., Any]) -> None:
    done = command(*words.format(small=SMALL, bad="/proc/kk").split())
    assert done.status == 2 and done.err.count("\n") == 1
    assert done.err.startswith(f"im2win: `{option}` (='/proc/kk") and f"must be {kind} that can be written: No such file" in done.err


class Option:
    """What a callback is told of its option."""

    opts = ("-o", "--out")


def test_a_check_leaves_nothing_behind(tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.write_text("old")
    for path in (there, tmp_path / "a/b/new", Path("/dev/null"), None):
        assert file(Option(), path) == path  # type: ignore[arg-type]
    for path in (tmp_path, tmp_path / "c/d", None):
        assert folder(Option(), path) == path  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == [there] and there.read_text() == "old"


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match=r"`--out` \(='.*/file'\) must be a folder; it exists and is a file\.$"):
        folder(Option(), tmp_path / "file")  # type: ignore[arg-type]
    with pytest.raises(OutputError, match=r"`--out` \(=.*\) must be a file; it is a folder\.$"):
        file(Option(), tmp_path)  # type: ignore[arg-type]
    with pytest.raises(OutputError, match="must be a file that can be written: Not a directory"):
        file(Option(), tmp_path / "file" / "deeper")  # type: ignore[arg-type]


def test_lines_of_progress_and_warnings_are_printed_and_no_other(capsys: pytest.CaptureFixture[str]) -> None:
    from im2win.cli.log_lines import log_lines

    with log_lines():
        logging.getLogger("im2win").info("compiling: 7 s")
        logging.getLogger("im2win.reconstruct").info("a barrier")
        logging.getLogger("im2win.torch").warning("slower")
    assert capsys.readouterr().err == "im2win: compiling: 7 s\nim2win: slower\n"
