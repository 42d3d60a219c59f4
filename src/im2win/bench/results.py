"""The result of a benchmark run as data: written to JSON, read back, summarised. benchmarks/README.md describes the schema."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from im2win.common.field_types import check_fields
from im2win.common.files import replace_json
from im2win.common.json_text import parsed
from im2win.spec import padding
from im2win.spec.accuracy import Accuracy
from im2win.spec.conv2d import Conv2d
from im2win.spec.dtypes import ELEMENT_TYPES

OURS, UNTUNED = "ours", "untuned"  # names of subjects: the kernel that the look-up chooses, and the default tile
SCHEMA = 2
READABLE = (1, SCHEMA)  # schema 1 has no `digests`
SLOWER = 1.03  # a shipped choice is slower than the default tile where its time is more than this many times the default's
WINOGRAD = "winograd"  # prefix of the names of Winograd's algorithms


class ResultError(ValueError):
    """A file that is not a benchmark result of this schema. The message names the file and what is wrong."""


@dataclass(frozen=True)
class Spread:
    """Samples of one subject on one layer in ms per call: median, 10th and 90th percentile, and their number."""

    median: float
    p10: float
    p90: float
    samples: int


@dataclass
class Row:
    """One layer. Numbers are None where im2win failed; `failed` and `peers_failed` then say why.

    Attributes:
        error: largest difference between im2win's output and the float64 reference, over the reference's largest magnitude.
        roofline_fraction: least time of direct convolution on this machine, over im2win's (`roofline_fraction`).
        ratio: best peer's time / im2win's; above 1 im2win is faster.
        transform_ms: time of the transform alone, a part of ours_ms, where a separate kernel computes it (on a GPU).
        tier, tile: the tier of the look-up that chose im2win's kernel ("default": the analytic model), and its tile, where known.
        untuned_ms, untuned_ratio: the default tile in the same run, where requested.
        untuned_algorithm, untuned_tile: what the default was at that time.
        fingerprint, untuned_fingerprint: of the kernels that were timed (`im2win.records.emission`); "" until `im2win.bench.confirmation`
            adds them.
        date, source: when the layer was measured, and the digest of the source that did; "" where that was the run that wrote the file.
        peak_bytes: resident memory that the layer's tensors and calls add to a process (see `im2win.bench.memory`), where requested;
            `peak_failed` says why it could not be measured.
        peers_chosen: what peers with a choice of their own run: a plan of cuDNN's graph interface, kernels of Inductor, and so on.
        peers_extra_bytes: bytes that peers allocate beside input, filter and output, where measured (on a GPU).
    """

    layer: str
    conv: str
    count: int = 1
    ours_ms: float | None = None
    algorithm: str = ""
    tuned: bool = False
    gflops: float | None = None
    roofline_fraction: float | None = None
    extra_bytes: int | None = None
    error: float | None = None
    peers: dict[str, float] = field(default_factory=dict)
    best_peer: str | None = None
    ratio: float | None = None
    untuned_ms: float | None = None
    untuned_ratio: float | None = None
    peak_bytes: int | None = None
    peak_failed: str | None = None
    failed: str | None = None
    peers_failed: dict[str, str] = field(default_factory=dict)
    peers_extra_bytes: dict[str, int] = field(default_factory=dict)
    spread: dict[str, Spread] = field(default_factory=dict)
    transform_ms: float | None = None
    tier: str = ""
    tile: dict[str, Any] = field(default_factory=dict)
    untuned_algorithm: str = ""
    untuned_tile: dict[str, Any] = field(default_factory=dict)
    fingerprint: str = ""
    untuned_fingerprint: str = ""
    date: str = ""
    source: str = ""
    peers_chosen: dict[str, str] = field(default_factory=dict)


@dataclass
class Result:
    """One run: the machine, the versions, the ceilings and a row for each layer.

    `digests` are those of the source that made it (`im2win.bench.source`); empty in files of schema 1. `confirmed` are those of later
    source that was found to choose and to emit the same kernels; empty if none was.
    """

    suite: str
    dtype: str
    batch: int | None
    device: str
    brand: str
    threads: int
    versions: dict[str, str]
    commit: str
    date: str
    ceilings: dict[str, float]
    layers: list[Row] = field(default_factory=list)
    digests: dict[str, str] = field(default_factory=dict)
    confirmed: dict[str, str] = field(default_factory=dict)
    schema: int = SCHEMA

    @property
    def stem(self) -> str:
        """Its path under benchmarks/results, without suffix: device/suite-dtype-bN."""
        return f"{self.device}/{self.suite}-{self.dtype}-b{self.batch or 'mixed'}"

    def as_dict(self) -> dict[str, Any]:
        """Plain values, `schema` first."""
        return {"schema": self.schema, **{name: value for name, value in asdict(self).items() if name != "schema"}}

    def save(self, path: Path) -> Path:
        """Writes JSON and creates the folder. Returns the path."""
        return replace_json(path, self.as_dict())

    @property
    def accuracy(self) -> list[str]:
        """The words of the suite's name behind its layers: accuracies and layouts, as in papers12-exact-nhwc."""
        return self.suite.split("-")[1:]

    @classmethod
    def load(cls, path: Path) -> Result:
        """Reads a file of `save`, of this schema or an older one.

        Raises:
            ResultError: no such file, not JSON, another schema, missing or unknown fields, or a field of another type.
        """
        values = read_values(path)
        try:
            rows = [_row(row) for row in _listed(values.pop("layers"))]
            found = cls(**values, layers=rows)
        except (TypeError, KeyError, AttributeError) as error:
            raise ResultError(f"{path}: its fields must be those of schema {SCHEMA} ({error}).") from error
        check_types(path, found)
        return found


def read_values(path: Path) -> dict[str, Any]:
    """The fields of a result file; those of an older schema as they are in today's.

    Raises:
        ResultError: no such file, not JSON, another schema, or a file of today's schema without digests.
    """
    try:
        values = parsed(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ResultError(f"{path}: not a readable JSON file ({error}).") from error
    if not isinstance(values, dict) or values.get("schema") not in READABLE:
        raise ResultError(f"{path}: `schema` must be {' or '.join(map(str, READABLE))}.")
    if values["schema"] == SCHEMA and "digests" not in values:
        raise ResultError(f"{path}: its fields must be those of schema {SCHEMA} (no 'digests').")
    return {**values, "schema": SCHEMA}


def check_types(path: Path, found: Any) -> None:
    """Raises ResultError, which names the file, unless all fields of what was read from it have their types."""
    try:
        check_fields(found)
    except (ValueError, OverflowError) as error:
        raise ResultError(f"{path}: {error}") from error


def _listed(rows: Any) -> list[Any]:
    if not isinstance(rows, list):
        raise TypeError("'layers' is not a list")
    return rows


def _row(values: dict[str, Any]) -> Row:
    spread = {name: Spread(**numbers) for name, numbers in values.get("spread", {}).items()}
    return Row(**{**values, "spread": spread})


def peak_name(types: str, ceilings: Mapping[str, float]) -> str:
    """The arithmetic ceiling for these types among those measured, the nearest first; for float32 that of IEEE arithmetic."""
    wanted = ELEMENT_TYPES[types.partition("-")[0]].ceilings
    return next((name for name in wanted if name in ceilings), "fma_gflops")


def arithmetic_roofs(types: str, accuracy: Collection[str], ceilings: Mapping[str, float]) -> dict[str, float]:
    """Arithmetic peaks in GFLOPS, by name, that hold for these types and accuracies on a machine.

    On a GPU a float32 product may be three TF32 products. The accuracy "exact" forbids that; "tf32" and "winograd" reduce it to one.
    """
    if types != "float32" or "tf32_gflops" not in ceilings:
        name = peak_name(types, ceilings)
        eight = "float8" if types.startswith("float8") else "int8"  # tensor cores multiply both equally fast
        narrow = {"f16_gflops": "bfloat16" if types.startswith("bfloat16") else "float16", "s8_gflops": eight}
        return {f"{narrow[name]} products" if name in narrow else "FMA": ceilings[name]}
    if {"tf32", "winograd"} & set(accuracy):
        return {"FMA": ceilings["fma_gflops"], "TF32 products": ceilings["tf32_gflops"]}
    if "exact" in accuracy:
        return {"FMA": ceilings["fma_gflops"]}
    return {"FMA": ceilings["fma_gflops"], "three TF32 products": ceilings["tf32_gflops"] / 3}


def roofline_fraction(row: Row, accuracy: Collection[str], ceilings: Mapping[str, float]) -> float | None:
    """The least time of direct convolution under the highest of its roofs, over im2win's time.

    None where im2win was not timed, and for Winograd's algorithms, which need fewer operations than the roof counts.
    """
    if row.ours_ms is None or row.algorithm.startswith(WINOGRAD):
        return None
    conv = Conv2d.parse(row.conv)
    peak = max(arithmetic_roofs(conv.types, accuracy, ceilings).values())
    flops = conv.flops * (padding.needed(conv) if padding.skips(conv) else 1)  # without multiplications by zero
    return max(flops / peak, conv.bytes_moved / ceilings["copy_gbs"]) / 1e6 / row.ours_ms


def mean_at_roof(result: Result) -> float | None:
    """The geometric mean of ratios if im2win's layers ran at their roofs, except Winograd's: those stay as they were measured.

    Layers above their roof, such as those that leave out padding, stay as they were measured as well. None where nothing was compared.
    """

    def least(row: Row) -> float:
        of_roof = roofline_fraction(row, result.accuracy, result.ceilings)
        return min(1.0, 1.0 if of_roof is None else of_roof)

    return geometric_mean(row.ratio / least(row) for row in result.layers if row.ratio is not None)


def slower_choices(rows: Iterable[Row]) -> list[Row]:
    """The rows whose kernel, as chosen by the look-up, was slower than the default tile in the same run.

    Where both are the same tile they are the same kernel, and what their times differ by is noise.
    """
    differ = (row for row in rows if not row.tile or (row.algorithm, row.tile) != (row.untuned_algorithm, row.untuned_tile))
    timed = ((row, row.ours_ms, row.untuned_ms) for row in differ)
    return [row for row, ours, default in timed if ours is not None and default is not None and ours > SLOWER * default]


def suite_of(suite: str, convs: Iterable[Conv2d], accuracy: Accuracy = "float32") -> str:
    """The suite's name in a result: it says the accuracy, where that is not the usual one, and whether all layers are channels-last."""
    words = [suite, *([accuracy] if accuracy != "float32" else []), *(["nhwc"] if {conv.layout for conv in convs} == {"NHWC"} else [])]
    return "-".join(words)


def geometric_mean(values: Iterable[float]) -> float | None:
    """The geometric mean of positive numbers; None for an empty sequence."""
    logs = [math.log(value) for value in values]
    return math.exp(math.fsum(logs) / len(logs)) if logs else None


def summarise(result: Result) -> dict[str, Any]:
    """The run in a few numbers. A mean over no rows is None.

    Returns:
        layers: rows; failed: rows without a ratio; geomean_ratio, min_ratio and min_layer over the others; untuned_geomean_ratio,
            untuned_min_ratio; total_ms: im2win's times summed with the layers' counts; total_ratio: the sum of the best peers' times over
            that; totals_ms: the same sum for every peer that was timed on all these layers.
    """
    rows = [row for row in result.layers if row.ratio is not None and row.ours_ms is not None]
    worst = min(rows, key=lambda row: row.ratio or 0.0, default=None)
    untuned = [row.untuned_ratio for row in result.layers if row.untuned_ratio is not None]
    ours = math.fsum(row.count * (row.ours_ms or 0.0) for row in rows)
    best = math.fsum(row.count * min(row.peers.values()) for row in rows)
    names = [name for name in dict.fromkeys(name for row in rows for name in row.peers) if all(name in row.peers for row in rows)]
    return {
        "layers": len(result.layers),
        "failed": len(result.layers) - len(rows),
        "geomean_ratio": geometric_mean(row.ratio for row in rows if row.ratio is not None),
        "min_ratio": worst.ratio if worst else None,
        "min_layer": worst.layer if worst else None,
        "untuned_geomean_ratio": geometric_mean(untuned),
        "untuned_min_ratio": min(untuned, default=None),
        "total_ms": ours if rows else None,
        "total_ratio": best / ours if rows else None,
        "totals_ms": {name: math.fsum(row.count * row.peers[name] for row in rows) for name in names},
    }
