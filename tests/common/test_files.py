"""Files that are written atomically, and what killed writers leave."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from im2win.common.files import ABANDONED_S, replace_text


@pytest.mark.fault("processes", "a process is killed while it writes into the cache")
def test_what_a_killed_writer_left_is_removed_by_the_next_one(tmp_path: Path) -> None:
    """And nothing else: neither what is being written now, nor other files."""
    old, new, other = (tmp_path / name for name in ("a[1].json.12-34.partial", "a[1].json.12-35.partial", "b.json.12-34.partial"))
    for path in (old, new, other):
        path.write_text("{")
    long_ago = time.time() - ABANDONED_S - 1
    for path in (old, other):
        os.utime(path, (long_ago, long_ago))
    written = replace_text(tmp_path / "a[1].json", "{}")
    assert sorted(tmp_path.iterdir()) == sorted([written, new, other]) and written.read_text() == "{}"
