"""`im2win layers`: the operations and bytes of every layer, and the extra memory of each algorithm."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from im2win.cli.commands import options, outputs, tables, workload
from im2win.common.quantities import counted
from im2win.reports.memory import mebibytes, ours
from im2win.spec import methods

if TYPE_CHECKING:
    from rich.console import Console

    from im2win.bench.memory_result import LayerMemory
    from im2win.spec.suites import Layer

MEMORY = "Also what a built kernel allocates (each algorithm's default tile); on a GPU what a call holds, and what its peers do."

def layers(
    what: options.What,
    batch: options.Batch = None,
    only: Annotated[str | None, typer.Option("--layers", metavar="A,B", help="Only these layers, by name.")] = None,
    memory: Annotated[bool, typer.Option("--memory", help=MEMORY)] = False,
    target: options.Target = "cpu",
    dtype: options.Dtype = None,
    out_dtype: options.OutDtype = None,
    layout: options.Layout = None,
    json: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write what was measured on a GPU here (memory-NAME.json).", callback=outputs.file),
    ] = None,
) -> None:
    """List the layers: how often each occurs, operations, bytes, and the extra memory of every algorithm."""
    from im2win.registry.backends import check_target

    check_target(target)
    if json is not None and not (memory and target == "cuda"):
        raise typer.BadParameter("`--json` is for what `--memory --target cuda` measures.")
    if json is not None:
        from im2win.bench.memory_result import check_path

        check_path(json)
    chosen, skipped = workload.read(what, batch, only, dtype, layout, out_dtype=out_dtype)
    from im2win.registry.schedules import SCHEDULES
    from im2win.reports.summary import summary_rows

    rows = summary_rows(chosen, target)
    console = tables.console()
    console.print(tables.table(None, ("layer", "problem", "count", "GFLOP", "bytes", "flop/byte"), map(_cost, rows), left=2))
    total = sum(row["count"] * row["flops"] for row in rows)
    console.print(f"{counted(len(rows), 'layer')}, {counted(sum(row['count'] for row in rows), 'convolution')}, {total / 1e9:.2f} GFLOP\n")
    storage = [[row["name"], *(_storage(row["algorithms"][name]) for name in SCHEDULES)] for row in rows]
    console.print(tables.table("Transformed tensor by formula", ("layer", *map(methods.shown, SCHEDULES)), storage))
    if memory and target == "cuda":
        console.print()
        _on_gpu(chosen, Path(what).stem if what.endswith((".onnx", ".jsonl")) else what, json, console)
    elif memory:
        console.print()
        allocated = [[layer.name, *(_allocated(layer.conv, name) for name in SCHEDULES)] for layer in chosen]
        columns = ("layer", *map(methods.shown, SCHEDULES))
        console.print(tables.table("Allocated by the kernel beside input, filter and output", columns, allocated))
    for line in skipped:
        console.print(f"skipped: {escape(line)}", soft_wrap=True)


def _on_gpu(layers: list[Layer], suite: str, json: Path | None, console: Console) -> None:
    """Measures and prints the memory of calls, im2win's and the peers'."""
    from im2win.bench import cuda_memory

    def report(done: int, total: int, row: LayerMemory) -> None:
        choice = row.cudnn_choice or "none"
        held = [*(f"{name} {ours(row, name)}" for name in row.formula_bytes), f"cuDNN's choice {choice}"]
        held += [f"{name} {mebibytes(count)}" for name, count in (row.torch_bytes | row.cudnn_bytes).items()]
        console.print(f"{done:>{len(str(total))}}/{total} {escape(row.layer)}: MiB {escape(', '.join(held))}", soft_wrap=True)
        for name, reason in row.failed.items():
            console.print(f"  {name}: {escape(reason)}", soft_wrap=True)

    result = cuda_memory.measure(layers, suite=suite, progress=report)
    if json is not None:
        console.print(f"Written to {result.save(json)}.")


def _cost(row: dict[str, Any]) -> list[str]:
    moved = tables.bytes_text(row["bytes_moved"])
    return [escape(row["name"]), row["key"], str(row["count"]), f"{row['flops'] / 1e9:.3f}", moved, f"{row['flops_per_byte']:.1f}"]


def _storage(value: int | str) -> str:
    return tables.bytes_text(value) if isinstance(value, int) else "unsupported"


def _allocated(conv: Any, name: str) -> str:
    """Bytes that the compiled kernel of an algorithm's default tile allocates, which depend on tile and threads."""

    from im2win.registry.schedules import schedule_of

    if schedule_of(name).supports(conv):
        return "unsupported"
    from im2win.codegen.llvm import compile_module
    from im2win.device.cpu import Machine
    from im2win.registry.cpu_lowering import lower
    from im2win.registry.ranking import default_tile

    machine = Machine.host()
    chosen, tile = default_tile(conv, name, machine)
    row = schedule_of(chosen)
    allocated = compile_module(lower(conv, row, tile, machine), machine).allocated
    return tables.bytes_text(allocated + row.scheduler.held_bytes(conv, tile))
