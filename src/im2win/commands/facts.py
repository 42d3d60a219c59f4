"""`im2win algorithms` and `im2win device`: what can be chosen, and what schedules know of this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from im2win.commands import tables
from im2win.problem import Conv2d

# One layer for each property that an algorithm may refuse; the columns of the table of supported layers.
PLAIN = Conv2d(1, 32, 16, 16, 32, 3, padding=1)
PROBES = {
    "1x1": PLAIN.with_(kernel=(1, 1), padding=(0, 0, 0, 0)),
    "stride": PLAIN.with_(stride=(2, 2)),
    "dilation": PLAIN.with_(dilation=(2, 2)),
    "asymmetric padding": PLAIN.with_(padding=(0, 1, 2, 1)),
    "groups": PLAIN.with_(groups=4),
    "depthwise": PLAIN.with_(groups=32),
    "NHWC": PLAIN.with_(layout="NHWC"),
    "epilogue": PLAIN.with_(bias=True, residual=True, activation="relu"),
    "float16": PLAIN.with_(dtype="float16"),
}


def matrix() -> tuple[list[str], list[list[str]]]:
    """Columns and rows of the table of algorithms: name, title, paper, and yes or no for each probe, asked of the registry."""
    from im2win.algorithms import ALGORITHMS

    rows = [[row.name, row.title, row.paper] for row in ALGORITHMS.values()]
    for cells, row in zip(rows, ALGORITHMS.values(), strict=True):
        cells += ["no" if row.supports(conv) else "yes" for conv in PROBES.values()]
    return ["algorithm", "title", "source", *PROBES], rows


def markdown_matrix() -> str:
    """The table of algorithms as it stands in README.md."""
    columns, rows = matrix()
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def algorithms(markdown: Annotated[bool, typer.Option("--markdown", help="As the table in README.md.")] = False) -> None:
    """The algorithms, their sources and the layers they compute."""
    if markdown:
        typer.echo(markdown_matrix())
        return
    columns, rows = matrix()
    tables.console().print(tables.table(None, columns, rows, left=len(columns)))


def device() -> None:
    """What schedules know of this CPU, and the name that its records are kept under."""
    from im2win.machine import Machine

    machine = Machine.host()
    least, most = machine.outputs_in_flight
    rows = [
        ("name", machine.name),
        ("brand", machine.brand),
        ("microarchitecture", machine.mcpu),
        ("threads", machine.threads),
        ("float32 per vector", machine.lanes),
        ("vector registers", machine.registers),
        ("level-1 cache", tables.bytes_text(machine.l1_bytes)),
        ("level-2 cache", tables.bytes_text(machine.l2_bytes)),
        ("level-3 cache", tables.bytes_text(machine.l3_bytes)),
        ("outputs in flight", f"{least} to {most}"),
    ]
    tables.console().print(tables.table(None, ("fact", "value"), rows, left=2))
