"""`im2win demo`: the whole workflow on two layers, in a temporary folder: tune, export, load in a new process, check, compare."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
import typer

import im2win
from im2win.cli.commands import options, tables, tune, workload
from im2win.common.progress import reporting
from im2win.common.quantities import counted
from im2win.spec import methods
from im2win.spec.conv2d import Conv2d

if TYPE_CHECKING:
    from rich.console import Console

    from im2win.bench.peers.cpu import Array
    from im2win.bench.peers.subject import Tensors, Trial
    from im2win.bench.results import Result
    from im2win.spec.suites import Layer


@dataclass(frozen=True)
class Exported:
    """The libraries of a folder, each named after the key of its layer, as a subject of the benchmark.

    The process that times them builds none.
    """

    folder: Path
    name: str = "ours"

    def prepare(self, conv: Conv2d, tensors: Tensors, threads: int) -> Trial:
        from im2win.bench.peers.subject import Trial

        op = im2win.load(self.folder / f"{conv}.so")
        layer = op.bind(tensors.filter, tensors.bias)
        output = np.full(conv.output_shape, np.nan, conv.dtype)
        return Trial(lambda: layer(tensors.data, tensors.residual, output), lambda: output, op.algorithm, op.tuned, op.extra_bytes)


@dataclass(frozen=True)
class NumpyProduct:
    """im2col and one matrix product for each image in numpy: the baseline without any deep-learning framework."""

    name: str = "numpy"

    def prepare(self, conv: Conv2d, tensors: Tensors, threads: int) -> Trial:
        from im2win.bench.peers.subject import PeerError, Trial

        if conv.layout != "NCHW" or len(conv.arguments) != 3 or conv.activation != "none":
            raise PeerError("numpy: `conv` must be NCHW without an epilogue.")
        output: list[Array] = []

        def call() -> None:
            output[:] = [im2col_product(conv, tensors.data, tensors.filter)]

        return Trial(call, lambda: output[0])


def im2col_product(conv: Conv2d, data: Array, filters: Array) -> Array:
    """The convolution of NCHW data as im2col and a matrix product, [batch, out_channels, out_h, out_w]."""
    top, left, bottom, right = conv.padding
    padded = np.pad(data, ((0, 0), (0, 0), (top, bottom), (left, right)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, conv.window, axis=(2, 3))
    (rows, columns), (down, across) = conv.stride, conv.dilation
    windows = windows[:, :, ::rows, ::columns, ::down, ::across].transpose(0, 1, 4, 5, 2, 3)
    size = conv.in_channels // conv.groups * conv.kernel[0] * conv.kernel[1]
    matrix = windows.reshape(conv.batch, conv.groups, size, -1)
    output: Array = (filters.reshape(conv.groups, -1, size) @ matrix).reshape(conv.output_shape)
    return output


def demo(
    layers: Annotated[str, typer.Option(metavar="A,B", help="Layers of the suite papers12.")] = "conv3,conv9",
    batch: Annotated[int, typer.Option(help="Images at once.")] = 1,
    trials: Annotated[int, typer.Option(help="Candidates measured for each layer.")] = 16,
    threads: options.Threads = None,
) -> None:
    """Tune two layers, export them, load them in a new process, check them and compare with numpy."""
    chosen, _ = workload.read("papers12", batch, layers)
    console = tables.console()
    with tempfile.TemporaryDirectory(prefix="im2win-demo-") as temporary:
        logs, libraries = Path(temporary, "logs"), Path(temporary, "libraries")
        console.print(f"1. Tune {counted(len(chosen), 'layer')}, {counted(trials, 'candidate')} each")
        with reporting("tuning") as reporter:
            results, interrupted = tune.tune_layers(chosen, "cpu", reporter, {"trials": trials, "logs": logs, "threads": threads})
        if interrupted:
            raise typer.Exit(130)
        for failure in (result for result in results.values() if isinstance(result, Exception)):
            raise failure
        console.print("2. Export each as a shared library")
        _export(chosen, logs, libraries, threads)
        console.print("3. Load them in a new process, check against float64, time")
        result = _measure(chosen, libraries, threads)
    console.print()
    _report(console, result, chosen)
    if any(row.failed for row in result.layers):
        raise typer.Exit(1)


def _export(chosen: list[Layer], logs: Path, libraries: Path, threads: int | None) -> None:
    for layer in chosen:
        im2win.build(layer.conv, logs=str(logs), threads=threads).export(libraries / f"{layer.conv}.so")


def _measure(chosen: list[Layer], libraries: Path, threads: int | None) -> Result:
    from im2win.bench import cpu as bench

    return bench.run(chosen, against=(), threads=threads, suite="demo", subjects=[Exported(libraries), NumpyProduct()])


def _report(console: Console, result: Result, chosen: list[Layer]) -> None:
    from im2win.registry.algorithms import ALGORITHMS

    rows = []
    for row in result.layers:
        if row.failed or row.ours_ms is None:
            console.print(f"{row.layer} failed: {row.failed}", markup=False, soft_wrap=True)
            continue
        fraction = "-" if row.roofline_fraction is None else f"{100 * row.roofline_fraction:.0f}"
        numbers = [f"{row.ours_ms:.3f}", f"{row.gflops:.0f}", fraction, tables.bytes_text(row.extra_bytes)]
        baseline = ["-"] * 2 if row.ratio is None else [f"{row.peers['numpy']:.3f}", f"{row.ratio:.1f}x"]
        rows.append([row.layer, methods.shown(row.algorithm), *numbers, f"{row.error:.1e}", *baseline])
    columns = ("layer", "algorithm", "ms", "GFLOPS", "% of roofline", "extra memory", "error", "numpy ms", "gain")
    console.print(tables.table(f"{result.brand}, {result.threads} threads", columns, rows, left=2))
    console.print(f"Measured peak {result.ceilings['fma_gflops']:.0f} GFLOPS, copy {result.ceilings['copy_gbs']:.1f} GB/s.\n")
    stored = [[layer.name, *(tables.bytes_text(row.transform_bytes(layer.conv)) for row in ALGORITHMS.values())] for layer in chosen]
    console.print(tables.table("Memory for the whole transformed tensor, by algorithm", ("layer", *ALGORITHMS), stored))
