"""Finds the machine's C and C++ compilers, and compiles small helper libraries once into the artefact cache's folder."""

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
from typing import Literal

from im2win.common.files import default_folder
from im2win.common.locking import LogError, locked

_log = logging.getLogger("im2win")
_NAMES = {"CC": ("cc", "gcc", "clang"), "CXX": ("c++", "g++", "clang++")}
_LANGUAGES = {"CC": "C", "CXX": "C++"}
Kind = Literal["shared", "object"]
_KINDS = {"shared": (".so", "-shared"), "object": (".o", "-c")}
_LONGEST_S = 600.0  # seconds to wait for another process that compiles the same library


def compiler(variable: str) -> str | None:
    """The compiler for C ("CC") or C++ ("CXX"); None if there is none.

    It is the value of that environment variable, else the first known compiler on PATH.
    """
    return os.environ.get(variable) or next(filter(None, map(shutil.which, _NAMES[variable])), None)


def kept_library(
    source: Path, variable: str, flags: Sequence[str], libraries: Sequence[str] = (), versions: Sequence[str] = (), *,
    headers: Sequence[Path] = (), make: bool = True, kind: Kind = "shared",
) -> Path:  # fmt: skip
    """The shared library or object file of a source, from the cache's folder or compiled now.

    The folder holds one library for each source, compiler, command and kind of processor.

    Args:
        variable: "CC" or "CXX", as for `compiler`.
        flags: compiler options before the source.
        libraries: arguments behind the source on the command line.
        versions: further values that the result depends on.
        headers: of this package, that the source includes.
        make: compile the library if the cache lacks it.
        kind: "shared" library or "object" file.

    Raises:
        OSError: no compiler, the compiler failed, the cache's folder cannot be written, or the library is missing and `make` is false.
    """
    command = compiler(variable)
    if not command:
        raise OSError(f"no {_LANGUAGES[variable]} compiler on PATH")
    suffix, option = _KINDS[kind]
    what = "\n".join([platform.machine(), command, *flags, *libraries, *versions])
    folder = default_folder()
    content = b"".join(one.read_bytes() for one in (source, *headers))
    path = folder / f"{source.stem}-{hashlib.sha256(content + what.encode()).hexdigest()[:12]}{suffix}"
    if path.exists():
        return path
    if not make:
        raise OSError(f"{source.name} has not been compiled here")
    try:
        with locked(folder / f".{source.stem}.lock", _LONGEST_S):
            if not path.exists():
                _log.info("%s is compiled once, with %s", source.name, command)
                _compile([*shlex.split(command), *flags, "-fPIC", option, str(source)], libraries, path)
    except LogError as error:
        raise OSError(str(error)) from None
    return path


def _compile(command: Sequence[str], libraries: Sequence[str], path: Path) -> None:
    """Compiles atomically: the file is complete or absent."""
    with tempfile.TemporaryDirectory(prefix=f".{path.stem}-", dir=path.parent) as work:
        made = Path(work) / path.name
        done = subprocess.run([*command, "-o", str(made), *libraries], capture_output=True, text=True, check=False)
        if done.returncode:
            raise OSError(f"{command[0]}: {done.stderr.strip()[:2000]}")
        os.replace(made, path)
