"""`im2win build`: builds a shared library with a manifest for every layer, or files for C and C++."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from im2win.cli.commands import options, outputs, tables, workload
from im2win.common.progress import reporting
from im2win.spec import methods
from im2win.spec.accuracy import checked_accuracy

if TYPE_CHECKING:
    from im2win.builder.build import Kernel
    from im2win.spec.suites import Layer


def build(
    what: options.What,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for the libraries; made if it does not exist.", callback=outputs.folder)],
    batch: options.Batch = None,
    layers: options.Layers = None,
    algorithm: options.Algorithm = "auto",
    logs: options.Logs = None,
    threads: options.Threads = None,
    target: options.Target = "cpu",
    dtype: options.Dtype = None,
    out_dtype: options.OutDtype = None,
    layout: options.Layout = None,
    accuracy: options.Accuracy = "float32",
    machine: options.Machine = None,
    c_abi: Annotated[bool, typer.Option("--c-abi", help="For C and C++: headers with libraries, or CUDA, that need no TVM.")] = False,
) -> None:
    """Compile each layer to a shared library with a manifest, which `im2win.load` runs without a compiler; or for C and C++ without TVM."""
    if machine is not None and not c_abi:
        raise ValueError("`--machine` needs `--c-abi`: a library that im2win.load runs is made for the machine that makes it.")
    wanted, skipped = workload.read(what, batch, layers, dtype, layout, out_dtype=out_dtype, deployed=True)
    from im2win.builder.build import chosen

    out.mkdir(parents=True, exist_ok=True)
    console = tables.console()
    rows: list[list[object]] = []
    names: set[str] = set()
    with reporting("building", len(wanted)) as reporter:
        for done, layer in enumerate(wanted):
            reporter.step(done, layer.name)
            made = checked_accuracy(accuracy)
            kernel = chosen(layer.conv, target, logs=logs, algorithm=algorithm, threads=threads, accuracy=made, machine=machine)
            path, memory = (_for_c if c_abi else _library)(kernel, layer, out, names)
            sizes = tables.bytes_text(memory), tables.bytes_text(path.stat().st_size)
            tuned = "yes" if kernel.tuned else "no"
            rows.append([escape(layer.name), layer.conv, methods.shown(kernel.algorithm), tuned, path.name, *sizes])
        reporter.step(len(wanted))
    for line in skipped:
        console.print(f"skipped: {escape(line)}")
    beside_tensors = "workspace" if c_abi else "extra memory"
    console.print(tables.table(None, ("layer", "problem", "algorithm", "tuned", "file", beside_tensors, "size"), rows, left=5))
    beside = "its header beside it (.h)" if c_abi else "its manifest beside it (.json)"
    console.print(f"{len(rows)} {'layers' if c_abi else 'libraries'} in {out}; each has {beside}.", soft_wrap=True)


def _library(kernel: Kernel, layer: Layer, out: Path, names: set[str]) -> tuple[Path, int]:
    """Builds and exports a layer. Returns its library, and the bytes that a call allocates."""
    from im2win.builder.build import build_tile

    op = build_tile(kernel.conv, kernel.algorithm, kernel.tile, kernel.device, tuned=kernel.tuned)
    return op.export(out / f"{file_stem(layer.name, str(layer.conv), names)}.so"), op.extra_bytes


def _for_c(kernel: Kernel, layer: Layer, out: Path, names: set[str]) -> tuple[Path, int]:
    """Exports a layer for C and C++. Returns its library or source, and the bytes of its workspace."""
    from im2win.export.c_abi import export_kernel
    from im2win.export.c_abi.header import identifier

    name = identifier(file_stem(identifier(layer.name), identifier(str(layer.conv)), names))
    path, interface = export_kernel(kernel, out, name)
    return path, interface.workspace


def file_stem(name: str, key: str, taken: set[str]) -> str:
    """A file name for a layer: its name if that is safe and free, else with its key, else with a number. It is added to `taken`."""
    safe = re.sub(r"[^A-Za-z0-9_.-]+", "_", name).strip("_.") or key
    stem = safe if safe not in taken else f"{safe}-{key}"
    number = 2
    while stem in taken:
        stem, number = f"{safe}-{key}-{number}", number + 1
    taken.add(stem)
    return stem
