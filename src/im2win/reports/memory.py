"""Reports of device memory: tables from the results of `bench.cuda_memory`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from im2win.bench.memory_result import PREFIX, LayerMemory, MemoryResult
from im2win.common.markdown import Table
from im2win.spec.methods import shown

TITLES = {"torch_nchw": "PyTorch NCHW", "torch_nhwc": "PyTorch channels-last"}
_MIB = 1 << 20
_NONE = "–"  # noqa: RUF001


def load_all(folder: Path) -> dict[str, MemoryResult]:
    """Every memory result under `folder`, by its path without suffix, sorted."""
    paths = sorted(folder.rglob(f"{PREFIX}*.json"))
    return {path.relative_to(folder).with_suffix("").as_posix(): MemoryResult.load(path) for path in paths}


def mebibytes(count: int | None) -> str:
    """Bytes in MiB, without decimals from ten on."""
    if count is None:
        return _NONE
    size = count / _MIB
    return "0" if not count else f"{size:.0f}" if size >= 10 else f"{size:.1f}" if size >= 0.05 else "< 0.1"


def ours(row: LayerMemory, name: str) -> str:
    """An algorithm's bytes by formula, in MiB, with the measured ones if they differ."""
    text = mebibytes(row.formula_bytes.get(name))
    measured = row.measured_bytes.get(name)
    return f"{text} (measured {mebibytes(measured)})" if measured is not None and name in row.failed else text


def _names(tables: Iterable[dict[str, int]]) -> list[str]:
    return list(dict.fromkeys(name for table in tables for name in table))


def tables(result: MemoryResult) -> str:
    """The tables of `layer_tables` and their caption as Markdown."""
    return "\n\n".join([*(one.markdown() for one in layer_tables(result)), caption(result)])


def layer_tables(result: MemoryResult) -> list[Table]:
    """Two tables, im2win's and the peers', one row for each layer, in MiB."""
    rows = result.layers
    algorithms, peers = _names(row.formula_bytes for row in rows), _names(row.torch_bytes for row in rows)
    named = _names(row.cudnn_bytes for row in rows)
    first = [[row.layer, mebibytes(row.tensor_bytes), *(ours(row, name) for name in algorithms)] for row in rows]
    second = [
        [
            row.layer, row.cudnn_choice or _NONE, mebibytes(row.cudnn_bytes.get(row.cudnn_choice or "")),
            *(mebibytes(row.torch_bytes.get(name)) for name in peers), *(mebibytes(row.cudnn_bytes.get(name)) for name in named),
        ]
        for row in rows
    ]  # fmt: skip
    titles = [TITLES.get(name, name) for name in peers] + [f"cuDNN {name}" for name in named]
    columns = ["layer", "cuDNN's choice", "its workspace", *titles]
    return [Table(["layer", "tensors", *map(shown, algorithms)], first), Table(columns, second, words=2)]


def caption(result: MemoryResult) -> str:
    """Where, when and with what memory was measured, and by how much measured peaks exceed the formulas."""
    beyond = [row.measured_bytes[name] - row.formula_bytes[name] for row in result.layers for name in row.measured_bytes]
    batch = "the model's batch" if result.batch is None else f"batch {result.batch}"
    shown = ", ".join(f"{name} {result.versions[name]}" for name in ("apache-tvm", "torch", "cuda") if name in result.versions)
    measured = f"Measured peaks exceed the formulas by at most {mebibytes(max(beyond))} MiB. " if beyond else ""
    return (
        f"{result.suite}, {result.dtype}, {batch}; MiB beside input, filters and output (`tensors`); {_NONE}: not supported, or the tensor "
        f"is too large. {measured}{result.brand} (`{result.device}`); {shown}; {result.date[:10]}."
    )
