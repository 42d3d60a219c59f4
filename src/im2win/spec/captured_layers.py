"""Files of layers captured in running programs, which `im2win layers` and `im2win tune` read.

Each layer and run has one line, appended under a lock: ``{"schema": 1, "conv": KEY, "count": N, "target": "cpu" or "cuda"}``. It says that
in one run the problem occurred N times. Reading adds up the counts of lines of the same problem. A line that cannot be used is skipped and
reported.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from im2win.common.json_text import parsed
from im2win.common.locking import locked, write_lines, writing
from im2win.spec.conv2d import Conv2d
from im2win.spec.suites import Layer

SCHEMA = 1
SUFFIX = ".jsonl"


class LayerFileError(ValueError):
    """A file of layers that cannot be read, or that holds none. The message names the file."""


def append_layers(path: str | os.PathLike[str], counts: Mapping[tuple[Conv2d, str], int]) -> None:
    """Adds a line for each (problem, target) with its count. Any number of processes may append at once.

    Raises:
        LogError: the file cannot be written; nothing of the lines remains then.
    """
    rows = [{"schema": SCHEMA, "conv": str(conv), "count": count, "target": target} for (conv, target), count in counts.items()]
    file = Path(path)
    with locked(file.with_name(f".{file.name}.lock")), writing(file):
        write_lines(file, "".join(json.dumps(row) + "\n" for row in rows).encode())


def read_layers(path: str | os.PathLike[str], batch: int | None = None) -> tuple[list[Layer], list[str]]:
    """The distinct layers of a file in the order of first occurrence, named by their keys, and a message for each line that cannot be used.

    Args:
        batch: replaces the batch of every layer.

    Raises:
        LayerFileError: no such file, or no layer in it.
        ConvError: `batch` is not a positive integer.
    """
    try:
        lines = Path(path).read_bytes().split(b"\n")
    except OSError as error:
        raise LayerFileError(f"{path}: cannot be read ({error.strerror}).") from None
    counts: Counter[Conv2d] = Counter()
    skipped = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                conv, count = _parse(line)
            except ValueError as error:
                skipped.append(f"{path}, line {number}: {error}")
            else:
                counts[conv if batch is None else conv.with_(batch=batch)] += count
    if not counts:
        raise LayerFileError(f"{path}: no layer in it" + (f" ({skipped[0]})." if skipped else "; `im2win.capture` writes such files."))
    return [Layer(str(conv), conv, count) for conv, count in counts.items()], skipped


def _parse(line: bytes) -> tuple[Conv2d, int]:
    values = parsed(line)
    if not isinstance(values, dict) or values.get("schema") != SCHEMA:
        raise ValueError(f"`schema` must be {SCHEMA}")
    count = values.get("count")
    if type(count) is not int or count < 1:
        raise ValueError(f"`count` (={count!r}) must be an integer of at least 1")
    return Conv2d.parse(values.get("conv", "")), count
