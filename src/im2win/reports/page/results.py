"""The part of an HTML page on result files of times: cards of layers, tables and rooflines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import get_args

from im2win.bench.results import OURS, UNTUNED, Result, Row, Spread, roofline_fraction, summarise
from im2win.common.markdown import Table, ms, number
from im2win.common.quantities import bytes_text, counted
from im2win.numerics.tolerance import tolerance
from im2win.reports import ladder, roofline, tables
from im2win.reports.page import svg
from im2win.reports.page.bars import Bar, Card, share, speed, verdict
from im2win.reports.page.im2col import beside_im2col
from im2win.reports.subjects import TITLES, gathered, subjects
from im2win.spec.accuracy import Accuracy
from im2win.spec.conv2d import Conv2d
from im2win.spec.methods import shown
from im2win.studies.entries import LADDER


@dataclass(frozen=True)
class ResultPart:
    """One result file on the page.

    Attributes:
        anchor: the id of its heading.
        facts: (name, value) of the numbers shown first.
        figures: SVG elements, whose texts are escaped, each with its caption.
        tables: (caption, table), behind a line that opens them.
        remarks: sentences that may hold `code`.
        failures: (subject, reason, layers).
    """

    anchor: str
    title: str
    name: str
    facts: Sequence[tuple[str, str]]
    cards: Sequence[Card]
    figures: Sequence[tuple[str, str]]
    tables: Sequence[tuple[str, Table]]
    remarks: Sequence[str]
    failures: Sequence[tuple[str, str, str]]


def part(name: str, result: Result, anchor: str) -> ResultPart:
    """The part of a result of layers or of a ladder."""
    batch = "" if result.batch is None else f", batch {result.batch}"
    suite = f"Ladder: {result.suite.removeprefix(LADDER)}" if tables.is_ladder(result) else result.suite
    title = f"{suite}, {result.dtype}{batch}"
    whole = gathered(result)
    failures = _failures(whole)
    if tables.is_ladder(result):
        return _ladder(name, result, anchor, title, failures)
    figures = []
    if roofline.points(result):
        drawn = svg.inline(lambda: roofline.draw(_drawable(result)), f"{anchor}-roofline", f"Roofline: {title}", _described(result))
        figures.append((drawn, "Roofline: speed over arithmetic intensity, under the ceilings measured in the same run."))
    return ResultPart(
        anchor, title, name, _facts(result), [_card(whole, row) for row in whole.layers], figures,
        [("All times", tables.layer_rows(result)), ("Numerical errors and memory", _errors(result))], [tables.caption(whole)], failures,
    )  # fmt: skip


def _ladder(name: str, result: Result, anchor: str, title: str, failures: Sequence[tuple[str, str, str]]) -> ResultPart:
    figures = []
    if any(ladder.rates(row) for row in result.layers):
        description = "Speed in GFLOPS over the rungs of the ladder, a line for each layer and one for their mean; the tables hold numbers."
        drawn = svg.inline(lambda: ladder.draw(_drawable(result)), f"{anchor}-ladder", title, description)
        figures.append((drawn, "The ladder: each rung adds one technique to the rung before."))
    gained = list(zip(("Gains from rung to rung", "Without one technique"), ladder.tables(result), strict=False))
    facts = [("layers", str(len(result.layers))), ("rungs", str(len(ladder.order(result))))]
    return ResultPart(anchor, title, name, facts, [], figures, gained, ladder.remarks(result), failures)


def _failures(result: Result) -> list[tuple[str, str, str]]:
    """Subject, reason and names of the layers."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in result.layers:
        reasons = {**({"im2win": row.failed} if row.failed else {}), **row.peers_failed}
        for name, reason in reasons.items():
            found.setdefault((TITLES.get(name, name), reason), []).append(row.layer)
    return [(subject, reason, ", ".join(layers)) for (subject, reason), layers in found.items()]


def _drawable(result: Result) -> Result:
    """The result with names that a figure can show."""
    rows = [
        replace(row, layer=svg.label(row.layer), spread={svg.label(name): one for name, one in row.spread.items()}) for row in result.layers
    ]
    suite, dtype, brand = map(svg.label, (result.suite, result.dtype, result.brand))
    return replace(result, layers=rows, suite=suite, dtype=dtype, brand=brand)


def _described(result: Result) -> str:
    """The roofline in words."""
    found = [
        f"{one.layer}: {one.intensity:.3g} operations a byte"
        + (f", im2win {one.ours:.0f} GFLOPS" if one.ours else "")
        + (f", best peer {one.peer:.0f} GFLOPS" if one.peer else "")
        for one in roofline.points(result)
    ]
    return "; ".join(found)


def _facts(result: Result) -> list[tuple[str, str]]:
    facts = summarise(result)
    compared = [row.ratio for row in result.layers if row.ratio is not None]
    found = [("layers", str(facts["layers"]))]
    if compared:
        found += [
            ("times as fast as the best peer, mean", number(facts["geomean_ratio"], 2)),
            (f"least, on {facts['min_layer']}", number(facts["min_ratio"], 2)),
            ("faster than every peer", f"{sum(ratio > 1 for ratio in compared)} of {len(compared)}"),
            ("all layers together", number(facts["total_ratio"], 2)),
        ]
    if facts["untuned_geomean_ratio"] is not None:
        found.append(("untuned, mean", number(facts["untuned_geomean_ratio"], 2)))
    failed = sum(row.failed is not None for row in result.layers)
    return [*found, ("failed", counted(failed, "layer"))] if failed else found


def _card(result: Result, row: Row) -> Card:
    conv = Conv2d.parse(row.conv)
    times: list[tuple[str, str, float | None]] = [(OURS, "im2win", row.ours_ms)]
    if row.untuned_ms is not None:
        times.append((UNTUNED, "default tile", row.untuned_ms))
    peers = [name for name in subjects(result) if name in row.peers or name in row.peers_failed]
    times += [(name, TITLES.get(name, name), row.peers.get(name)) for name in peers]
    most = max((1 / time for _, _, time in times if time), default=0.0)
    bars = [
        Bar(
            label, f"{ms(time)} ms" if time else "failed", share(1 / time if time else None, most),
            name if name in (OURS, UNTUNED) else "peer", _note(conv, time, row.spread.get(name)),
        )
        for name, label, time in times
    ]  # fmt: skip
    badge = "" if row.ratio is None else f"{row.ratio:.2f}x"
    lines = _lines(result, row, conv, tolerance(conv, _accuracy(result)))
    return Card(row.layer, row.conv if row.conv != row.layer else "", "times of a call", bars, badge, verdict(row.ratio), lines)


def _note(conv: Conv2d, time: float | None, spread: Spread | None) -> str:
    if not time:
        return ""
    between = f"; {counted(spread.samples, 'sample')}, 80 % of them from {ms(spread.p10)} to {ms(spread.p90)} ms" if spread else ""
    return f"{speed(conv.flops / time / 1e6)}{between}"


def _lines(result: Result, row: Row, conv: Conv2d, allowed: float) -> list[str]:
    if row.failed is not None or row.ours_ms is None:
        return [f"im2win failed: {row.failed or 'not timed'}"]
    fraction = roofline_fraction(row, result.accuracy, result.ceilings)
    tile = "tuned" if row.tuned else f"untuned ({row.tier})" if row.tier not in ("", "default") else "untuned"
    of_roof = f", {100 * fraction:.0f} % of the roofline" if fraction is not None else ""
    lines = [f"{shown(row.algorithm)}, {tile}: {speed(conv.flops / row.ours_ms / 1e6)}{of_roof}."]
    if row.extra_bytes is not None:
        lines.append(f"Workspace {bytes_text(row.extra_bytes)}{beside_im2col(conv, 'cuda' if 'cuda' in result.versions else 'cpu')}.")
    if row.error is not None:
        lines.append(f"Error {row.error:.1e}, at most {allowed:.1e} is allowed.")
    return lines


def _accuracy(result: Result) -> Accuracy:
    """The accuracy that the suite's name states."""
    return next((name for name in get_args(Accuracy) if name in result.accuracy), "float32")


def _errors(result: Result) -> Table:
    """Error, its tolerance and memory of im2win's kernel on every layer."""
    columns = ["layer", "algorithm", "largest error", "allowed", "workspace", "peak memory"]
    rows = []
    for row in result.layers:
        error = "–" if row.error is None else f"{row.error:.1e}"  # noqa: RUF001
        peak = row.peak_failed or bytes_text(row.peak_bytes)
        allowed = f"{tolerance(Conv2d.parse(row.conv), _accuracy(result)):.1e}"
        rows.append([row.layer, shown(row.algorithm), error, allowed, bytes_text(row.extra_bytes), peak])
    return Table(columns, rows, words=2)
