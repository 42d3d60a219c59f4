"""`im2win build`: a shared library and a manifest for every layer, from the logs or with the default tile."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from im2win.commands import options, tables, workload


def build(
    what: options.What,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for the libraries; made if it does not exist.")],
    batch: options.Batch = None,
    layers: options.Layers = None,
    algorithm: options.Algorithm = "auto",
    logs: options.Logs = options.DEFAULT_LOGS,
    threads: options.Threads = None,
    target: options.Target = "cpu",
    dtype: options.Dtype = None,
    layout: options.Layout = None,
    accuracy: options.Accuracy = "float32",
) -> None:
    """Compile each layer to a shared library with a manifest; `im2win.load` runs it without a compiler."""
    chosen, skipped = workload.read(what, batch, layers, dtype, layout, deployed=True)
    import im2win
    from im2win.reference import checked_accuracy

    out.mkdir(parents=True, exist_ok=True)
    console = tables.console()
    rows: list[list[object]] = []
    names: set[str] = set()
    with console.status("building") as status:
        for layer in chosen:
            status.update(f"building {escape(layer.name)}")
            folder = str(logs) if logs.is_dir() else None
            op = im2win.build(layer.conv, target, logs=folder, algorithm=algorithm, threads=threads, accuracy=checked_accuracy(accuracy))
            path = out / f"{file_stem(layer.name, str(layer.conv), names)}.so"
            op.export(str(path))
            sizes = tables.bytes_text(op.extra_bytes), tables.bytes_text(path.stat().st_size)
            rows.append([escape(layer.name), layer.conv, op.algorithm, "yes" if op.tuned else "no", path.name, *sizes])
    for line in skipped:
        console.print(f"skipped: {escape(line)}")
    console.print(tables.table(None, ("layer", "problem", "algorithm", "tuned", "file", "extra memory", "size"), rows, left=5))
    console.print(f"{len(rows)} libraries in {out}; each has its manifest beside it (.json).", soft_wrap=True)


def file_stem(name: str, key: str, taken: set[str]) -> str:
    """A file name for a layer: its name where that is safe and free, else with its key, else with a number; added to `taken`."""
    safe = re.sub(r"[^A-Za-z0-9_.-]+", "_", name).strip("_.") or key
    stem = safe if safe not in taken else f"{safe}-{key}"
    number = 2
    while stem in taken:
        stem, number = f"{safe}-{key}-{number}", number + 1
    taken.add(stem)
    return stem
