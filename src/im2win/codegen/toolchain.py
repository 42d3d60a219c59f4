"""The machine's compilers, and small libraries of ours that they make once: these are kept beside the artefacts."""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from im2win.common.files import default_folder
from im2win.common.locking import LogError, locked

_log = logging.getLogger("im2win")
_NAMES = {"CC": ("cc", "gcc", "clang"), "CXX": ("c++", "g++", "clang++")}
_LANGUAGES = {"CC": "C", "CXX": "C++"}
_LONGEST_S = 600.0  # that another process may take to compile the same


def compiler(variable: str) -> str | None:
    """The compiler for C ("CC") or C++ ("CXX"): what the variable of that name says, else the first on PATH; None if there is none."""
    return os.environ.get(variable) or next(filter(None, map(shutil.which, _NAMES[variable])), None)


def kept_library(
    source: Path, variable: str, flags: Sequence[str], libraries: Sequence[str] = (), versions: Sequence[str] = (), *,
    headers: Sequence[Path] = (), make: bool = True,
) -> Path:  # fmt: skip
    """The shared library of a source, from the cache's folder or made now: for each source, compiler, command and kind of processor one.

    Args:
        variable: "CC" or "CXX", as for `compiler`.
        libraries: what follows the source on the command line.
        versions: what else the result depends on.
        headers: of ours, that the source includes.
        make: compile it if it is not in the cache.

    Raises:
        OSError: no compiler, or it failed, or the cache's folder cannot be written, or it is not there and must not be made.
    """
    command = compiler(variable)
    if not command:
        raise OSError(f"no {_LANGUAGES[variable]} compiler on PATH")
    what = "\n".join([platform.machine(), command, *flags, *libraries, *versions])
    folder = default_folder()
    content = b"".join(one.read_bytes() for one in (source, *headers))
    path = folder / f"{source.stem}-{hashlib.sha256(content + what.encode()).hexdigest()[:12]}.so"
    if path.exists():
        return path
    if not make:
        raise OSError(f"{source.name} has not been compiled here")
    try:
        with locked(folder / f".{source.stem}.lock", _LONGEST_S):
            if not path.exists():
                _log.info("%s is compiled once, with %s", source.name, command)
                _compile([*shlex.split(command), *flags, "-fPIC", "-shared", str(source)], libraries, path)
    except LogError as error:
        raise OSError(str(error)) from None
    return path


def _compile(command: Sequence[str], libraries: Sequence[str], path: Path) -> None:
    """The whole file, or none."""
    with tempfile.TemporaryDirectory(prefix=f".{path.stem}-", dir=path.parent) as work:
        made = Path(work) / path.name
        done = subprocess.run([*command, "-o", str(made), *libraries], capture_output=True, text=True, check=False)
        if done.returncode:
            raise OSError(f"{command[0]}: {done.stderr.strip()[:2000]}")
        os.replace(made, path)
