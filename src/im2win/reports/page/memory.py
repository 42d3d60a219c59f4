"""The part of an HTML page on results of memory: cards of layers beside im2col, and tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from im2win.bench.memory_result import LayerMemory, MemoryResult
from im2win.common.markdown import Table
from im2win.common.quantities import bytes_text
from im2win.reports import memory
from im2win.reports.page.bars import Bar, Card, share
from im2win.reports.page.im2col import METHOD
from im2win.spec.methods import shown


@dataclass(frozen=True)
class MemoryPart:
    """One result of memory on the page; fields as in `results.ResultPart`."""

    anchor: str
    title: str
    name: str
    cards: Sequence[Card]
    tables: Sequence[tuple[str, Table]]
    remarks: Sequence[str]


def part(name: str, result: MemoryResult, anchor: str) -> MemoryPart:
    """The part of a result of memory."""
    batch = "" if result.batch is None else f", batch {result.batch}"
    captions = ("im2win's algorithms, MiB", "Peers, MiB")
    numbers = list(zip(captions, memory.layer_tables(result), strict=True))
    title = f"Memory: {result.suite}, {result.dtype}{batch}"
    return MemoryPart(anchor, title, name, [_card(row) for row in result.layers], numbers, [memory.caption(result)])


def _card(row: LayerMemory) -> Card:
    """Bytes beside input, filters and output, the measured ones where there are any, and how much that is of im2col's."""
    found = {name: row.measured_bytes.get(name, count) for name, count in row.formula_bytes.items()}
    im2col = found.get(METHOD)
    peers = {memory.TITLES.get(name, name): count for name, count in row.torch_bytes.items()}
    if row.cudnn_choice in row.cudnn_bytes:
        peers[f"cuDNN's choice, {row.cudnn_choice}"] = row.cudnn_bytes[row.cudnn_choice]
    most = max([*found.values(), *peers.values()], default=0)
    bars = [
        Bar(shown(name), _value(count, im2col), share(count, most), "im2col" if name == METHOD else "ours")
        for name, count in sorted(found.items(), key=lambda pair: pair[1])
    ]
    bars += [Bar(name, _value(count, im2col), share(count, most)) for name, count in peers.items()]
    lines = [f"Input, filters and output: {bytes_text(row.tensor_bytes)}."]
    key = row.conv if row.conv != row.layer else ""
    return Card(row.layer, key, "memory beside input, filters and output", bars, lines=lines, wide=True)


def _value(count: int, im2col: int | None) -> str:
    if not im2col or not count or count == im2col:
        return bytes_text(count)
    percent = 100 * count / im2col
    return f"{bytes_text(count)} ({percent:.0f} %)" if percent >= 0.5 else f"{bytes_text(count)} (< 1 %)"
