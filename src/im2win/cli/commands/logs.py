"""`im2win logs`: shows, merges, prunes and proves folders of tuning records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from im2win.cli.commands import options, outputs, tables
from im2win.common.quantities import counted
from im2win.spec import methods

if TYPE_CHECKING:
    from im2win.records.log import Log
    from im2win.records.record import Record
    from im2win.spec.conv2d import Conv2d

app = typer.Typer(help="Show, merge, prune and prove folders of tuning records.")

Folder = Annotated[Path | None, typer.Argument(metavar="DIR", help="Folder of tuning records; your own if not said.")]
Device = Annotated[str | None, typer.Option(help="Only this device's records.")]


def _open(folder: Path | None) -> Log:
    """The records of a folder, or of the user's own."""
    from im2win.common.locking import LogError
    from im2win.records.folders import VARIABLE, user_folder
    from im2win.records.log import Log

    if folder is None and not user_folder().exists():
        raise LogError(f"there are no records of your own: `im2win tune` makes {user_folder()}, and {VARIABLE} names another folder.")
    folder = user_folder() if folder is None else folder
    if not folder.is_dir():
        raise LogError(f"{str(folder)!r} must be a folder of tuning records.")
    return Log(folder)


@app.command()
def show(
    folder: Folder = None,
    device: Device = None,
    stale: Annotated[
        bool, typer.Option("--stale", help="Show the layers whose records today's default tile has not met, why, and what mends it.")
    ] = False,
    json: options.Json = False,
) -> None:
    """Show the best record of every layer, the number of records, and lines that could not be read."""
    log = _open(folder)
    if stale:
        _show_stale(log, device, json)
        return
    layers = list(_layers(log, device))
    if json:
        problems = [{"path": str(one.path), "line": one.line_number, "reason": one.reason} for one in log.problems]
        tables.print_json({"folder": str(log.folder), "layers": [layer.as_dict() for layer in layers], "problems": problems})
        return
    console = tables.console()
    columns = ("device", "problem", "algorithm", "records", "failed", "best ms", "GFLOPS", "date")
    console.print(tables.table(None, columns, [layer.row() for layer in layers], left=3))
    for problem in log.problems:
        console.print(f"{problem.path}:{problem.line_number}: {problem.reason}", markup=False, soft_wrap=True)


def _show_stale(log: Log, device: str | None, json: bool) -> None:
    """Prints the layers whose records are but hints, with reasons and the commands that measure today's default tile beside them."""
    from im2win.records.standings import device_of, unmet
    from im2win.registry.backends import backend_for

    console = tables.console()
    found: list[dict[str, Any]] = []
    for name in log.devices() if device is None else [device]:
        known = device_of(log, name)
        rows: list[dict[str, Any]] = []
        if known is not None:
            mend = f"--target {backend_for(known).target} --logs {log.folder}"
            for one in unmet(log, name):
                rows.append({"conv": str(one.conv), "reason": one.standing.reason, "command": f"im2win tune {one.conv} {mend}"})
        total = len(log.convs(name))
        found.append({"device": name, "known": known is not None, "layers": total, "stale": rows})
        if json:
            continue
        for row in rows:
            console.print(f"{name} {row['conv']}: {row['reason']}\n  {row['command']}", markup=False, soft_wrap=True)
        last = "its default tiles are unknown on this machine."
        if known is not None:
            last = f"the records of {len(rows)} of {counted(total, 'layer')} are only hints."
        console.print(f"{name}: {last}", markup=False, soft_wrap=True)
    if json:
        tables.print_json({"folder": str(log.folder), "devices": found})


@dataclass(frozen=True)
class _Layer:
    """The records of a layer on a device: how many there are, how many of them failed, and the best."""

    device: str
    conv: Conv2d
    records: int
    failed: int
    best: Record | None

    def row(self) -> list[object]:
        """The cells of the table."""
        head, best = [self.device, self.conv], self.best
        if best is None:
            return [*head, None, self.records, self.failed, None, None, None]
        times = tables.milliseconds(best.seconds), tables.gflops(self.conv.flops, best.seconds)
        return [*head, methods.shown(best.method), self.records, self.failed, *times, best.date[:10]]

    def as_dict(self) -> dict[str, Any]:
        """The JSON value; see docs/command_line.md."""
        head = {"device": self.device, "conv": str(self.conv), "flops": self.conv.flops, "records": self.records, "failed": self.failed}
        best = self.best
        if best is None:
            return {**head, "best": None}
        choice = {"algorithm": best.algorithm, "schedule": best.schedule, "tile": best.tile}
        return {**head, "best": {**choice, "best_s": best.seconds, "extra_bytes": best.extra_bytes, "tvm": best.tvm, "date": best.date}}


def _layers(log: Log, device: str | None) -> Iterator[_Layer]:
    for name in log.devices() if device is None else [device]:
        for conv in log.convs(name):
            records = log.read(conv, name)
            timed = [record for record in records if record.seconds is not None]
            yield _Layer(name, conv, len(records), len(records) - len(timed), min(timed, key=lambda record: record.cost, default=None))


@app.command()
def merge(
    sources: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Folders to read.")],
    into: Annotated[Path, typer.Option(metavar="DIR", help="Folder that gets what it does not hold yet.", callback=outputs.folder)],
) -> None:
    """Copy every record of the sources into another folder; equal records are kept once."""
    from im2win.records.log import Log
    from im2win.records.log import merge as merge_logs

    done = merge_logs([_open(source) for source in sources], Log(into))
    added, broken = counted(done.added, "record"), counted(done.broken, "line")
    tables.console().print(f"{added} added, {done.duplicates} there before, {broken} unreadable.")


@app.command()
def prune(
    folder: Folder = None,
    keep: Annotated[int, typer.Option(help="Fastest records to keep, for each layer and algorithm.")] = 1,
    stale: Annotated[bool, typer.Option("--stale", help="Also drop records of another TVM or of schedules that have changed.")] = False,
    device: Device = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only count.")] = False,
) -> None:
    """Keep the fastest records of every layer and algorithm; drop the others, the failures and broken lines."""
    log = _open(folder)
    from im2win.records import lookup

    done = log.prune(keep, accepts=lookup.stale if stale else None, device=device, dry_run=dry_run)
    verb = "would be kept" if dry_run else "kept"
    dropped = f"{done.slower} slower, {done.failing} failed, {done.stale} stale, {done.broken} unreadable"
    tables.console().print(f"{counted(done.kept, 'record')} {verb}; dropped: {dropped}.")


@app.command()
def restamp(
    folder: Folder = None,
    device: Device = None,
    check: Annotated[bool, typer.Option("--check", help="Only compare: write no proof, and exit with 1 if a kernel differs.")] = False,
    choices: Annotated[
        bool, typer.Option("--choices", help="Emit nothing: only find which records beat today's default tiles. Needs a current proof.")
    ] = False,
    new: Annotated[bool, typer.Option("--new", help="List only the layers that a proof of today's source does not.")] = False,
    every: Annotated[bool, typer.Option("--all", help="Emit every record's kernel, whatever a proof says.")] = False,
    processes: Annotated[int | None, typer.Option(min=1, help="Processes that work; one for each CPU by default.")] = None,
) -> None:
    """Emit the kernels of records again and compare. Records whose kernels are equal stay valid without being emitted again.

    Only records that no proof of today's source covers are emitted: new ones, and those of methods whose source has changed.

    Then rank every layer's tiles and list how its records stand against the default tile, so that the look-up need not. The proof is
    written beside the records, as proof.json in the device's folder.
    """
    from im2win.device.cpu import usable_cpus

    log, differ = _open(folder), 0
    for name in log.devices() if device is None else [device]:
        if not choices:
            differ += _emit_again(log, name, processes or usable_cpus(), write=not check, anew=every)
        if not check:
            _rank_again(log, name, processes or usable_cpus(), anew=not new)
    if check and differ:
        raise typer.Exit(1)


def _emit_again(log: Log, name: str, processes: int, *, write: bool, anew: bool) -> int:
    """Emits the kernels of a device's records and says which differ. Returns their number."""
    from im2win.records.proofs import restamp as emit_again

    console = tables.console()
    with tables.progress(name) as progress:
        verdicts = emit_again(log, name, processes=processes, write=write, anew=anew, progress=progress)
    changed = [one for one in verdicts if one.reason is not None]
    console.print(f"{name}: the kernel that was timed is emitted for {len(verdicts) - len(changed)} of {counted(len(verdicts), 'record')}.")
    for one in changed:
        console.print(f"  {one.record.conv} {methods.shown(one.record.method)}: {one.reason}", markup=False, soft_wrap=True)
    return len(changed)


def _rank_again(log: Log, name: str, processes: int, *, anew: bool) -> None:
    """Lists how the records of a device stand against default tiles, and says how many earned their place."""
    from im2win.records.standings import stamp

    console = tables.console()
    try:
        with tables.progress(f"{name}, default tiles") as progress:
            found = stamp(log, name, processes=processes, anew=anew, progress=progress)
    except ValueError as error:
        console.print(str(error), markup=False, soft_wrap=True)
        return
    counts = Counter((one.accuracy, one.standing.kind) for one in found)
    for (accuracy, kind), count in sorted(counts.items()):
        console.print(f"{name}, accuracy {accuracy}: {counted(count, 'layer')} {kind}")
