"""How far the untuned choice is from the best of a tuning session, layer by layer.

    python benchmarks/untuned.py benchmarks/layers/drawn-1.jsonl --json benchmarks/studies/DEVICE/untuned-drawn-1.json

Every layer is tuned in an empty log. Sessions end by timing the default tile and the best candidates in interleaved rounds; these times are
compared. The file is written after every layer; layers that it already holds with today's source, on the same device, are skipped.
"""

from __future__ import annotations

import argparse
import logging
import math
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import im2win
from im2win.bench.cpu import commit, versions
from im2win.bench.source import SOURCE, digests
from im2win.common.files import replace_json
from im2win.device.gpu import NoGpuError
from im2win.records.log import Log
from im2win.records.record import Record, utc_now
from im2win.registry.backends import Device, backend_for, device_for
from im2win.spec.captured_layers import LayerFileError, read_layers
from im2win.studies.confirmation import held
from im2win.studies.entries import SCHEMA, UNTUNED
from im2win.tuner.pool import Pool
from im2win.tuner.tuning import TuneError


def study(conv: im2win.Conv2d, device: Device, target: str, trials: int, pool: Pool, kept: Path | None) -> dict[str, Any]:
    """One row: the default tile and the best one, with their times in milliseconds, or why there is none."""
    start = time.monotonic()
    with nullcontext(kept) if kept else tempfile.TemporaryDirectory() as logs:
        try:
            best = im2win.tune(conv, target, trials=trials, logs=logs, pool=pool)
        except (ValueError, TuneError) as reason:
            return {"conv": str(conv), "failed": str(reason)}
        algorithm, tile = im2win.default_tile(conv, machine=device)
        records = Log(logs).read(conv, device.name)
    default = [one for one in records if (one.method, one.tile) == (algorithm, tile.as_dict())][-1]
    tried = len({(one.method, str(one.tile)) for one in records})
    seconds = round(time.monotonic() - start, 1)
    return {"conv": str(conv), "default": _choice(default), "tuned": _choice(best), "tried": tried, "seconds": seconds}


def _choice(record: Record) -> dict[str, Any]:
    taken = None if record.seconds is None else 1e3 * record.seconds
    return {"algorithm": record.method, "tile": dict(record.tile), "ms": taken, "outcome": record.outcome}


def main() -> None:
    """Reads the command line, studies every layer, writes the study after each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("layers", type=Path, help="file of layers, as benchmarks/draw_layers.py writes it")
    parser.add_argument("--target", default="cpu")
    parser.add_argument("--trials", type=int, default=64)
    parser.add_argument("--logs", type=Path, help="an empty folder that keeps all records; without it they are dropped")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no further layer after so many")
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    try:
        device = device_for(options.target)
        layers, skipped = read_layers(options.layers)
    except (NoGpuError, LayerFileError, ValueError) as reason:
        parser.error(str(reason))
    for message in skipped:
        print(message, flush=True)
    convs = [layer.conv for layer in layers]
    facts = {
        "study": UNTUNED, "schema": SCHEMA, "device": device.name, "brand": device.brand, "threads": backend_for(device).threads,
        "layers_from": options.layers.stem, "trials": options.trials, "versions": versions(),
    }  # fmt: skip
    made = digests(options.target)
    rows = held(options.json, "rows", facts)
    known = {row["conv"] for row in rows}
    begun = time.monotonic()
    with Pool(device) as pool:
        for conv in convs:
            if time.monotonic() - begun > options.seconds:
                break
            if str(conv) in known:
                continue
            row = study(conv, device, options.target, options.trials, pool, options.logs) | {"source": made[SOURCE]}
            rows.append(row)
            replace_json(options.json, {**facts, "commit": commit(), "date": utc_now(), "digests": made, "rows": rows})
            shown = row.get("failed") or ", ".join(f"{name} {row[name]['ms']:.3f} ms" for name in ("default", "tuned") if row[name]["ms"])
            print(f"{conv}: {shown}", flush=True)


if __name__ == "__main__":
    main()
