"""`im2win ablation`: the thesis' ladder of CPU schedules, every rung timed on the same layers in one run."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
import typer
from rich.markup import escape

from im2win.commands import options, tables, workload
from im2win.peers import Tensors, Trial
from im2win.problem import Conv2d

if TYPE_CHECKING:
    from im2win.results import Row
    from im2win.runtime import Op


@dataclass(frozen=True)
class RungKernel:
    """The im2win convolution with the schedule of one rung, as a contender of the benchmark."""

    name: str

    def prepare(self, conv: Conv2d, tensors: Tensors, threads: int) -> Trial:
        with tempfile.TemporaryDirectory(prefix="im2win-rung-") as folder:
            op = build_rung(conv, self.name, threads, Path(folder))
        layer = op.bind(tensors.filter, tensors.bias)
        output = np.full(conv.output_shape, np.nan, conv.dtype)
        return Trial(lambda: layer(tensors.data, tensors.residual, output), lambda: output, "im2win", False, op.extra_bytes)


def build_rung(conv: Conv2d, name: str, threads: int | None, folder: Path) -> Op:
    """Compiles a rung of `im2win.schedules.ladder.RUNGS` into `folder`, which may go once this returns."""
    import tvm

    from im2win import __version__
    from im2win.codegen import SYMBOL, any_alignment, compile_library
    from im2win.compute import im2win
    from im2win.machine import Machine
    from im2win.runtime import Manifest, Op
    from im2win.schedules import ladder
    from im2win.schedules.tails import mark_tails

    machine, rung = Machine.host(threads), ladder.RUNGS[name]
    pack = ladder.pack(conv, rung, machine)
    scheduled = ladder.schedule(conv, im2win.define(conv, pack), rung, machine)
    module = tvm.IRModule({SYMBOL: scheduled.mod["main"].with_attr("global_symbol", SYMBOL)})
    compile_library(any_alignment(mark_tails(module), conv.itemsize), machine, folder / f"{name}.so")
    manifest = Manifest(
        conv=conv, algorithm="im2win", tile={}, pack=pack, target="cpu", machine=machine.name, isa=machine.isa, threads=machine.threads,
        tuned=False, extra_bytes=im2win.transform_bytes(conv), tvm=tvm.__version__, im2win=__version__,
    )  # fmt: skip
    return Op(manifest, folder / f"{name}.so")


def ablation(
    what: options.What,
    batch: options.Batch = None,
    layers: options.Layers = None,
    threads: options.Threads = None,
    rounds: Annotated[int, typer.Option(help="Interleaved rounds.")] = 15,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the result here.")] = None,
) -> None:
    """Time the thesis' ladder of schedules, from seven plain loops to the production schedule, rung by rung."""
    chosen, skipped = workload.read(what, batch, layers)
    console = tables.console()
    for line in skipped:
        console.print(f"skipped: {escape(line)}", soft_wrap=True)
    from im2win import bench
    from im2win.schedules.ladder import RUNGS

    def report(done: int, total: int, row: Row) -> None:
        console.print(tables.table(f"{done}/{total} {escape(row.layer)}  {row.conv}", COLUMNS, _rows(row), left=3))
        console.print()

    last, *before = reversed(RUNGS)  # the benchmark calls its first contender ours: the production schedule
    contenders = [RungKernel(last), *(RungKernel(name) for name in before)]
    suite = f"ablation-{Path(what).stem if what.endswith('.onnx') else what}"
    result = bench.run(chosen, against=(), threads=threads, rounds=rounds, suite=suite, progress=report, contenders=contenders)
    console.print(f"{result.brand}, {result.threads} threads; gains are over the rung before and over the first")
    if json is not None:
        console.print(f"Written to {result.save(json)}.")


COLUMNS = ("rung", "what", "source", "ms", "GFLOPS", "gain", "in all")


def _rows(row: Row) -> list[list[str]]:
    """A line a rung, in the ladder's order; a rung that failed has its reason in place of numbers."""
    from im2win.schedules.ladder import RUNGS

    failed = {**row.peers_failed, **({next(reversed(RUNGS)): row.failed} if row.failed else {})}
    medians = {name: spread.median for name, spread in row.spread.items()}
    lines, first, previous = [], None, None
    for name, rung in RUNGS.items():
        if name not in medians:
            lines.append([name, rung.title, escape(failed.get(name, "not timed"))])
            continue
        now = medians[name]
        first, previous = first or now, previous or now
        speed = tables.gflops(Conv2d.parse(row.conv).flops, now / 1e3)
        lines.append([name, rung.title, rung.source, f"{now:.3f}", speed, f"{previous / now:.2f}x", f"{first / now:.1f}x"])
        previous = now
    return lines
