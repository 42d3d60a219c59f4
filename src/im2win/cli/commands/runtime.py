"""`im2win runtime`: writes what programs need that only run exported libraries."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from im2win.cli.commands import outputs, tables


def runtime(
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="DIR", help="A new folder, which programs put on their path.", callback=outputs.folder)
    ],
) -> None:
    """Write a small folder with which programs run exported libraries: no compiler, no tuner; numpy is all that they need beside it."""
    from im2win.export.runtime import export_runtime, size

    export_runtime(out)
    console = tables.console()
    size_text = tables.bytes_text(size(out))
    console.print(f"{out}: {size_text}; with PYTHONPATH={out} and numpy, programs run what `build` and `compile` wrote.", soft_wrap=True)
