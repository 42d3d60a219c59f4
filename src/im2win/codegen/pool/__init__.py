"""The thread pool of CPU kernels, in C: part of exported C libraries, and of the libraries that `im2win.load` opens."""

from __future__ import annotations

import functools
import logging
import sys
from pathlib import Path

from im2win.codegen.toolchain import kept_library

SOURCES = Path(__file__).parent
FLAGS = ("-std=c11", "-O2", "-fPIC", "-pthread")
_log = logging.getLogger("im2win")


@functools.cache
def launcher() -> Path | None:
    """The object file with the pool and `im2win_launch`, compiled once; None where it cannot be, and kernels keep TVM's threads."""
    if not sys.platform.startswith("linux"):
        return None
    headers = [SOURCES / name for name in ("pool.c", "pool.h", "threads.h", "im2win.h")]
    try:
        return kept_library(SOURCES / "launch.c", "CC", FLAGS, headers=headers, kind="object")
    except OSError as error:
        _log.info("kernels run on TVM's threads, not on im2win's (%s)", error)
        return None
