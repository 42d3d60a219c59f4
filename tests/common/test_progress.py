"""Progress: a bar in a terminal, which leaves stdout alone; log lines elsewhere; nothing where it is to be quiet."""

from __future__ import annotations

import errno
import io
import logging
import os
import pty
import subprocess
import sys
import threading
import time

import pytest

from im2win.common import progress
from im2win.common.progress import Reporter, reporting


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(progress, "EVERY_S", 0.05)
    caplog.set_level(logging.INFO, "im2win")
    return caplog


def _wait(lines: pytest.LogCaptureFixture, count: int) -> None:
    deadline = time.monotonic() + 10
    while len(lines.messages) < count and time.monotonic() < deadline:
        time.sleep(0.005)


def test_elsewhere_lines_tell_how_far_it_is_without_being_asked(lines: pytest.LogCaptureFixture) -> None:
    with reporting("compiling") as reporter:
        _wait(lines, 1)
        assert lines.messages[0] == "compiling: 0 s"
        reporter.step(3, "conv3", total=63)
        _wait(lines, 3)
        assert lines.messages[2] == "compiling: 3 of 63 in 0 s, conv3"
        reporter.step(note="conv4")
        assert reporter.text() == "compiling: 3 of 63 in 0 s, conv4"
        reporter.step(63)
    assert lines.messages[-1] == "compiling: 63 of 63 in 0 s" and {record.levelname for record in lines.records} == {"INFO"}
    assert "im2win-progress" not in {thread.name for thread in threading.enumerate()}


def test_what_ends_at_once_says_one_line_and_what_fails_none(lines: pytest.LogCaptureFixture) -> None:
    with reporting("building", 2) as reporter:
        reporter.step(2)
    assert lines.messages == ["building: 2 of 2 in 0 s"]
    with pytest.raises(ValueError, match="bad"), reporting("tuning"):
        raise ValueError("bad")
    assert len(lines.messages) == 1


def test_quiet_and_the_plain_reporter_show_nothing(
    lines: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    with reporting("building", quiet=True) as reporter:
        reporter.step(1, total=2)
        time.sleep(0.1)
    Reporter("tuning").step(1, "conv1")
    assert not lines.messages and capsys.readouterr() == ("", "")
    reporter.line("a result")
    assert capsys.readouterr() == ("a result\n", "")


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_one_bar_for_nested_work(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    terminal = _Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    with reporting("optimising", 4) as outer:
        assert "optimising" in terminal.getvalue(), "it is shown at once"
        with reporting("[tuning]") as inner:
            inner.step(1, "conv1 [a]", total=2)
            outer.step(1)
            shown = progress._Bar._shown
            assert shown is not None and [task.description for task in shown.tasks] == ["optimising", "[tuning]"]
            shown.refresh()
            assert "[tuning]" in terminal.getvalue() and "1 of 2" in terminal.getvalue() and "conv1 [a]" in terminal.getvalue()
            inner.line("a result")
        assert progress._Bar._shown is shown
    assert progress._Bar._shown is None
    assert capsys.readouterr().out == "a result\n", "stdout is no terminal: what is printed stays there"


def test_a_terminal_that_draws_no_bar_gets_lines(lines: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", _Terminal())
    monkeypatch.setenv("TERM", "dumb")
    with reporting("tuning", 2):
        pass
    assert lines.messages == ["tuning: 0 of 2 in 0 s"]


def test_simultaneous_work_shares_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", _Terminal())
    monkeypatch.setenv("TERM", "xterm")
    both = threading.Barrier(2, timeout=10)

    def work() -> None:
        with reporting("working", 10) as reporter:
            both.wait()
            for done in range(10):
                reporter.step(done)
            both.wait()

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert progress._Bar._shown is None and progress._Bar._rows == 0


def test_rich_is_loaded_for_a_bar_alone() -> None:
    script = "import sys; from im2win.common.progress import reporting\nwith reporting('x'): pass\nprint('rich' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout == "False\n"


@pytest.mark.skipif(sys.platform == "win32", reason="there are no pseudo-terminals")
def test_in_a_real_terminal_printed_lines_stand_above_the_bar() -> None:
    script = """
import time
from im2win.common.progress import reporting
with reporting("tuning", 2) as reporter:
    reporter.step(1, "conv1")
    time.sleep(0.3)  # the bar is drawn ten times a second
    print("printed")
    reporter.line("a line [b]")
"""
    parent, child = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    process = subprocess.Popen([sys.executable, "-c", script], stdout=child, stderr=child, env=environment)
    os.close(child)
    output = b""
    while True:
        try:
            part = os.read(parent, 4096)
        except OSError as error:  # Linux reports the end so
            assert error.errno == errno.EIO
            break
        if not part:
            break
        output += part
    os.close(parent)
    assert process.wait() == 0
    text = output.decode()
    assert "1 of 2" in text and "conv1" in text
    for line in ("printed", "a line [b]"):
        assert any(row.rstrip().endswith(line) and "tuning" not in row.split("\x1b[2K")[-1] for row in text.splitlines()), text
