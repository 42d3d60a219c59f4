"""`im2win report`: generates the tables and plots of documents from committed results."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    documents: Annotated[list[Path], typer.Argument(help="Texts with table markers to fill.", exists=True, dir_okay=False)],
    results: Annotated[Path, typer.Option(help="Folder of results.", exists=True, file_okay=False)] = Path("benchmarks/results"),
    plots: Annotated[bool, typer.Option(help="Draw a PNG beside every result.")] = True,
) -> None:
    """Fill the tables between markers and draw the plots, from the results in a folder."""
    from im2win.reports.tables import plot_all, refresh

    for document in documents:
        changed = refresh(document, results)
        typer.echo(f"{document}: {'changed' if changed else 'as it was'}")
    if plots:
        for path in plot_all(results):
            typer.echo(str(path))
