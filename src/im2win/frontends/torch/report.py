"""The report of `optimize`: what it did with a module, layer by layer."""

from __future__ import annotations

import io
import os
from collections import Counter
from dataclasses import dataclass, field

from im2win.spec.captured_layers import append_layers
from im2win.spec.conv2d import Conv2d
from im2win.spec.methods import shown


@dataclass(frozen=True)
class LayerReport:
    """One convolution of a module.

    Attributes:
        name: path of its module, or of its weight.
        conv: the problem with its fused epilogue; None where im2win does not support it.
        algorithm: of its kernel; "" where PyTorch's convolution stays.
        reason: "exact" (a record of this layer on this device), "other epilogue" (a record of the same convolution with another epilogue),
            "compatible device", "nearest layer" (their records), "default tile" (the analytic model's), or why PyTorch's convolution stays.
        fused: what is fused into its kernel: norm, add, the activation.
        error: largest difference from PyTorch on the example, over the largest sum of magnitudes; None where PyTorch's convolution stays.
        target: "cpu" or "cuda".
    """

    name: str
    conv: Conv2d | None
    algorithm: str
    reason: str
    fused: tuple[str, ...] = ()
    error: float | None = None
    target: str = "cpu"


@dataclass
class Report:
    """What was done with every convolution; `str` of it is a table.

    Attributes:
        mode: "graph" (traced, with fusion) or "modules" (convolutions replaced one by one, without fusion).
        note: the reason for the latter.
        built: operators that were compiled; the others came from the cache.
    """

    mode: str
    note: str = ""
    built: int = 0
    layers: list[LayerReport] = field(default_factory=list)

    @property
    def swapped(self) -> int:
        """Number of convolutions that run on im2win."""
        return sum(bool(layer.algorithm) for layer in self.layers)

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
        for title in ("layer", "problem", "fused", "runs on", "because", "error"):
            table.add_column(title, justify="right" if title == "error" else "left", overflow="fold")
        for one in self.layers:
            problem = "" if one.conv is None else str(one.conv)
            error = "" if one.error is None else f"{one.error:.0e}"
            cells = one.name, problem, " ".join(one.fused), shown(one.algorithm) or "PyTorch", one.reason, error
            table.add_row(*map(escape, cells))
        text = io.StringIO()
        console = Console(file=text, width=180, color_system=None)
        console.print(table)
        how = "traced" if self.mode == "graph" else f"modules swapped one by one, nothing fused: {self.note}"
        console.print(f"{self.swapped} of {len(self.layers)} convolutions on im2win, {self.built} built; {escape(how)}", soft_wrap=True)
        return "\n".join(line.rstrip() for line in text.getvalue().splitlines())
