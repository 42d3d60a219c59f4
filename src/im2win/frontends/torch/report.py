"""The report of `optimize`: what it did with a module, layer by layer."""

from __future__ import annotations

import io
import json
import math
import os
import shlex
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from im2win.common.quantities import counted
from im2win.frontends.torch.guard import Times
from im2win.spec.captured_layers import append_layers
from im2win.spec.conv2d import Conv2d
from im2win.spec.methods import shown

SCHEMA = 1


@dataclass(frozen=True)
class LayerReport:
    """One convolution of a module, of any kind.

    Attributes:
        name: path of its module or of its weight, or the name of a function's node.
        conv: the problem with its fused epilogue; None where im2win does not support it.
        algorithm: of its kernel; "" where PyTorch's convolution stays.
        reason: "exact" (a record of this layer on this device), "other epilogue" (a record of the same convolution with another epilogue),
            "other type" (of the same in float16), "older record" (of this layer, from before today's default tile), "compatible device",
            "nearest layer" (their records), "default tile" (the analytic model's), or why PyTorch's convolution stays.
        fused: what is fused into its kernel: norm, add, the activation.
        error: largest difference from PyTorch on the example, over the largest sum of magnitudes, or over the range of quantised outputs;
            None where nothing was compared.
        target: "cpu" or "cuda".
        times: of im2win's kernel and of what the module ran there, in seconds; None where they were not timed.
        tuned: whether a record of this device is about it.
        against: PyTorch's operator that was timed, where the module itself runs something slower; "" where its own nodes were.
    """

    name: str
    conv: Conv2d | None
    algorithm: str
    reason: str
    fused: tuple[str, ...] = ()
    error: float | None = None
    target: str = "cpu"
    times: Times | None = None
    tuned: bool = False
    against: str = ""

    @property
    def untuned(self) -> bool:
        """Whether tuning could improve it: im2win computes such a layer, but no record of this device is about it."""
        return (bool(self.algorithm) or self.times is not None) and not self.tuned


@dataclass
class Report:
    """What was done with every convolution; `str` of it is a table.

    Attributes:
        mode: "graph" (traced, with fusion) or "modules" (convolutions replaced one by one, without fusion).
        note: the reason for the latter.
        built: operators that were compiled; the others came from the cache.
        whole: times of the whole module, im2win's and PyTorch's; None where it was not timed.
        given_back: whether the module runs PyTorch's own path, because with im2win it was slower as a whole.
        asked: arguments of `optimize` that tuning needs too, where they are not its defaults: logs, threads, accuracy.
    """

    mode: str
    note: str = ""
    built: int = 0
    layers: list[LayerReport] = field(default_factory=list)
    whole: Times | None = None
    given_back: bool = False
    asked: dict[str, Any] = field(default_factory=dict)

    @property
    def swapped(self) -> int:
        """Number of convolutions that run on im2win."""
        return 0 if self.given_back else sum(bool(layer.algorithm) for layer in self.layers)

    @property
    def untuned(self) -> int:
        """Number of convolutions that no record of this device is about, though im2win can compute them."""
        return sum(layer.untuned for layer in self.layers)

    @property
    def share_left(self) -> float | None:
        """The share of the whole module's time that is not im2win's kernels', from 0 to 1; None if something was not timed."""
        ours = [layer.times.ours_s if layer.times else None for layer in self.layers if layer.algorithm]
        if self.whole is None or self.given_back or None in ours:
            return None
        return max(0.0, 1 - sum(one for one in ours if one is not None) / self.whole.ours_s)

    @property
    def advice(self) -> str:
        """What would tune the layers without a record; "" if each has one."""
        if not self.untuned:
            return ""
        call = "".join(f"{name}={value!r}, " for name, value in self.asked.items())
        options = "".join(f" --{name} {shlex.quote(str(value))}" for name, value in self.asked.items())
        commands = f"optimize(..., {call}trials=64), or im2win_report.save('layers.jsonl') and im2win tune layers.jsonl{options}"
        return f"layers without a tuning record of this device: {self.untuned} ({commands})"

    @property
    def refusals(self) -> str:
        """Why PyTorch computes what it computes: the reasons, with the number of convolutions of each."""
        reasons = Counter(layer.reason for layer in self.layers if not layer.algorithm)
        return "; ".join(f"{reason} ({count})" for reason, count in reasons.most_common())

    @property
    def summary(self) -> str:
        """What became of the module, in a few sentences: counts, time, what is not im2win's, and what would improve it."""
        how = "traced" if self.mode == "graph" else f"modules swapped one by one, nothing fused: {self.note}"
        lines = [f"{self.swapped} of {counted(len(self.layers), 'convolution')} on im2win, {self.built} built; {how}"]
        if self.whole is not None:
            kept = "; PyTorch's own path stays" if self.given_back else ""
            lines.append(f"the whole: {self.whole}, {self.whole.theirs_s / self.whole.ours_s:.2f}x{kept}")
        if self.share_left is not None:
            lines.append(f"{self.share_left:.0%} of this time is not im2win's kernels'")
        if self.advice:
            lines.append(self.advice)
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """The report as plain values, which JSON can hold; times in seconds, an error that is not finite as None."""
        layers = [_plain(layer) for layer in self.layers]
        whole = None if self.whole is None else asdict(self.whole)
        counts = {"convolutions": len(self.layers), "on_im2win": self.swapped, "untuned": self.untuned, "built": self.built}
        facts = {"whole": whole, "given_back": self.given_back, "share_left": self.share_left, "advice": self.advice}
        return {"schema": SCHEMA, "mode": self.mode, "note": self.note, **counts, **facts, "layers": layers}

    def to_json(self) -> str:
        """`as_dict` as JSON."""
        return json.dumps(self.as_dict(), indent=1, allow_nan=False)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Adds the problems, with their fused epilogues, to a file that `im2win tune` reads.

        Raises:
            LogError: the file cannot be written.
        """
        counts = Counter((layer.conv, layer.target) for layer in self.layers if layer.conv is not None)
        append_layers(path, {(conv, target): count for (conv, target), count in counts.items() if conv is not None})

    def __str__(self) -> str:
        from rich.console import Console
        from rich.markup import escape
        from rich.table import Table

        table = Table(box=None, pad_edge=False)
        numbers = "error", "im2win ms", "PyTorch ms"
        for title in ("layer", "problem", "fused", "runs on", "because", *numbers):
            table.add_column(title, justify="right" if title in numbers else "left", overflow="fold")
        for one in self.layers:
            problem = "" if one.conv is None else str(one.conv)
            error = "" if one.error is None else f"{one.error:.0e}"
            times = ("", "") if one.times is None else (f"{one.times.ours_s * 1e3:.3f}", f"{one.times.theirs_s * 1e3:.3f}")
            runs_on = "PyTorch" if self.given_back else shown(one.algorithm) or "PyTorch"
            because = f"{one.reason}; against {one.against}" if one.against else one.reason
            table.add_row(*map(escape, (one.name, problem, " ".join(one.fused), runs_on, because, error, *times)))
        text = io.StringIO()
        console = Console(file=text, width=180, color_system=None)
        console.print(table)
        console.print(escape(self.summary), soft_wrap=True)
        return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def _plain(layer: LayerReport) -> dict[str, Any]:
    error = layer.error if layer.error is not None and math.isfinite(layer.error) else None
    conv = None if layer.conv is None else str(layer.conv)
    return {**asdict(replace(layer, conv=None)), "conv": conv, "error": error, "fused": list(layer.fused)}
