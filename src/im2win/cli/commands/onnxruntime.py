"""`im2win onnxruntime`: rewrites an ONNX model so that ONNX Runtime computes its convolutions with im2win's kernels, from a library."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from im2win.cli.commands import options, outputs, tables
from im2win.cli.commands.models import TIERS
from im2win.records.tiers import checked_untuned
from im2win.spec import methods
from im2win.spec.accuracy import checked_accuracy


def onnxruntime(
    model: Annotated[Path, typer.Argument(metavar="MODEL.onnx", help="An ONNX file with its weights.")],
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="FILE.onnx", help="The model that ONNX Runtime is given.", callback=outputs.file)
    ],
    library: Annotated[
        Path | None,
        typer.Option(metavar="FILE.so", help="The library to register; the model's name with .so if not said.", callback=outputs.file),
    ] = None,
    batch: Annotated[int | None, typer.Option(help="Images of one call of a kernel where the model's batch is symbolic; else 1.")] = None,
    logs: options.Logs = None,
    threads: options.Threads = None,
    accuracy: options.Accuracy = "float32",
    untuned: Annotated[str, typer.Option(help="Layers without a record: default (im2win's tile) or keep (ONNX Runtime's).")] = "default",
) -> None:
    """Make ONNX Runtime compute a model's convolutions with im2win's kernels, on its own threads; it runs the rest itself."""
    from im2win.frontends.onnxruntime.operators import for_onnxruntime

    console = tables.console()
    chosen, made = checked_untuned(untuned), checked_accuracy(accuracy)
    with console.status("compiling"):
        done = for_onnxruntime(model, out, library, batch=batch, logs=logs, threads=threads, accuracy=made, untuned=chosen)
    rows: list[list[object]] = []
    for layer in done.layers:
        rows.append([escape(layer.name), layer.conv, methods.shown(layer.algorithm), TIERS.get(layer.tier, layer.tier)])
    console.print(tables.table(None, ("layer", "problem", "algorithm", "tile from"), rows, left=4))
    for line in done.skipped:
        console.print(f"left to ONNX Runtime: {escape(line)}", soft_wrap=True)
    tiers = ", ".join(f"{count} {TIERS.get(tier, tier)}" for tier, count in Counter(layer.tier for layer in done.layers).items())
    size = tables.bytes_text(done.library.stat().st_size)
    memory = f"packed filters take {tables.bytes_text(done.growth)} more, workspace {tables.bytes_text(done.workspace)}"
    console.print(f"{done.path}: {len(done.layers)} convolutions on im2win; {memory}; tiles: {tiers}.", soft_wrap=True)
    console.print(f"{done.library}: {size}; give it to SessionOptions.register_custom_ops_library.", soft_wrap=True)
