"""`im2win quantize`: quantises an ONNX model with onnxruntime.quantization and says what that loses on the calibration data."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.markup import escape

from im2win.cli.commands import completion, outputs, tables, tensors
from im2win.common.quantities import counted


def quantize(
    model: Annotated[Path, typer.Argument(metavar="MODEL.onnx", help="A float32 ONNX file with its weights.")],
    calibrate: Annotated[
        Path, typer.Option("--calibrate", metavar="DATA.npz", help="An array of images for each input, by its name; .npy for one input.")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE.onnx", help="The quantised model.", callback=outputs.file)],
    per_channel: Annotated[bool, typer.Option(help="A scale for every output channel of a filter; else one for all.")] = True,
    activations: Annotated[
        str, typer.Option(help="Type of the tensors between layers: uint8 or int8.", autocompletion=completion.choices("uint8", "int8"))
    ] = "uint8",
) -> None:
    """Quantise a float32 ONNX model to int8 filters, and print the loss of accuracy on the calibration data."""
    from im2win.frontends.onnx.quantising import quantise

    if out.resolve() == model.resolve():
        raise tensors.InputError(f"`--out` (={out}) must be another file than the model.")
    losses, images = quantise(model, out, _arrays(calibrate, model), per_channel=per_channel, activations=activations)
    console = tables.console()
    rows: list[list[object]] = []
    for one in losses:
        rows.append([escape(one.output), f"{one.relative:.3g}", "" if one.same_top is None else f"{100 * one.same_top:.1f} %"])
    console.print(tables.table(None, ("output", "relative error", "same top-1"), rows, left=1))
    console.print(f"{out}: {tables.bytes_text(out.stat().st_size)}; calibrated and compared on {counted(images, 'image')}.", soft_wrap=True)


def _arrays(path: Path, model: Path) -> dict[str, Any]:
    """The calibration data by input."""
    if not path.is_file():
        raise tensors.InputError(f"`--calibrate` (={path}) must be an existing file.")
    try:
        loaded = np.load(path, allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            return {_only_input(model): loaded}
        with loaded:
            return {name: loaded[name] for name in loaded.files}
    except tensors.InputError:
        raise
    except (ValueError, EOFError, zipfile.BadZipFile) as error:
        raise tensors.InputError(f"`--calibrate` (={path}) must be .npz or .npy without Python objects ({error}).") from None


def _only_input(model: Path) -> str:
    from im2win.frontends.onnx.layers import load

    graph = load(model)[1].graph
    stored = {tensor.name for tensor in graph.initializer}
    names = [value.name for value in graph.input if value.name not in stored]
    if len(names) != 1:
        raise tensors.InputError(f"`--calibrate` must be .npz: the model has {len(names)} inputs.")
    return str(names[0])
