"""Whole models, end to end, against ONNX Runtime and PyTorch eager.

    python benchmarks/models.py --json benchmarks/studies/DEVICE/models-b1.json [--batch 1] [MODEL.onnx | NAME ...]

Without models all nine graphs that the package onnx carries (AlexNet, DenseNet-121, Inception v1 and v2, ResNet-50, ShuffleNet, SqueezeNet,
VGG-19, ZFNet-512) take part, with random weights in place of their constant ones, and five networks as PyTorch's exporter writes them.
Each is compiled for the batch, and timed as `benchmarks/README.md` says: a process for each subject, interleaved rounds, outputs checked
against ONNX Runtime's. Models that the file already holds with today's kernels, on the same device with the same versions, are
skipped.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import im2win
from im2win.bench.cpu import commit, versions
from im2win.bench.models import INSIDE, PEERS, convs_of, measure, with_random_weights
from im2win.bench.source import digests
from im2win.common.files import replace_json
from im2win.device.cpu import Machine
from im2win.records.record import utc_now
from im2win.studies.confirmation import held
from im2win.studies.entries import MODELS, SCHEMA

LIGHT = ("bvlc_alexnet", "densenet121", "inception_v1", "inception_v2", "resnet50", "shufflenet", "squeezenet", "vgg19", "zfnet512")


EXPORTED = ("mobilenetv3_large_100", "efficientnet_b0", "convnext_tiny", "deit_tiny_patch16_224", "unet")
OTHER = ("mobilenetv2_100",)  # exported where they are named


def source_of(model: str, folder: Path) -> Path:
    """The file of a model: as it is, or of one of the nine graphs with random weights or a network of PyTorch's, written to `folder`."""
    if model not in (*LIGHT, *EXPORTED, *OTHER):
        return Path(model)
    path = folder / f"{model}.onnx"
    if model not in LIGHT:
        _export(model, path)
        return path
    import onnx

    onnx.save(with_random_weights(Path(onnx.__file__).parent / "backend/test/data/light" / f"light_{model}.onnx"), path)
    return path


def _export(name: str, path: Path) -> None:
    import torch

    from im2win.bench import zoo_networks

    if name in zoo_networks.NETWORKS:
        module, images = zoo_networks.calibrated(name), zoo_networks.images(name, 1)
    else:
        torch.manual_seed(zoo_networks.SEED)
        module, images = zoo_networks.vision("timm").create_model(name, pretrained=False).eval(), zoo_networks.images("resnet50", 1)
    torch.onnx.export(module, (images,), path, dynamo=True, external_data=False, verbose=False)


def inside_onnxruntime(source: Path, folder: Path, options: argparse.Namespace) -> Any:
    """The model for ONNX Runtime with our convolutions; None where it cannot be, with the reason printed."""
    batch = None if options.batch == 1 else options.batch
    try:
        return im2win.for_onnxruntime(source, folder / "inside.onnx", batch=batch, logs=options.logs, threads=options.threads)
    except ValueError as error:
        print(f"  {INSIDE} failed: {error}", flush=True)
        return None


def main() -> None:
    """Reads the command line, times every model, writes the result after each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("models", nargs="*", default=[*LIGHT, *EXPORTED], metavar="MODEL")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--logs", type=Path, help="tuning records looked up before those that ship with the package")
    parser.add_argument("--against", default=",".join(PEERS))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--inside", action="store_true", help="ONNX Runtime with our convolutions takes part, too")
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    machine = Machine.host(options.threads)
    facts = {
        "study": MODELS, "schema": SCHEMA, "device": machine.name, "brand": machine.brand, "threads": machine.threads,
        "batch": options.batch, "versions": versions(),
    }  # fmt: skip
    against = options.against.split(",")
    rows = [row for row in held(options.json, "models", facts) if {*row["peers"], *row["peers_failed"]} == set(against)]
    known = {row["model"] for row in rows if bool(row["inside_ms"] or row["inside_failed"]) == options.inside}
    for model in (one for one in options.models if Path(one).stem not in known):
        with tempfile.TemporaryDirectory(prefix="im2win-models-") as folder:
            source, library = source_of(model, Path(folder)), Path(folder) / "model.so"
            compiled = im2win.compile_model(source, library, batches=[options.batch], logs=options.logs, threads=options.threads)
            inside = inside_onnxruntime(source, Path(folder), options) if options.inside else None
            row = measure(Path(model).stem, source, library, against, machine.threads, options.rounds, inside=inside)
        timed = {**row.peers, **({INSIDE: row.inside_ms} if row.inside_ms else {})}
        peers = ", ".join(f"{name} {value:.3f}" for name, value in timed.items())
        print(f"{row.model}: ours {row.ours_ms or float('nan'):.3f} ms, {peers}; ratio {row.ratio or float('nan'):.2f}", flush=True)
        for name, reason in {"ours": row.failed, INSIDE: row.inside_failed, **row.peers_failed}.items():
            if reason:
                print(f"  {name} failed: {reason}", flush=True)
        rows = [one for one in rows if one["model"] != row.model] + [row.as_dict() | {"convs": convs_of(compiled)}]
        made = {"commit": commit(), "date": utc_now(), "digests": digests("cpu", models=True)}
        replace_json(options.json, {**facts, **made, "models": rows})


if __name__ == "__main__":
    main()
