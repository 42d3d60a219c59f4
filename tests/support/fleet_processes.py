"""Trackers and workers of fleets for tests, each a process that can be killed.

One process imports TVM once and forks all of them: its `main` reads a line of JSON for each on stdin and prints the process' number and the
port that it listens on.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paths import ROOT, SUPPORT

from im2win.common.torch_import import BEGIN


class Processes:
    """What was started, to be ended by `close`."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.pids, self.pids_of, self._count = folder, list[int](), dict[str, list[int]](), 0
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(SUPPORT)])}
        environment.pop("IM2WIN_SECRET", None)
        self._zygote = subprocess.Popen(
            [sys.executable, "-c", f"{BEGIN}import fleet_processes; fleet_processes.main()"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip

    def _start(self, **what: Any) -> dict[str, Any]:
        assert self._zygote.stdin is not None and self._zygote.stdout is not None
        self._zygote.stdin.write(json.dumps(what) + "\n")
        self._zygote.stdin.flush()
        found: dict[str, Any] = json.loads(self._zygote.stdout.readline())
        self.pids.append(found["pid"])
        return found

    def tracker(self) -> int:
        """Starts a tracker; returns its port."""
        return int(self._start(what="tracker")["port"])

    def worker(self, port: int, key: str, **how: Any) -> tuple[int, Path]:
        """Starts a worker. Returns its number and the file of its log lines.

        Args:
            how: device (fields of a Machine; this one by default), runner, environment, secret, limits, pauses (constants of the server).
        """
        self._count += 1
        log = self.folder / f"worker-{self._count}.log"
        pid = int(self._start(what="worker", port=port, key=key, log=str(log), **how)["pid"])
        self.pids_of.setdefault(key, []).append(pid)
        return pid, log

    def kill(self, pid: int, number: int = signal.SIGKILL) -> None:
        """Sends a signal to a worker, and to nothing that it started."""
        os.kill(pid, number)

    def close(self) -> None:
        """Ends everything."""
        assert self._zygote.stdin is not None and self._zygote.stdout is not None
        self._zygote.stdin.close()
        self._zygote.wait(30)
        self._zygote.stdout.close()


@contextlib.contextmanager
def processes(folder: Path) -> Iterator[Processes]:
    started = Processes(folder)
    try:
        yield started
    finally:
        started.close()


def wait_for(said: str, log: Path, seconds: float = 20.0) -> None:
    """Waits until a log holds a text."""
    deadline = time.monotonic() + seconds
    while not (log.exists() and said in log.read_text()):
        assert time.monotonic() < deadline, f"{said!r} is not in {log.read_text() if log.exists() else 'no log'!r}"
        time.sleep(0.05)


# --- the process that forks ------------------------------------------------------------------------------------------


def main() -> None:

    import im2win.tuner.fleet.server  # noqa: F401 - what workers need

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    pids = []
    for line in sys.stdin:
        what = json.loads(line)
        answer_read, answer_write = os.pipe()
        pids.append(os.fork())
        if not pids[-1]:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
            os.close(0)
            os.dup2(2, 1)
            _run(what, answer_write)
        os.close(answer_write)
        with os.fdopen(answer_read) as answer:
            print(answer.read(), flush=True)
    for number in (signal.SIGCONT, signal.SIGTERM, signal.SIGKILL):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        time.sleep(0.3 if number == signal.SIGTERM else 0)  # for workers to remove what they made


def _run(what: dict[str, Any], answer: int) -> None:
    def say(**more: Any) -> None:
        os.write(answer, json.dumps({"pid": os.getpid(), **more}).encode())
        os.close(answer)

    if what["what"] == "tracker":
        from tvm.rpc.tracker import PopenTrackerServerState

        state = PopenTrackerServerState("127.0.0.1", 20190 + os.getpid() % 20000, 65000, silent=True)
        say(port=state.port)
        while True:
            signal.pause()
    _serve(what, say)


def _serve(what: dict[str, Any], say: Any) -> None:
    import logging

    from im2win.device.cpu import Machine
    from im2win.tuner.fleet import server
    from im2win.tuner.fleet.messages import Limits

    logging.basicConfig(filename=what["log"], level="INFO", format="%(message)s")
    for name, value in {"PING_S": 0.2, "AWAY_S": 0.3, "BUSY_S": 0.3, "UNUSED_S": 1.0, **what.get("pauses", {})}.items():
        setattr(server, name, value)
    device = Machine(**what["device"]) if "device" in what else Machine.host()
    served = server.Server(
        device, what["key"], ("127.0.0.1", what["port"]), secret=what.get("secret", "").encode(), limits=Limits(**what.get("limits", {})),
        runner=what.get("runner"), environment=what.get("environment", {}),
    )  # fmt: skip
    say(port=served.port)
    try:
        served.serve()
    finally:
        served.close()
