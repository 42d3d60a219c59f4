"""`im2win compile` and `im2win run`: compiles a whole ONNX model into one library, and runs that library on tensors from files."""

from __future__ import annotations

import importlib.util
import shlex
import time
from collections import Counter
from collections.abc import Sequence
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import numpy as np
import typer
from rich.markup import escape

from im2win.cli.commands import options, outputs, tables, tensors
from im2win.common.messages import brief
from im2win.common.progress import reporting
from im2win.common.quantities import counted
from im2win.records.tiers import TUNED
from im2win.spec import methods
from im2win.spec.accuracy import checked_accuracy
from im2win.spec.conv2d import Conv2d

if TYPE_CHECKING:
    from im2win.bench.models import ModelRow
    from im2win.frontends.onnx.coverage import Covered
    from im2win.runtime.model import Model

_ROUNDS = 7  # of the comparison of a whole model
TIERS = {"exact": "tuned for this layer", "default": "default tile"}


class _Tiered(Protocol):
    """A layer of a compiled model: the key of its problem, and the tier that its tile is from."""

    @property
    def conv(self) -> str: ...
    @property
    def tier(self) -> str: ...


def compile_(
    model: Annotated[Path, typer.Argument(metavar="MODEL.onnx", help="An ONNX file with its weights.")],
    out: Annotated[
        Path,
        typer.Option(
            "--out", "-o", metavar="FILE.so", help="The library; weights and manifest are written beside it.", callback=outputs.file
        ),
    ],
    batch: Annotated[str | None, typer.Option(metavar="1,8", help="Numbers of images to compile for; the model's own if not said.")] = None,
    logs: options.Logs = None,
    threads: options.Threads = None,
    target: options.Target = "cpu",
    accuracy: options.Accuracy = "float32",
    dtype: Annotated[str | None, typer.Option(help="float16, bfloat16 or float32; the model's own if not said.")] = None,
    trials: options.TrialsOfUntuned = None,
    compare: Annotated[bool, typer.Option(help="Time the library against ONNX Runtime, on a CPU where that is installed.")] = True,
    json: options.Json = False,
) -> None:
    """Compile a whole ONNX model; `im2win run` and `im2win.load_model` run it without a compiler."""
    from im2win.frontends.models.compiler import compile_model
    from im2win.frontends.onnx.coverage import coverage
    from im2win.frontends.onnx.layers import load

    batches = _batches(batch)
    console = tables.console()
    made = checked_accuracy(accuracy)
    compiled = compile_model(
        model, out, target, batches=batches, logs=logs, threads=threads, accuracy=made, dtype=dtype, trials=trials
    )
    manifest = compiled.manifest
    operators = coverage(load(model)[1], compiled.batches[0], {one.name for one in manifest.layers}, products=True)
    told = {"target": target, "dtype": dtype, "logs": logs, "threads": threads, "accuracy": accuracy}
    advice = untuned_text(manifest.layers, model, batches or [None], **told)
    whole = _whole(model, out, manifest.threads) if compare and target == "cpu" else None
    if json:
        typer.echo(dumps({**_as_dict(out, compiled, operators), "whole": whole and whole.as_dict(), "advice": advice}, indent=1))
        return
    fusions = fusion_texts(operators)
    rows: list[list[object]] = []
    for layer in manifest.layers:
        fused = escape(fusions.get(layer.name, ""))
        rows.append([escape(layer.name), layer.conv, fused, methods.shown(layer.algorithm), TIERS.get(layer.tier, layer.tier)])
    if rows:
        console.print(tables.table(None, ("layer", "problem", "fused", "algorithm", "tile from"), rows, left=5))
    else:
        console.print("no convolution or matrix product of this model runs on im2win's kernels: TVM compiled all of it.", soft_wrap=True)
    for line in manifest.skipped:
        console.print(f"left to TVM: {escape(line)}")
    tiers = ", ".join(f"{count} {TIERS.get(tier, tier)}" for tier, count in Counter(layer.tier for layer in manifest.layers).items())
    size, weights = tables.bytes_text(out.stat().st_size), tables.bytes_text(manifest.weights_bytes)
    memory = tables.bytes_text(max(bucket.workspace for bucket in manifest.buckets))
    sizes = ", ".join(map(str, compiled.batches))
    if share := share_text(operators):
        console.print(share, soft_wrap=True)
    if whole is not None:
        console.print(whole_text(whole, model), soft_wrap=True)
    if advice:
        console.print(advice, soft_wrap=True)
    console.print(f"{out}: {size}, weights {weights}, workspace {memory}; batches {sizes}; tiles: {tiers or 'none'}.", soft_wrap=True)


def _whole(model: Path, library: Path, threads: int) -> ModelRow | None:
    """The compiled model beside ONNX Runtime, each in a process of its own, on random inputs; None if that is not installed."""
    if importlib.util.find_spec("onnxruntime") is None:
        return None
    from im2win.bench.models import measure

    with reporting("comparing with ONNX Runtime"):
        return measure(model.name, model, library, ["onnxruntime"], threads, rounds=_ROUNDS, warmup=0.2)


def whole_text(row: ModelRow, model: Path) -> str:
    """The time of a compiled model beside ONNX Runtime's, and what to do if that is faster; why there is none, if there is none."""
    if row.ours_ms is None or row.ratio is None:
        why = row.failed or "; ".join(row.peers_failed.values())
        return f"not compared with ONNX Runtime: {escape(brief(ValueError(why), 200))}"
    times = f"{row.ours_ms:.3g} ms, ONNX Runtime {row.peers['onnxruntime']:.3g} ms"
    text = f"the whole, {counted(row.batch, 'image')}: {times}, {row.ratio:.2f}x"
    if row.ratio >= 1:
        return text
    command = f"im2win onnxruntime {shlex.quote(str(model))} --out FASTER.onnx"
    return f"{text}; ONNX Runtime computes the other operators faster: `{escape(command)}` leaves them to it"


def fusion_texts(operators: Sequence[Covered]) -> dict[str, str]:
    """What is fused with each layer and why no more is, by its name."""
    return {one.name: "; ".join(filter(None, (" ".join(one.fused), one.unfused))) for one in operators if one.ours}


def untuned_text(layers: Sequence[_Tiered], model: Path, batches: Sequence[int | None], **told: object) -> str:
    """How many layers no tuning record of this device is about, and the commands that make them; "" if each has one.

    Args:
        batches: numbers of images that were asked for; None for the model's own.
        told: other options as they were given; those that were not, or that are `im2win tune`'s own, are left out.
    """
    untuned = [Conv2d.parse(layer.conv) for layer in layers if layer.tier not in TUNED]
    if not untuned:
        return ""
    usual = {"target": "cpu", "accuracy": "float32"}
    given = {name: value for name, value in told.items() if value is not None and value != usual.get(name)}
    if all(conv.layout == "NHWC" for conv in untuned):
        given["layout"] = "NHWC"
    words = "".join(f" --{name} {shlex.quote(str(value))}" for name, value in given.items())
    each = (f" --batch {batch}" if batch is not None else "" for batch in batches)
    commands = " && ".join(f"im2win tune {shlex.quote(str(model))}{words}{more}" for more in each)
    return f"{counted(len(untuned), 'layer', 'have')} no tuning record of this device: {commands}, or --trials 64"


def share_text(operators: Sequence[Covered]) -> str:
    """How much of the arithmetic is not im2win's; "" where that is unknown."""
    from im2win.frontends.onnx.coverage import share_left

    share = share_left(operators)
    return "" if share is None else f"{share:.1%} of the flops of convolutions and products are not im2win's."


def _as_dict(out: Path, compiled: Model, operators: Sequence[Covered]) -> dict[str, Any]:
    """What was compiled, as plain values."""
    from im2win.frontends.onnx.coverage import share_left

    manifest = compiled.manifest
    layers = [
        {"name": one.name, "conv": one.conv, "algorithm": one.algorithm, "tier": one.tier, "tile": one.tile} for one in manifest.layers
    ]
    facts = {"library": str(out), "bytes": out.stat().st_size, "weights_bytes": manifest.weights_bytes, "batches": list(compiled.batches)}
    workspace = max(bucket.workspace for bucket in manifest.buckets)
    covered = {"operators": [one.as_dict() for one in operators], "share_left": share_left(operators)}
    return {"schema": 1, **facts, "workspace_bytes": workspace, "layers": layers, "left": list(manifest.skipped), **covered}


def _batches(text: str | None) -> list[int] | None:
    if text is None:
        return None
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise tensors.InputError(f"`--batch` (={text!r}) must be integers with commas between them, such as 1,8.") from None


def run(
    library: Annotated[Path, typer.Argument(metavar="FILE.so", help="A library that `im2win compile` wrote.")],
    inputs: Annotated[
        list[str] | None, typer.Option("--input", metavar="NAME=FILE", help=f"A tensor for each input: {tensors.KINDS}")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the outputs: .npz, or .npy for a single one.", callback=outputs.file)
    ] = None,
    repeat: Annotated[int, typer.Option(min=0, help="Time this many further runs.")] = 0,
    verify: Annotated[bool, typer.Option("--verify", help="Check the digest of large weights, too.")] = False,
) -> None:
    """Run a compiled model on tensors from files; nothing is compiled."""
    begin = time.perf_counter()
    from im2win.runtime.load import load_model

    model = load_model(library, verify=verify or None)
    loaded = time.perf_counter() - begin
    given = _inputs(model, inputs or [])
    if out is not None and out.suffix not in (".npz", ".npy"):
        raise tensors.InputError(f"`--out` (={out}) must end in .npz or .npy.")
    if out is not None and out.suffix == ".npy" and len(model.outputs) != 1:
        raise tensors.InputError(f"`--out` (={out}) must end in .npz: the model has {len(model.outputs)} outputs.")
    given = _on_device(model, given)
    begin = time.perf_counter()
    results = _on_host(model.run(given))
    first = time.perf_counter() - begin
    console = tables.console()
    rows: list[list[object]] = []
    for name, value in results.items():
        flat = value.reshape(-1)
        facts = (flat.min(), flat.max(), flat.mean(), int(flat.argmax())) if flat.size else ("", "", "", "")
        rows.append([escape(name), str(tuple(value.shape)), str(value.dtype), *(f"{fact:.6g}" if fact != "" else "" for fact in facts)])
    console.print(tables.table(None, ("output", "shape", "dtype", "least", "most", "mean", "place of most"), rows, left=3))
    line = f"loaded in {tables.milliseconds(loaded)} ms, first run {tables.milliseconds(first)} ms"
    if repeat:
        line += f", then {tables.milliseconds(_median(model, given, repeat))} ms (median of {repeat})"
    console.print(line + ".")
    if out is not None:
        _save(out, results)
        console.print(f"Written to {out}.")


def _on_device(model: Model, given: dict[str, Any]) -> dict[str, Any]:
    """The inputs on the device where the model runs."""
    if model.manifest.target != "cuda":
        return given
    import torch  # noqa: F401 - what `torch_tensor` returns

    from im2win.runtime.tensors import torch_tensor

    return {name: torch_tensor(value).cuda() for name, value in given.items()}


def _on_host(results: dict[str, Any]) -> dict[str, Any]:
    """Results as numpy arrays; waits for those of a GPU."""
    from im2win.runtime.tensors import torch_values

    return {name: value if isinstance(value, np.ndarray) else torch_values(value.cpu()) for name, value in results.items()}


def _median(model: Model, given: dict[str, Any], repeat: int) -> float:
    seconds = []
    for _ in range(repeat):
        begin = time.perf_counter()
        _on_host(model.run(given))
        seconds.append(time.perf_counter() - begin)
    return float(np.median(seconds))


def _save(out: Path, results: dict[str, Any]) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    if out.suffix == ".npy":
        np.save(out, next(iter(results.values())))
    else:
        np.savez(out, **results)


def _inputs(model: Model, stated: list[str]) -> dict[str, Any]:
    """The tensors that `--input` names."""
    given = tensors.named(stated)
    wanted = {port.name: port for port in model.inputs}
    if set(given) != set(wanted):
        known = ", ".join(f"{name} {port.dtype} {list(port.shape)}" for name, port in wanted.items())
        raise tensors.InputError(f"`--input` (={', '.join(given) or 'none'}) must name each input of the model once: {known}.")
    return given
