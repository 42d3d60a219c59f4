"""Prints a line for each layer of the result files in a folder: our time, and those of its peers.

    python benchmarks/gpu/peers_table.py FOLDER
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path

from im2win.bench.results import Result, Row, geometric_mean

GROUPS = {"PyTorch": "torch_", "cuDNN by name": "cudnn_", "cuDNN graph": "cudnn-graph", "Inductor": "inductor_", "CUTLASS": "cutlass"}


def best(row: Row, prefix: str) -> str | None:
    """The fastest peer whose name begins so; None if none was timed."""
    return min((name for name in row.peers if name.startswith(prefix)), key=lambda name: row.peers[name], default=None)


def lines(result: Result) -> Iterable[str]:
    """The table of a result: times in microseconds, what peers chose, and geometric means of their times over ours."""
    groups = {group: prefix for group, prefix in GROUPS.items() if any(best(row, prefix) for row in result.layers)}
    yield f"{result.suite}, {result.dtype}, batch {result.batch}, {result.brand}: us"
    yield f"{'layer':12} {'ours':>9}" + "".join(f"{group:>15}" for group in groups)
    for row in result.layers:
        names = [best(row, prefix) for prefix in groups.values()]
        times = [f"{row.peers[name] * 1e3:15.1f}" if name else f"{'-':>15}" for name in names]
        chosen = [row.peers_chosen[name] for name in names if name in row.peers_chosen]
        failed = [f"{name}: {reason[:120]}" for name, reason in row.peers_failed.items() if not name.startswith("cudnn_")]
        ours = f"{row.ours_ms * 1e3:9.1f}" if row.ours_ms is not None else f"{'failed':>9}"
        yield "; ".join([f"{row.layer:12} {ours}" + "".join(times), *chosen, *failed])
    for group, prefix in groups.items():
        pairs = [(row.peers[name], row.ours_ms) for row in result.layers if (name := best(row, prefix)) and row.ours_ms is not None]
        mean = geometric_mean(theirs / ours for theirs, ours in pairs)
        yield f"{group} over ours, geometric mean of {len(pairs)} layers: {mean or 0:.3f}"


def main() -> None:
    """Reads the command line, prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    for path in sorted(parser.parse_args().folder.glob("*.json")):
        print("\n".join(lines(Result.load(path))), end="\n\n", flush=True)


if __name__ == "__main__":
    main()
