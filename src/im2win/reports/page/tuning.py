"""The part of an HTML page on tuning records: a card, the course of the search, and failures for each layer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from im2win.common.markdown import Table
from im2win.common.quantities import bytes_text, counted, gflops
from im2win.records.record import Record
from im2win.reports.page import charts, svg
from im2win.reports.page.bars import Bar, Card, share, speed
from im2win.reports.page.im2col import METHOD, im2col_bytes
from im2win.reports.page.tuned import Failure, TunedLayer
from im2win.spec.methods import shown

OUTCOMES = {
    "wrong": "wrong result", "build_error": "could not be built", "crashed": "crashed", "timeout": "took too long", "illegal": "illegal",
}  # fmt: skip
MOST_FAILURES = 12  # rows of a layer's table of failures


@dataclass(frozen=True)
class TunedPart:
    """One tuned layer on the page.

    Attributes:
        summary: what the line says that opens the layer.
        figure: the SVG element of the search, whose texts are escaped; "" where nothing was timed or it was not asked for.
        failures: (outcome, candidates, algorithm, message), the most frequent first; more_failures: how many kinds are not among them.
    """

    anchor: str
    title: str
    summary: str
    card: Card
    table: Table
    figure: str
    failures: Sequence[tuple[str, int, str, str]]
    more_failures: int


def overview(parts: Sequence[TunedPart], layers: Sequence[TunedLayer]) -> Table:
    """One row for each layer, in the order of `parts`."""
    columns = ["layer", "best algorithm", "µs", "GFLOPS", "over the default tile", "candidates", "failed"]
    return Table(columns, [_overview(part, layer) for part, layer in zip(parts, layers, strict=True)], words=2)


def _overview(part: TunedPart, layer: TunedLayer) -> list[str]:
    best = layer.best[0] if layer.best else None
    seconds = best.seconds if best is not None else None
    gain = f"{layer.default_s / seconds:.2f}x" if layer.default_s is not None and seconds else "–"  # noqa: RUF001
    method = shown(best.method) if best is not None else "none"
    return [part.title, method, microseconds(seconds), gflops(layer.conv.flops, seconds), gain, str(len(layer.trials)), str(layer.failed)]


def microseconds(seconds: float | None) -> str:
    """Microseconds with about four significant digits."""
    if seconds is None:
        return "–"  # noqa: RUF001
    value = 1e6 * seconds
    return f"{value:.2f}" if value < 100 else f"{value:.1f}" if value < 1000 else f"{value:.0f}"


def part(layer: TunedLayer, anchor: str, *, draw: bool) -> TunedPart:
    """The part of a layer; `draw`: whether its search is drawn."""
    figure = ""
    if draw and charts.drawable(layer):
        described = f"Time of the best candidate so far and of each candidate over {counted(len(layer.trials), 'trial')}."
        figure = svg.inline(lambda: charts.search(layer), f"{anchor}-search", f"Search: {layer.conv}", described)
    failures = [(OUTCOMES.get(one.outcome, one.outcome), one.count, shown(one.method), one.message) for one in layer.failures]
    return TunedPart(
        anchor, str(layer.conv), _summary(layer), _card(layer), _table(layer), figure, failures[:MOST_FAILURES],
        max(0, len(failures) - MOST_FAILURES),
    )  # fmt: skip


def _summary(layer: TunedLayer) -> str:
    if not layer.best:
        return f"nothing was timed; {counted(layer.failed, 'candidate')} failed"
    best = layer.best[0]
    return f"{shown(best.method)}, {microseconds(best.seconds)} µs, {speed(best.gflops or 0.0)}"


def _card(layer: TunedLayer) -> Card:
    speeds = {record.method: record.gflops or 0.0 for record in layer.best}
    most = max(speeds.values(), default=0.0)
    bars = [
        Bar(shown(record.method), speed(speeds[record.method]), share(speeds[record.method], most), _kind(place, record),
            f"{microseconds(record.seconds)} µs, tile {_tile(record)}")
        for place, record in enumerate(layer.best)
    ]  # fmt: skip
    failed = [Bar(shown(method), "failed", None) for method in layer.candidates if method not in speeds]
    matrix = im2col_bytes(layer.conv, layer.target)
    lines = [] if matrix is None else [f"The im2col matrix takes {bytes_text(matrix)}."]
    kinds = Counter[str]()
    for one in layer.failures:
        kinds[one.outcome] += one.count
    if kinds:
        counts = ", ".join(f"{count} {OUTCOMES.get(kind, kind)}" for kind, count in kinds.most_common())
        lines.append(f"{counted(layer.failed, 'candidate')} of {len(layer.trials)} failed: {counts}.")
    return Card("Best of each algorithm and schedule", "", "speed", [*bars, *failed], lines=lines)


def _kind(place: int, record: Record) -> str:
    return "ours" if place == 0 else "im2col" if record.method == METHOD else "untuned"


def _tile(record: Record) -> str:
    return ", ".join(f"{name} {value}" for name, value in record.tile.items()) or "without values"


def _table(layer: TunedLayer) -> Table:
    columns = ["algorithm", "µs", "GFLOPS", "candidates", "workspace", "error", "allowed", "tile"]
    rows = []
    for one in layer.best:
        error, allowed = ("–" if value is None else f"{value:.1e}" for value in (one.error, one.tolerance))  # noqa: RUF001
        rate = gflops(layer.conv.flops, one.seconds)
        head = [shown(one.method), microseconds(one.seconds), rate, str(layer.candidates[one.method])]
        rows.append([*head, bytes_text(one.extra_bytes), error, allowed, _tile(one)])
    return Table(columns, rows)


def failures_by_kind(layers: Sequence[TunedLayer]) -> list[tuple[str, int]]:
    """(outcome, candidates) of all layers, the most frequent first."""
    counts = Counter[str]()
    for one in (failure for layer in layers for failure in layer.failures):
        counts[_words(one)] += one.count
    return counts.most_common()


def _words(one: Failure) -> str:
    return OUTCOMES.get(one.outcome, one.outcome)
