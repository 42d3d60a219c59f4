"""`im2win onnxruntime`: rewrites an ONNX model so that ONNX Runtime computes its convolutions with im2win's kernels, from a library."""

from __future__ import annotations

import logging
from collections import Counter
from json import dumps
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from im2win.cli.commands import options, outputs, tables, tensors
from im2win.cli.commands.models import TIERS, fusion_texts, share_text, untuned_text
from im2win.common.quantities import counted
from im2win.records.tiers import checked_untuned
from im2win.spec import methods
from im2win.spec.accuracy import checked_accuracy

log = logging.getLogger("im2win")


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
    trials: options.TrialsOfUntuned = None,
    guard: Annotated[bool, typer.Option(help="Leave to ONNX Runtime what im2win does not compute faster there.")] = True,
    inputs: Annotated[
        list[str] | None,
        typer.Option("--input", metavar="NAME=FILE", help=f"Compare the whole on these; random numbers if not said: {tensors.KINDS}"),
    ] = None,
    json: options.Json = False,
) -> None:
    """Make ONNX Runtime compute a model's convolutions with im2win's kernels, where they are faster, on its own threads."""
    from im2win.frontends.onnxruntime.operators import for_onnxruntime

    console = tables.console()
    chosen, made = checked_untuned(untuned), checked_accuracy(accuracy)
    done = for_onnxruntime(
        model, out, library, batch=batch, logs=logs, threads=threads, accuracy=made, untuned=chosen, trials=trials, guard=guard,
        inputs=tensors.named(inputs) if inputs else None,
    )  # fmt: skip
    if done.note:
        log.warning("%s: %s", out, done.note)
    advice = untuned_text(done.layers, model, [batch], logs=logs, threads=threads, accuracy=accuracy)
    if json:
        typer.echo(dumps({**done.as_dict(), "advice": advice}, indent=1))
        return
    fusions = fusion_texts(done.operators)
    rows: list[list[object]] = []
    for layer in done.layers:
        found = done.times.get(layer.name)
        times = ("", "") if found is None else (f"{found.ours_s * 1e3:.3f}", f"{found.theirs_s * 1e3:.3f}")
        fused, tier = escape(fusions.get(layer.name, "")), TIERS.get(layer.tier, layer.tier)
        rows.append([escape(layer.name), layer.conv, fused, methods.shown(layer.algorithm), tier, *times])
    heads = ("layer", "problem", "fused", "algorithm", "tile from", "im2win ms", "ONNX Runtime ms")
    console.print(tables.table(None, heads, rows, left=5))
    for line in done.skipped:
        console.print(f"left to ONNX Runtime: {escape(line)}", soft_wrap=True)
    tiers = ", ".join(f"{count} {TIERS.get(tier, tier)}" for tier, count in Counter(layer.tier for layer in done.layers).items())
    size = tables.bytes_text(done.library.stat().st_size)
    memory = f"packed filters take {tables.bytes_text(done.growth)} more, workspace {tables.bytes_text(done.workspace)}"
    if done.whole is not None and not done.whole.failed:
        ratio = done.whole.theirs_s / done.whole.ours_s
        console.print(
            f"the whole: {done.whole.ours_s * 1e3:.3f} ms, ONNX Runtime {done.whole.theirs_s * 1e3:.3f} ms, {ratio:.2f}x", soft_wrap=True
        )
    if saturated := [name for name, one in done.times.items() if one.saturated]:
        console.print(
            f"ONNX Runtime's sums saturate on this CPU, im2win's do not: {escape(', '.join(saturated))}. "
            "Its sums are exact, and slower, with the entry session.x64quantprecision.", soft_wrap=True,
        )  # fmt: skip
    if share := share_text(done.operators):
        console.print(share, soft_wrap=True)
    if advice:
        console.print(advice, soft_wrap=True)
    console.print(f"{done.path}: {counted(len(done.layers), 'convolution')} on im2win; {memory}; tiles: {tiers or 'none'}.", soft_wrap=True)
    if done.layers:
        console.print(f"{done.library}: {size}; give it to SessionOptions.register_custom_ops_library.", soft_wrap=True)
