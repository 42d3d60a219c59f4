"""How much faster a session gets with more workers of a fleet on one host, such as its GPUs.

    python benchmarks/fleet.py --devices cuda:0,cuda:1 --json fleet.json n128-c128x28x28-k128x3x3-float16-NHWC
    python benchmarks/fleet.py --devices cpu,cpu,cpu,cpu --wait 1 --json benchmarks/studies/DEVICE/fleet.json n1-c16x14x14-k16x3x3-p1

Starts a tracker of TVM and a worker for every device, and tunes the layer with 1, 2, 4, ... and all of them, with the same seed, in a new
folder of records each time. The time of a session counts from the first build to the last trial; ranking and loading do not depend on the
workers. "Busy" is the share of that time in which a worker had a job: where it falls with more workers, building or proposing limits.

With `--wait` no kernel is measured: each candidate takes its worker so many seconds, whatever it is. That shows what the queue, proposals
and baselines lose where measuring is the limit, and nothing of devices: CPUs of one host cannot measure several kernels undisturbed.
Needs the extra `rpc`. Nothing else should run meanwhile. `im2win report docs/command_line.md` makes a table of it in benchmarks/studies.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import im2win
from im2win.bench.cpu import commit, versions
from im2win.bench.source import digests
from im2win.common.files import replace_json
from im2win.device.cpu import Machine
from im2win.records.log import Log
from im2win.records.record import utc_now
from im2win.reports.fleet import gain
from im2win.spec.conv2d import Conv2d
from im2win.studies.entries import FLEET, SCHEMA
from im2win.tuner.pool import pools
from im2win.tuner.session import Progress

KEY = "benchmark"


@contextlib.contextmanager
def tracker() -> Iterator[int]:
    """A tracker on loopback. Yields its port."""
    from tvm.rpc.tracker import Tracker

    started = Tracker(host="127.0.0.1", port=19190, port_end=19990, silent=True)
    try:
        yield started.port
    finally:
        started.terminate()


@contextlib.contextmanager
def workers(port: int, devices: list[str], wait_s: float | None) -> Iterator[None]:
    """A worker for each device, all of which have registered. `wait_s`: seconds that they wait in place of measuring."""
    command = [sys.executable, "-m", "im2win", "worker", "--tracker", f"127.0.0.1:{port}", "--key", KEY, "--device"]
    environment = dict(os.environ)
    if wait_s is not None:
        command = [sys.executable, __file__, "--serve", str(port)]
        environment |= {"WAIT_S": str(wait_s), "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    started = [subprocess.Popen([*command, device], stdout=subprocess.DEVNULL, env=environment) for device in devices]
    try:
        from im2win.tuner.fleet.tracker import Tracker

        deadline = time.monotonic() + 120
        with contextlib.closing(Tracker(("127.0.0.1", port))) as asked:
            while len(asked.models(KEY)) < len(devices):
                if time.monotonic() > deadline or any(one.poll() is not None for one in started):
                    raise SystemExit("a worker did not start; its message is above.")
                time.sleep(0.2)
        yield
    finally:
        for one in started:
            one.terminate()
        for one in started:
            one.wait()


def serve(port: int) -> None:
    """A worker that waits in place of measuring (`waiting_runner`), until it is ended."""
    from im2win.device.cpu import Machine
    from im2win.tuner.fleet.server import Server

    server = Server(Machine.host(), KEY, ("127.0.0.1", port), runner="waiting_runner", environment={"WAIT_S": os.environ["WAIT_S"]})
    try:
        server.serve()
    finally:
        server.close()


def session(conv: Conv2d, target: str, trials: int, port: int, devices: list[str], wait_s: float | None) -> dict[str, Any]:
    """One session with a worker for each device: its seconds, the share of them in which workers were busy, trials and best time."""
    from im2win.tuner.fleet.fleet import Fleet

    times: list[float] = []
    busy: list[float] = []

    with tempfile.TemporaryDirectory() as folder, workers(port, devices, wait_s), Fleet(f"127.0.0.1:{port}", KEY) as fleet:
        while len(fleet.workers) < len(devices):
            time.sleep(0.1)

        def seen(state: Progress) -> None:
            if state.phase == "measuring" or (not times and state.phase.startswith("building")):
                times.append(time.perf_counter())
                busy.append(sum(fleet.busy_s.values()))

        with pools(fleet.device, 1, fleet) as [pool]:
            record = im2win.tune(conv, target, trials=trials, logs=folder, patience=None, pool=pool, progress=seen)
        records = Log(folder).read(conv, record.device)
    seconds, tried = times[-1] - times[0], len({one.trial for one in records})
    outcomes = Counter(one.outcome for one in records)
    facts = {"best_s": record.seconds, "device": record.device, "outcomes": dict(outcomes)}
    share = (busy[-1] - busy[0]) / (seconds * len(devices))
    return {"workers": len(devices), "seconds": seconds, "busy": share, "trials": tried, **facts}


def main() -> None:
    if sys.argv[1:2] == ["--serve"]:
        serve(int(sys.argv[2]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("layer", type=Conv2d.parse, help="key of the layer")
    parser.add_argument("--devices", default="cpu", help="of the workers, such as cuda:0,cuda:1")
    parser.add_argument("--trials", type=int, default=64)
    parser.add_argument("--wait", type=float, metavar="SECONDS", help="what measuring a candidate takes, on workers that measure nothing")
    parser.add_argument("--json", type=Path, help="file for the results")
    arguments = parser.parse_args()
    devices = arguments.devices.split(",")
    target = devices[0].partition(":")[0]
    if arguments.wait is not None and target != "cpu":
        parser.error(f"`--wait` needs workers on a CPU, not `--devices` (={arguments.devices}).")
    rows = []
    with tracker() as port:
        for count in (*(one for one in (1, 2, 4, 8, 16) if one < len(devices)), len(devices)):
            rows.append(session(arguments.layer, target, arguments.trials, port, devices[:count], arguments.wait))
            now, times = rows[-1], gain(rows[-1], rows[0])
            said = f"{now['seconds']:.1f} s for {now['trials']} trials, busy {100 * now['busy']:.0f} %, {times:.2f} times as fast as one"
            print(f"{count} workers: {said}", flush=True)
    if arguments.json is not None:
        host = Machine.host()
        facts = {
            "study": FLEET, "schema": SCHEMA, "device": host.name, "brand": host.brand, "cpus": len(os.sched_getaffinity(0)),
            "versions": versions(), "commit": commit(), "date": utc_now(), "digests": digests(target),
        }  # fmt: skip
        made = {"conv": str(arguments.layer), "workers_on": rows[0]["device"], "wait_s": arguments.wait, "sessions": rows}
        replace_json(arguments.json, {**facts, **made})


if __name__ == "__main__":
    main()
