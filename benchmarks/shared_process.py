"""What a convolution takes right after another library's call in the same process: ours, PyTorch's and ONNX Runtime's.

    python benchmarks/shared_process.py --json benchmarks/studies/DEVICE/shared-process.json [LAYER...]

Libraries keep their threads spinning for a while after a call, and these take the CPUs from the next library's. Before each timed call
of a subject another call is made, which is not timed: of the subject itself (its time alone), of the same library with tensors of its
own (what caches cost), or of another library; or nothing is done for a while (what waking threads costs). Rounds are interleaved. All
subjects have as many threads as im2win takes by default. Nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import im2win
from im2win.bench.cpu import versions
from im2win.bench.peers.cpu import OnnxRuntime, Torch
from im2win.bench.peers.subject import Tensors, Trial
from im2win.bench.source import digests
from im2win.common.files import replace_json
from im2win.device.cpu import Machine
from im2win.numerics.reference import error
from im2win.numerics.tolerance import tolerance
from im2win.records.record import utc_now
from im2win.reports.deploy import ALONE, ANOTHER, PAUSE
from im2win.spec.conv2d import Conv2d, ConvError
from im2win.studies.entries import SCHEMA, SHARED

LAYERS = ["n1-c128x14x14-k128x3x3-p1", "n1-c64x56x56-k64x3x3-p1", "n1-c64x112x112-k128x3x3-p1"]  # small to large
MATRIX = 512  # rows and columns of the matrices that numpy multiplies
PAUSE_S = 5e-3  # longer than im2win's threads spin
SETTLE_S = 0.15  # seconds that a pair takes turns before it is timed, until the threads of the last pair sleep: some spin for 100 ms

Call = Callable[[], object]


def im2win_trial(conv: Conv2d, tensors: Tensors) -> Trial:
    """The layer as a user binds it."""
    layer = im2win.build(conv).bind(tensors.filter)
    return Trial(lambda: layer(tensors.data), lambda: np.asarray(layer(tensors.data)))


def subjects(conv: Conv2d, threads: int, seed: int) -> dict[str, Call]:
    """A call of the layer in each library, on tensors of their own, checked once against the float64 reference."""
    tensors = Tensors.random(conv, seed)
    trials = {"im2win": im2win_trial(conv, tensors)}
    trials |= {peer.name: peer.prepare(conv, tensors, threads) for peer in (Torch(), OnnxRuntime())}
    expected = tensors.expected(conv)
    for name, trial in trials.items():
        trial.call()
        if not (found := error(trial.read(), expected)) <= tolerance(conv):
            raise SystemExit(f"{conv}: the output of {name} is wrong, error {found:.2e}.")
    return {name: trial.call for name, trial in trials.items()}


def times(timed: dict[str, Call], before: dict[tuple[str, str], Call], rounds: int) -> dict[tuple[str, str], float]:
    """Median milliseconds of each subject right after each call of `before`, rounds interleaved."""
    samples: dict[tuple[str, str], list[float]] = {pair: [] for pair in before}
    for _ in range(rounds):
        for (name, what), other in before.items():
            end = time.perf_counter() + SETTLE_S
            took = 0.0
            while time.perf_counter() < end or not took:
                other()
                start = time.perf_counter()
                timed[name]()
                took = time.perf_counter() - start
            samples[name, what].append(1e3 * took)
    return {pair: statistics.median(values) for pair, values in samples.items()}


def measure(conv: Conv2d, threads: int, rounds: int) -> dict[str, dict[str, float]]:
    """By subject and what ran before it, milliseconds of a call."""
    timed, others = subjects(conv, threads, 0), subjects(conv, threads, 1)
    matrix = np.random.default_rng(0).standard_normal((MATRIX, MATRIX)).astype("float32")
    before: dict[tuple[str, str], Call] = {}
    for name, call in timed.items():
        foreign = {other: run for other, run in timed.items() if other != name}
        foreign["numpy"] = lambda: matrix @ matrix
        foreign[PAUSE] = lambda: time.sleep(PAUSE_S)
        before |= {(name, what): run for what, run in {ALONE: call, ANOTHER: others[name], **foreign}.items()}
    found = times(timed, before, rounds)
    return {name: {what: found[other, what] for other, what in found if other == name} for name in timed}


def main() -> None:
    """Reads the command line, measures, writes the study."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("layers", nargs="*", default=LAYERS, metavar="LAYER", help=f"keys; default: {' '.join(LAYERS)}")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    try:
        convs = [Conv2d.parse(key) for key in options.layers]
    except ConvError as refused:
        parser.error(str(refused))
    machine = Machine.host()
    facts = {"device": machine.name, "threads": machine.threads, "versions": versions(), "date": utc_now(), "unit": "ms"}
    rows: dict[str, Any] = {}
    for conv in convs:
        rows[str(conv)] = measure(conv, machine.threads, options.rounds)
        for name, row in rows[str(conv)].items():
            print(f"{conv} {name:12} " + ", ".join(f"{what} {ms:.3f}" for what, ms in row.items()), flush=True)
        replace_json(options.json, {"study": SHARED, "schema": SCHEMA, **facts, "digests": digests("cpu"), "layers": rows})


if __name__ == "__main__":
    main()
