"""Quantised models, end to end, against ONNX Runtime on the same file and against float32.

    python benchmarks/quantised_models.py --json benchmarks/studies/DEVICE/quantised-models-b1.json [--activations uint8] [NAME ...]

ResNet-50, MobileNet-V2 and EfficientNet-B0 with random weights (`benchmarks/models.py`) are quantised as `im2win quantize` does: int8
filters with a scale for each channel, static scales calibrated on random images. The quantised and the float32 model are compiled for the
batch. Subjects are timed as `benchmarks/README.md` says: a process for each, interleaved rounds, the quantised outputs checked against ONNX
Runtime's within `TOLERANCE`. Models that the file already holds with today's kernels, on the same device with the same versions, are
skipped.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np
from models import source_of

import im2win
from im2win.bench.cpu import commit, versions
from im2win.bench.models import OnnxRuntimeModel, Ours, convs_of, measure
from im2win.bench.source import digests
from im2win.common.files import replace_json
from im2win.device.cpu import Machine
from im2win.frontends.onnx.layers import load
from im2win.frontends.onnx.quantising import ACTIVATIONS, quantise
from im2win.records.record import utc_now
from im2win.studies.confirmation import held
from im2win.studies.entries import FLOATS, QUANTISED, SCHEMA

NETWORKS = ("resnet50", "mobilenetv2_100", "efficientnet_b0")
IMAGES, SEED = 8, 1  # of the calibration
TOLERANCE = 0.1  # of the largest output: a step of a quantised tensor that is rounded the other way changes those after it


def quantised(source: Path, out: Path, activations: str) -> None:
    """Writes a model quantised on random images."""
    graph = load(source)[1].graph
    stored = {tensor.name for tensor in graph.initializer}
    random = np.random.default_rng(SEED)
    data = {}
    for value in graph.input:
        if value.name not in stored:
            shape = [one.dim_value for one in value.type.tensor_type.shape.dim][1:]
            data[value.name] = random.normal(size=(IMAGES, *shape)).astype(np.float32)
    quantise(source, out, data, activations=activations)


def main() -> None:
    """Reads the command line, times every model, writes the result after each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("models", nargs="*", default=[*NETWORKS], metavar="NAME")
    parser.add_argument("--activations", default="uint8", choices=ACTIVATIONS)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    machine = Machine.host(options.threads)
    facts = {
        "study": QUANTISED, "schema": SCHEMA, "device": machine.name, "brand": machine.brand, "threads": machine.threads,
        "batch": options.batch, "tolerance": TOLERANCE, "versions": versions(),
    }  # fmt: skip
    rows = held(options.json, "models", facts)
    known = {row["model"] for row in rows if row["activations"] == options.activations}
    for model in (one for one in options.models if Path(one).stem not in known):
        with tempfile.TemporaryDirectory(prefix="im2win-quantised-") as name:
            folder = Path(name)
            source, integers = source_of(model, folder), folder / "quantised.onnx"
            quantised(source, integers, options.activations)
            libraries = {path: path.with_suffix(".so") for path in (integers, source)}
            compiled = [
                im2win.compile_model(path, library, batches=[options.batch], threads=options.threads) for path, library in libraries.items()
            ]
            ours, theirs = FLOATS
            beside = [Ours(libraries[source], name=ours), OnnxRuntimeModel(libraries[source], source, name=theirs)]
            row = measure(
                Path(model).stem, integers, libraries[integers], ["onnxruntime"], machine.threads, options.rounds, beside=beside,
                tolerance=TOLERANCE,
            )  # fmt: skip
        times = ", ".join(f"{subject} {spread.median:.3f} ms" for subject, spread in row.spread.items())
        print(f"{row.model}: {times}; ratio {row.ratio or float('nan'):.2f}, error {row.error or float('nan'):.1e}", flush=True)
        for subject, reason in {"ours": row.failed, **row.peers_failed}.items():
            if reason:
                print(f"  {subject} failed: {reason}", flush=True)
        convs = sorted({conv for one in compiled for conv in convs_of(one)})
        entry = row.as_dict() | {"activations": options.activations, "convs": convs}
        rows = [one for one in rows if (one["model"], one["activations"]) != (row.model, options.activations)] + [entry]
        made = {"commit": commit(), "date": utc_now(), "digests": digests("cpu", models=True)}
        replace_json(options.json, {**facts, **made, "models": rows})


if __name__ == "__main__":
    main()
