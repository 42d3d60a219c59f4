"""What a user waits for: networks optimised in PyTorch, compiled, and rewritten for ONNX Runtime, the first time and again.

    python benchmarks/waiting.py --json benchmarks/studies/DEVICE/waiting.json [NETWORK ...]

Every sample is a new process that calls `im2win.torch.optimize`, `im2win.compile_model` or `im2win.for_onnxruntime` once, with their
defaults, for one image. Its time is that of the call: what is built, timed against the library that it replaces (`guard`), packed and
written. The first process finds an empty cache, so that it also reads the package's records for the first time; the others find what that
one left. The time of the imports before the call is that of the last process. The network is one of the zoo's, with random weights.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from im2win.bench.cpu import commit, versions
from im2win.bench.source import digests
from im2win.common.files import replace_json
from im2win.device.cpu import Machine
from im2win.records.record import utc_now
from im2win.studies.entries import SCHEMA, WAITING, WAITING_FRONTS

NETWORKS = ("resnet50", "mobilenetv3_large_100", "efficientnet_b0")
CHILD = """
import json, sys, time
front, network, model, folder = sys.argv[1:]
begun = time.perf_counter()
if front == "optimize":
    import torch
    import im2win.torch
    from im2win.bench.zoo_networks import built, images
    imported = time.perf_counter()
    module, x = built(network), images(network, 1)
    begun_call = time.perf_counter()
    im2win.torch.optimize(module, x)
else:
    import im2win
    run = {"compile": im2win.compile_model, "onnxruntime": im2win.for_onnxruntime}[front]
    imported = begun_call = time.perf_counter()
    run(model, f"{folder}/made." + {"compile": "so", "onnxruntime": "onnx"}[front])
print(json.dumps([imported - begun, time.perf_counter() - begun_call]))
"""
EXPORT = """
import sys, torch
from im2win.bench.zoo_networks import built, images
torch.onnx.export(built(sys.argv[1]), (images(sys.argv[1], 1),), sys.argv[2], dynamo=True, external_data=False, verbose=False)
"""


def _python(code: str, *words: str, cache: Path) -> str:
    """What a new process prints, with a cache of its own and no records but those of the package.

    Raises:
        RuntimeError: it failed; the message holds its last words.
    """
    environment = {**os.environ, "IM2WIN_CACHE": str(cache), "IM2WIN_LOGS": str(cache / "logs")}
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise RuntimeError(done.stderr.strip()[-500:])
    return done.stdout


def measure(network: str, fronts: Sequence[str], folder: Path, again: int) -> dict[str, dict[str, float]]:
    """By front, seconds of the first call (`first`), the median of those with its cache (`again`), and of the imports (`import`)."""
    model, found = folder / f"{network}.onnx", {}
    _python(EXPORT, network, str(model), cache=folder / "cache")
    for front in fronts:
        cache = folder / f"{network}-{front}"
        samples = [json.loads(_python(CHILD, front, network, str(model), str(folder), cache=cache)) for _ in range(1 + again)]
        calls = [call for _, call in samples]
        found[front] = {"first": calls[0], "again": statistics.median(calls[1:]), "import": samples[-1][0]}
        print(f"{network}, {front}: first {calls[0]:.1f} s, again {found[front]['again']:.2f} s", flush=True)
    return found


def main() -> None:
    """Reads the command line, measures, writes the study."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("networks", nargs="*", default=NETWORKS, metavar="NETWORK", help=f"of the zoo; default: {' '.join(NETWORKS)}")
    parser.add_argument("--calls", default=",".join(WAITING_FRONTS), help="which of them; default: %(default)s")
    parser.add_argument("--again", type=int, default=3, help="processes that find the first one's cache")
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    if options.again < 1:
        parser.error(f"`--again` (={options.again}) must be at least 1.")
    fronts = options.calls.split(",")
    if unknown := set(fronts) - set(WAITING_FRONTS):
        parser.error(f"`--calls` (={','.join(sorted(unknown))}) must be among {', '.join(WAITING_FRONTS)}.")
    machine = Machine.host()
    facts: dict[str, Any] = {
        "study": WAITING, "schema": SCHEMA, "device": machine.name, "brand": machine.brand, "threads": machine.threads,
        "versions": versions(), "commit": commit(), "date": utc_now(), "unit": "s", "processes": options.again,
        "digests": digests("cpu", models=True),
    }  # fmt: skip
    rows = {}
    for network in options.networks:
        with tempfile.TemporaryDirectory(prefix="im2win-waiting-") as folder:
            try:
                rows[network] = measure(network, fronts, Path(folder), options.again)
            except RuntimeError as error:
                parser.error(f"{network}: {error}")
        replace_json(options.json, {**facts, "networks": rows})


if __name__ == "__main__":
    main()
