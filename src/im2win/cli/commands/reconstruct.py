"""`im2win reconstruct`: rewrites generated CUDA by rule sets, and reports what was changed and why."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from im2win.cli.commands import outputs, tables
from im2win.common.quantities import counted

if TYPE_CHECKING:
    from rich.console import Console

    from im2win.reconstruct.parse.unit import Unit
    from im2win.reconstruct.text_rules import Match
    from im2win.reconstruct.validate.validators import Validator

SPLIT = "split"
LAUNCH = "`// launch: NAME(TENSOR, ...) grid X Y Z block X Y Z dynamic BYTES`"
_STYLES = {"+++": "bold", "---": "bold", "@@": "cyan", "+": "green", "-": "red"}


def reconstruct(
    source: Annotated[Path, typer.Argument(metavar="IN.cu", help="CUDA that TVM generated, with its launches in comments.")],
    out: Annotated[
        Path,
        typer.Option("--out", "-o", metavar="OUT.cu", help="The result; after split, one file for each kernel.", callback=outputs.file),
    ],
    rules: Annotated[str, typer.Option(metavar="A,B", help="Rule sets in order: barriers, pkf-shmem, pkf-llc, hip, split.")] = "barriers",
    explain: Annotated[bool, typer.Option("--explain", help="Show each rule, what it matched and why, as a coloured diff.")] = False,
    validate: Annotated[bool, typer.Option("--validate", help="Ask a validator, the emulator, about every change; slow.")] = False,
    trial: Annotated[bool, typer.Option("--trial", help="Also say what trial and error alone would delete; changes nothing.")] = False,
    shared: Annotated[int, typer.Option(metavar="BYTES", help="Shared memory that a block may take.")] = 49152,
    wave: Annotated[int, typer.Option(help="pkf-llc: blocks that are served before the next tensor parts are made; 0 for all.")] = 0,
) -> None:
    """Rewrite generated CUDA: remove unneeded barriers, fuse kernels partially, translate to HIP."""
    from im2win.reconstruct import ReconstructError
    from im2win.reconstruct.parse.unit import read
    from im2win.reconstruct.rulesets import Settings, rewrite, rule_sets, split

    names = [name.strip() for name in rules.split(",") if name.strip()]
    rule_sets([name for name in names if name != SPLIT])
    if SPLIT in names[:-1] or not names:
        raise ReconstructError(f"`rules` (={rules!r}) must name a rule set, and {SPLIT} only as the last.")
    if out.resolve() == source.resolve():
        raise ReconstructError(f"`--out` (={str(out)!r}) must not be the source itself.")
    unit, console = read(source.read_text()), tables.console()
    needing = [name for name in names if name not in (SPLIT, "hip")]
    if needing and not unit.launches:
        raise ReconstructError(f"{source} has no launches; {needing[0]} needs them, each as a comment: {LAUNCH}.")
    validators = _validators(unit) if validate or trial else ()
    if trial:
        _trial(console, unit, validators)
    for name in (name for name in names if name != SPLIT):
        applied = rewrite(unit, [name], Settings(shared, wave, validators if validate else ()))
        if explain:
            _explain(console, name, unit, applied.unit, applied.matches, applied.notes)
        else:
            for note in applied.notes:
                console.print(note, markup=False, soft_wrap=True)
        unit = applied.unit
    parts = {out.with_suffix(f".{name}{out.suffix}"): part for name, part in split(unit).items()} if names[-1] == SPLIT else {out: unit}
    for path, part in parts.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(part.annotated())
        kernels, launches = counted(len(part.kernels), "kernel"), len(part.launches)
        console.print(f"{path}: {kernels}, {launches} {'launch' if launches == 1 else 'launches'}.", markup=False, soft_wrap=True)


def _validators(unit: Unit) -> tuple[Validator, ...]:
    from im2win.reconstruct.validate.validators import EmulatorValidator

    return (EmulatorValidator(unit),)


def _trial(console: Console, unit: Unit, validators: tuple[Validator, ...]) -> None:
    from im2win.reconstruct.validate import search

    story = search.trial(unit, validators)
    for tried in story:
        console.print(str(tried), markup=False, soft_wrap=True)
    unsound = sum(tried.unsound for tried in story)
    console.print(
        f"trial and error would delete {sum(tried.deleted for tried in story)} of {len(story)} barriers, {unsound} of them needed."
    )


def _explain(console: Console, name: str, before: Unit, after: Unit, matches: list[Match], notes: list[str]) -> None:
    """Prints a rule set's decisions, then what it changed."""
    from im2win.reconstruct.rulesets import RULE_SETS

    console.print(Text(f"{name}: {RULE_SETS[name].why}; {len(matches)} matches", "bold"), soft_wrap=True)
    for note in notes:
        console.print(Text(f"  {note}"), soft_wrap=True)
    lines = difflib.unified_diff(
        before.annotated().splitlines(), after.annotated().splitlines(), "before", f"after {name}", lineterm="", n=2
    )
    for line in lines:
        style = next((style for start, style in _STYLES.items() if line.startswith(start)), "")
        console.print(Text(line, style), soft_wrap=True)
