"""`im2win report`: fills tables of texts from results, and writes an HTML page of results and tuning records."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from im2win.cli.commands import outputs
from im2win.common.quantities import counted

if TYPE_CHECKING:
    from im2win.reports.page.sources import Sources

RESULTS = Path("benchmarks/results")


def report(
    documents: Annotated[list[Path] | None, typer.Argument(help="Texts with table markers to fill.", exists=True, dir_okay=False)] = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write one HTML page of results and tuning records here.", callback=outputs.file)
    ] = None,
    results: Annotated[
        list[Path] | None,
        typer.Option(metavar="DIR|FILE", help=f"Folder of results, for the page also a file; {RESULTS} if not said.", exists=True),
    ] = None,
    logs: Annotated[
        list[Path] | None,
        typer.Option(metavar="DIR", help="Folder of tuning records for the page; may be repeated.", exists=True, file_okay=False),
    ] = None,
    device: Annotated[str | None, typer.Option(help="Show only this device on the page.")] = None,
    layers: Annotated[str | None, typer.Option(metavar="A,B", help="Show only these layers on the page, by name or key.")] = None,
    plots: Annotated[bool, typer.Option(help="With texts: draw a PNG beside every result.")] = True,
) -> None:
    """Fill the tables between markers of texts, or write an HTML page, or both, from results and tuning records.

    The page is one file that needs nothing else. Without --results and --logs it shows benchmarks/results and your own records.
    """
    if html is None and not documents:
        raise typer.BadParameter("name texts to fill, or `--html FILE` for a page.")
    for name, given in (("logs", logs), ("device", device), ("layers", layers)):
        if given and html is None:
            raise typer.BadParameter(f"`--{name}` is for the page; name its file with `--html FILE`.")
    if documents:
        _fill(documents, results or [], plots)
    if html is not None:
        _write(html, results or [], logs or [], device, layers)


def _fill(documents: list[Path], results: list[Path], plots: bool) -> None:
    from im2win.reports.tables import plot_all, refresh

    folder = results[0] if results else RESULTS
    if len(results) > 1 or not folder.is_dir():
        named = ", ".join(map(str, results)) or str(folder)
        raise typer.BadParameter(f"`--results` (={named!r}) must be one folder that exists, to fill texts.")
    for document in documents:
        changed = refresh(document, folder)
        typer.echo(f"{document}: {'changed' if changed else 'as it was'}")
    if plots:
        for path in plot_all(folder):
            typer.echo(str(path))


def _write(html: Path, results: list[Path], logs: list[Path], device: str | None, layers: str | None) -> None:
    """Writes the page and says what it holds and what it leaves out."""
    from im2win.common.progress import reporting
    from im2win.records.folders import user_folder
    from im2win.reports.page.page import write
    from im2win.reports.page.sources import only, read

    if not results and not logs:
        results = [RESULTS] if RESULTS.is_dir() else []
        logs = [user_folder()] if user_folder().is_dir() else []
    names = None if layers is None else [name.strip() for name in layers.split(",")]
    with reporting("report") as reporter:
        reporter.step(note="reading")
        sources = only(read(results, logs), device, names)
        write(sources, html, lambda done, total: reporter.step(done, total=total))
    _say(html, sources)


def _say(html: Path, sources: Sources) -> None:
    for note in sources.notes:
        typer.echo(note.replace("`", ""))
    if sources.unusable:
        first = sources.unusable[0]
        more = f" (and {len(sources.unusable) - 1} more)" if len(sources.unusable) > 1 else ""
        typer.echo(f"Left out: {first.path}: {first.reason}{more}")
    measured = counted(len(sources.results) + len(sources.memory), "result file")
    typer.echo(f"{html}: {measured}, {counted(len(sources.tuned), 'tuned layer')}, {html.stat().st_size / 1e3:.0f} kB.")
