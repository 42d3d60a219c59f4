"""How much faster a session gets with more workers of a fleet on one host, such as its GPUs.

    python benchmarks/fleet.py --devices cuda:0,cuda:1 --json fleet.json n128-c128x28x28-k128x3x3-float16-NHWC
    python benchmarks/fleet.py --devices cpu n1-c64x28x28-k64x3x3-p1

Starts a tracker of TVM and a worker for every device, and tunes the layer with 1, 2, ... of them, with the same seed, in a new folder of
records each time. The time of a session counts from the first build to the last trial; ranking and loading do not depend on the workers.
Needs the extra `rpc`. Nothing else should run meanwhile.
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
from im2win.common.files import replace_json
from im2win.records.log import Log
from im2win.records.record import utc_now
from im2win.spec.conv2d import Conv2d
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
def workers(port: int, devices: list[str]) -> Iterator[None]:
    """A worker for each device, all of which have registered."""
    command = [sys.executable, "-m", "im2win", "worker", "--tracker", f"127.0.0.1:{port}", "--key", KEY, "--device"]
    started = [subprocess.Popen([*command, device], stdout=subprocess.DEVNULL) for device in devices]
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


def session(conv: Conv2d, target: str, trials: int, port: int, devices: list[str]) -> dict[str, Any]:
    """One session with a worker for each device: its seconds, trials and best time."""
    times: list[float] = []

    def seen(state: Progress) -> None:
        if state.phase == "measuring" or (not times and state.phase.startswith("building")):
            times.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as folder, workers(port, devices):
        record = im2win.tune(conv, target, trials=trials, logs=folder, patience=None, tracker=f"127.0.0.1:{port}", key=KEY, progress=seen)
        records = Log(folder).read(conv, record.device)
    seconds, tried = times[-1] - times[0], len({one.trial for one in records})
    outcomes = Counter(one.outcome for one in records)
    facts = {"best_s": record.seconds, "device": record.device, "outcomes": dict(outcomes)}
    return {"workers": len(devices), "seconds": seconds, "trials": tried, **facts}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("layer", type=Conv2d.parse, help="key of the layer")
    parser.add_argument("--devices", default="cpu", help="of the workers, such as cuda:0,cuda:1")
    parser.add_argument("--trials", type=int, default=64)
    parser.add_argument("--json", type=Path, help="file for the results")
    arguments = parser.parse_args()
    devices = arguments.devices.split(",")
    target = devices[0].partition(":")[0]
    rows = []
    with tracker() as port:
        for count in range(1, len(devices) + 1):
            rows.append(session(arguments.layer, target, arguments.trials, port, devices[:count]))
            seconds, trials = rows[-1]["seconds"], rows[-1]["trials"]
            gain = rows[-1]["trials"] / rows[0]["trials"] * rows[0]["seconds"] / seconds
            print(f"{count} workers: {seconds:.1f} s for {trials} trials, {gain:.2f} times as fast as one", flush=True)
    if arguments.json is not None:
        made = {"date": utc_now(), "conv": str(arguments.layer), "cpus": len(os.sched_getaffinity(0)), "sessions": rows}
        replace_json(arguments.json, made)


if __name__ == "__main__":
    main()
