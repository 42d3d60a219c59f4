"""Roofline plots: speed over arithmetic intensity, from a result with measured ceilings.

Arithmetic intensity is the operations of direct convolution over its compulsory bytes: input, filters and output, each moved once.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from im2win.bench.results import Result, arithmetic_roofs
from im2win.spec.conv2d import Conv2d

OURS, PEER = "#0072B2", "#E69F00"
_GREY = "#444444"
_ANGLES = [math.radians(degrees) for degrees in (0, 180, 90, 270, 45, 135, 315, 225)]
_RADII = (9, 15, 22, 30, 40)  # points from a marker to its label
_NAMED = 14  # most layers that are named beside their points; more get numbers
_MARKER = 4.0  # points from a marker's centre to its edge


@dataclass(frozen=True)
class Point:
    """One layer: operations per byte, and GFLOPS of im2win and of the best peer; None where there is no time."""

    layer: str
    intensity: float
    ours: float | None
    peer: float | None


def points(result: Result) -> list[Point]:
    """The layers with a time, of im2win or of a peer."""
    found = []
    for row in result.layers:
        conv = Conv2d.parse(row.conv)
        ours = conv.flops / row.ours_ms / 1e6 if row.ours_ms else None
        peer = conv.flops / row.peers[row.best_peer] / 1e6 if row.best_peer else None
        if ours or peer:
            found.append(Point(row.layer, conv.flops / conv.bytes_moved, ours, peer))
    return found


def roofs(result: Result) -> dict[str, float]:
    """Arithmetic peaks for the result's type and accuracy, GFLOPS, by name."""
    return arithmetic_roofs(result.dtype, result.accuracy, result.ceilings)


def labels(shown: Sequence[Point]) -> list[str]:
    """The label of each point: its layer's name, or, if there are too many for names, a number that a key explains."""
    return [point.layer for point in shown] if len(shown) <= _NAMED else [str(number) for number in range(1, len(shown) + 1)]


def plot(result: Result, path: Path) -> Path:
    """Draws the roofline as a PNG and returns its path. Needs matplotlib (the `bench` extra)."""
    figure = draw(result)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Software": None})
    return path


def draw(result: Result) -> Any:
    """The figure: for each layer a marker for im2win and one for its best peer, joined by a line; roofs; and labels."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown, peaks, bandwidth = points(result), roofs(result), result.ceilings["copy_gbs"]
    figure = Figure(figsize=(8.6, 5.4), dpi=144, layout="constrained")
    canvas: Any = FigureCanvasAgg(figure)
    axes: Any = figure.subplots()
    _axes(axes, shown, peaks, bandwidth)
    marks = [(point.intensity, speed) for point in shown for speed in (point.ours, point.peer) if speed]
    lines = [((point.intensity, point.ours), (point.intensity, point.peer)) for point in shown if point.ours and point.peer]
    for line in lines:
        axes.plot(*zip(*line, strict=True), color="#bbbbbb", linewidth=0.9, zorder=2)
    for label, color, shape in (("im2win", OURS, "o"), ("best peer of the layer", PEER, "D")):
        pairs = [(point.intensity, point.ours if color == OURS else point.peer) for point in shown]
        pairs = [(x, y) for x, y in pairs if y]
        axes.plot(*zip(*pairs, strict=True), shape, color=color, markersize=6 if shape == "o" else 5, label=label, zorder=3)
    batch = "" if result.batch is None else f", batch {result.batch}"
    axes.set_title(f"{result.suite}, {result.dtype}{batch} – {result.brand}", fontsize=10, loc="left")  # noqa: RUF001
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=8.5)
    names = labels(shown)
    if len(shown) > _NAMED:
        _key(figure, [f"{name}  {point.layer}" for name, point in zip(names, shown, strict=True)])
    figure.draw_without_rendering()  # the axes get their position
    taken = [_around(axes, mark, mark, _MARKER) for mark in marks] + [_around(axes, *line, 0.5) for line in lines]
    taken += _roof_labels(axes, peaks, bandwidth, canvas, taken)
    for name, point in sorted(zip(names, shown, strict=True), key=lambda pair: pair[1].intensity):
        taken.append(_label(axes, canvas, name, point, taken))
    return figure


def _key(figure: Any, lines: Sequence[str]) -> None:
    """Lines of text beside the axes."""
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], linestyle="none") for _ in lines]
    look = {"frameon": False, "fontsize": 7.5, "handlelength": 0, "handletextpad": 0, "labelspacing": 0.35}
    figure.legend(handles, lines, loc="outside right upper", **look)


def _axes(axes: Any, shown: Sequence[Point], peaks: dict[str, float], bandwidth: float) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    speeds = [speed for point in shown for speed in (point.ours, point.peer) if speed]
    highest, lowest = max([*peaks.values(), *speeds]), min([*speeds, *peaks.values()])
    top, bottom = highest * max(1.45, (highest / lowest) ** 0.09), lowest / 2.2  # leaves room for the roof's name above it
    left = min([bottom / bandwidth * 1.3, *(point.intensity / 1.5 for point in shown)])
    right = 1.9 * max([*(point.intensity for point in shown), max(peaks.values()) / bandwidth])
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(left, right)
    axes.set_ylim(bottom, top)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}" if value < 1000 else f"{value:.0f}"))
        axis.set_minor_formatter(NullFormatter())
    highest = max(peaks.values())
    axes.plot([left, highest / bandwidth], [left * bandwidth, highest], color=_GREY, linewidth=1.2, zorder=1)
    for peak in peaks.values():
        solid = peak == highest
        axes.plot([peak / bandwidth, right], [peak, peak], color=_GREY, linewidth=1.2, linestyle="-" if solid else "--", zorder=1)
    axes.set_xlabel("arithmetic intensity: operations per compulsory byte (input, filters, output once)")
    axes.set_ylabel("GFLOPS (higher is better)")
    axes.set_axisbelow(True)
    axes.grid(color="#e4e4e4", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def _roof_labels(axes: Any, peaks: dict[str, float], bandwidth: float, canvas: Any, taken: Sequence[Any]) -> list[Any]:
    """Writes names and numbers of the roofs, each beside its line where it covers least. Returns their boxes."""
    left, highest, found = axes.get_xlim()[0], max(peaks.values()), list[Any]()

    def write(text: str, places: Sequence[tuple[float, float, str, str]]) -> None:
        options = list[Any]()
        for x, y, across, up in places:
            shift = {"left": 5, "right": -3}[across], {"bottom": 3, "top": -3}[up]
            label = axes.annotate(text, (x, y), xytext=shift, textcoords="offset points", ha=across, va=up, fontsize=8, color=_GREY)
            box = label.get_window_extent(canvas.get_renderer())
            outside = box.width * box.height - _area(box, axes.bbox)
            options.append((sum(_area(box, other) for other in (*taken, *found)) + 100 * outside, len(options), label, box))
        best = min(options, key=lambda option: option[:2])
        for option in options:
            if option is not best:
                option[2].remove()
        found.append(best[3])

    for name, peak in peaks.items():
        ridge, right = peak / bandwidth, axes.get_xlim()[1]
        corner = "bottom" if peak == highest else "top"  # the bandwidth's line continues above a lower roof
        places = [(ridge, peak, "left", corner), (right, peak, "right", "bottom"), (right, peak, "right", "top")]
        write(f"{name}: {peak:.0f} GFLOPS", places)
    write(f"copy bandwidth: {bandwidth:.0f} GB/s", [(x, x * bandwidth, "left", "top") for x in (1.25 * left, 1.7 * left, 2.4 * left)])
    return found


def _around(axes: Any, one: tuple[float, float], other: tuple[float, float], margin: float) -> Any:
    """The box around two positions, `margin` points wider, in pixels."""
    from matplotlib.transforms import Bbox

    corners, margin = axes.transData.transform((one, other)), margin * axes.figure.dpi / 72
    return Bbox([corners.min(axis=0) - margin, corners.max(axis=0) + margin])


def _label(axes: Any, canvas: Any, name: str, point: Point, taken: Sequence[Any]) -> Any:
    """Writes a layer's name or number near its marker, at the nearest position that covers nothing. Returns its box."""
    from matplotlib.transforms import Bbox

    at = point.intensity, point.ours or point.peer
    frame = axes.bbox
    text = axes.annotate(name, at, xytext=(0, 0), textcoords="offset points", ha="center", va="center", fontsize=7.5, zorder=4)
    size, scale = text.get_window_extent(canvas.get_renderer()), axes.figure.dpi / 72
    column, row = axes.transData.transform(at)
    places = []
    for radius, angle in itertools.product(_RADII, _ANGLES):
        # the label's edge, not its centre, is `radius` away
        across = math.cos(angle) * (radius + size.width / scale / 2)
        up = math.sin(angle) * (radius + size.height / scale / 2)
        box = Bbox.from_bounds(column + across * scale - size.width / 2, row + up * scale - size.height / 2, size.width, size.height)
        box = box.expanded(1.04, 1.1)
        covered = sum(_area(box, other) for other in taken) + box.width * box.height - _area(box, frame)
        places.append((covered, radius, (across, up), box))
    _, radius, shift, box = min(places, key=lambda place: place[:2])
    text.remove()
    line = {"arrowstyle": "-", "color": "#999999", "linewidth": 0.6, "shrinkA": 1, "shrinkB": 3} if radius > _RADII[1] else None
    axes.annotate(name, at, xytext=shift, textcoords="offset points", ha="center", va="center", fontsize=7.5, zorder=4,
                  arrowprops=line)  # fmt: skip
    return box


def _area(one: Any, other: Any) -> float:
    """The overlap of two boxes, in square pixels."""
    width = min(one.x1, other.x1) - max(one.x0, other.x0)
    height = min(one.y1, other.y1) - max(one.y0, other.y0)
    return float(max(width, 0) * max(height, 0))
