"""`im2win algorithms` and `im2win device`: the algorithms to choose from, and the facts that schedules use of this machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from im2win.cli.commands import options, tables
from im2win.common.markdown import table
from im2win.device.gpu import KNOWN, NoGpuError, device_gpu
from im2win.spec.accuracy import Accuracy
from im2win.spec.conv2d import LAYOUTS, Conv2d
from im2win.spec.dtypes import DTYPES, EXCHANGED
from im2win.spec.methods import shown

if TYPE_CHECKING:
    from im2win.device.cpu import Machine
    from im2win.device.gpu import Gpu
    from im2win.registry.schedules import Schedule

# A schedule may require a least or a largest number of channels, or depthwise layers; it supports a property if it does for one of these.
WIDTHS = (32, 128)
PLAIN = tuple(Conv2d(1, width, 16, 16, width, 3, padding=1, groups=groups) for width in WIDTHS for groups in (1, width))
PROBES: dict[str, tuple[Conv2d, ...]] = {
    "1x1": tuple(conv.with_(kernel=(1, 1), padding=(0, 0, 0, 0)) for conv in PLAIN),
    "stride": tuple(conv.with_(stride=(2, 2)) for conv in PLAIN),
    "dilation": tuple(conv.with_(dilation=(2, 2)) for conv in PLAIN),
    "asymmetric padding": tuple(conv.with_(padding=(0, 1, 2, 1)) for conv in PLAIN),
    "groups": tuple(conv.with_(groups=4) for conv in PLAIN),
    "depthwise": tuple(conv for conv in PLAIN if conv.depthwise),
    "epilogue": tuple(conv.with_(bias=True, residual=True, activation="relu") for conv in PLAIN),
}
"""The columns of the table of supported layers: for each property that an algorithm may refuse, layers that have it."""
LEAST: Accuracy = "winograd"  # the least accuracy, so that no kernel is left out
Table = tuple[list[str], list[list[str]]]
"""Columns and rows."""


def _targets(row: Schedule, convs: Sequence[Conv2d]) -> list[str]:
    """The targets on which at least one of these layers is supported."""
    from im2win.registry.backends import TARGETS

    kinds = [conv.with_(dtype=dtype, layout=layout) for conv in convs for dtype in EXCHANGED for layout in LAYOUTS]
    return [target for target in TARGETS if any(row.supports(kind, target, LEAST) is None for kind in kinds)]


def _where(row: Schedule, convs: Sequence[Conv2d]) -> str:
    """These targets as a cell: yes for all, no for none, or their names."""
    from im2win.registry.backends import TARGETS

    able = _targets(row, convs)
    return "yes" if len(able) == len(TARGETS) else ", ".join(able) or "no"


def _layouts(row: Schedule, target: str, dtype: str) -> list[str]:
    """The layouts of a target and an element type in which a plain layer is supported."""

    def computes(layout: str) -> bool:
        return any(row.supports(conv.with_(dtype=dtype, layout=layout), target, LEAST) is None for conv in PLAIN)

    return list(filter(computes, LAYOUTS))


def properties() -> Table:
    """The table of schedules: names, titles, paper, and the targets on which each property is supported.

    The registry is asked for the floating-point types and all layouts.
    """
    from im2win.registry.schedules import SCHEDULES

    cells = [
        [shown(row.key), row.algorithm.title, row.title, row.algorithm.paper, *(_where(row, convs) for convs in PROBES.values())]
        for row in SCHEDULES.values()
    ]
    return ["algorithm / schedule", "algorithm", "schedule", "source", *PROBES], cells


def types() -> Table:
    """The table of element types: for each algorithm the layouts of every target and type in which it supports a plain layer."""
    from im2win.registry.backends import TARGETS
    from im2win.registry.schedules import SCHEDULES

    pairs = [(target, dtype) for target in TARGETS for dtype in DTYPES]
    cells = [[shown(row.key), *(", ".join(_layouts(row, *pair)) or "no" for pair in pairs)] for row in SCHEDULES.values()]
    return ["algorithm / schedule", *(f"{target} {dtype}" for target, dtype in pairs)], cells


def markdown_tables() -> str:
    """Both tables as in docs/architecture.md."""
    return "\n\n".join(table(columns, rows, words=len(columns)) for columns, rows in (properties(), types()))


def _algorithm(row: Schedule) -> dict[str, Any]:
    """The JSON value of a schedule: what both tables say of it."""
    from im2win.registry.backends import TARGETS

    layouts = {target: {dtype: _layouts(row, target, dtype) for dtype in DTYPES} for target in TARGETS}
    names = {"name": row.key, "algorithm": row.algorithm.title, "schedule": row.title, "source": row.algorithm.paper}
    return {**names, "targets": {name: _targets(row, convs) for name, convs in PROBES.items()}, "layouts": layouts}


def algorithms(
    markdown: Annotated[bool, typer.Option("--markdown", help="As the tables in docs/architecture.md.")] = False,
    json: options.Json = False,
) -> None:
    """List the algorithms, their sources, the layers they compute, and on which target in which element types and layouts."""
    if json:
        from im2win.registry.schedules import SCHEDULES

        tables.print_json({"algorithms": [_algorithm(row) for row in SCHEDULES.values()]})
        return
    if markdown:
        typer.echo(markdown_tables())
        return
    console = tables.console()
    for columns, rows in (properties(), types()):
        console.print(tables.table(None, columns, rows, left=len(columns)))
        console.print()


def device(
    target: Annotated[str | None, typer.Option(help="cpu or cuda; if not said, the CPU, and the GPU where there is one.")] = None,
    json: options.Json = False,
) -> None:
    """Show what schedules know of this CPU and GPU, the names of their records' folders, and the user's own folders."""
    from im2win.device.cpu import Machine
    from im2win.registry.backends import check_target

    if target is not None:
        check_target(target)
    cpu = Machine.host() if target != "cuda" else None
    gpu, reason = None, None
    if target != "cpu":
        try:
            gpu = device_gpu()
        except NoGpuError as error:
            if target == "cuda":
                raise
            reason = str(error)
    if json:
        tables.print_json(_device(cpu, gpu, reason))
        return
    console = tables.console()
    for title, rows in (("CPU", cpu and _cpu(cpu)), ("GPU", gpu and _gpu(gpu)), ("Folders", list(_folders().items()))):
        if rows:
            console.print(tables.table(title, ("fact", "value"), rows, left=2))
    if reason:
        console.print(f"no GPU: {reason}")


def _folders() -> dict[str, str]:
    """The user's own folders: of tuning records, and of built kernels."""
    from im2win.common.files import default_folder
    from im2win.records.folders import user_folder

    return {"tuning records": str(user_folder()), "built kernels": str(default_folder())}


def _device(cpu: Machine | None, gpu: Gpu | None, reason: str | None) -> dict[str, Any]:
    """The JSON value of the devices: their fields, in the units of `device.cpu.Machine` and `device.gpu.Gpu`."""
    value: dict[str, Any] = {"folders": {name.replace(" ", "_"): folder for name, folder in _folders().items()}}
    if cpu is not None:
        value["cpu"] = {"name": cpu.name, **asdict(cpu)}
    if gpu is not None:
        value["gpu"] = {"name": gpu.name, **asdict(gpu), "capability": gpu.capability, "measured": gpu.name in KNOWN}
    return value | ({"no_gpu": reason} if reason else {})


def _cpu(machine: Machine) -> list[tuple[str, object]]:
    least, most = machine.outputs_in_flight
    return [
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


def _gpu(gpu: Gpu) -> list[tuple[str, object]]:
    how = "measured" if gpu.name in KNOWN else "estimated"
    return [
        ("name", gpu.name),
        ("brand", gpu.brand),
        ("compute capability", gpu.capability),
        ("multiprocessors", gpu.multiprocessors),
        ("registers per multiprocessor", gpu.registers),
        ("threads per multiprocessor", gpu.threads),
        ("shared memory per multiprocessor", tables.bytes_text(gpu.shared)),
        ("shared memory per block", tables.bytes_text(gpu.block_shared)),
        ("clock under load", f"{gpu.clock_hz / 1e9:.2f} GHz"),
        (f"memory bandwidth, {how}", f"{gpu.dram_bytes_s / 1e9:.0f} GB/s"),
        (f"level-2 bandwidth, {how}", f"{gpu.l2_bytes_s / 1e9:.0f} GB/s"),
    ]
