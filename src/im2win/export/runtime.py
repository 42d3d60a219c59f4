"""Writes a folder with which a program loads and runs exported kernels and models, instead of an installation with compiler and tuner.

It holds the rooms of im2win that `im2win.runtime` imports, tvm-ffi, ml_dtypes, and the runtime libraries of TVM. Only numpy is
needed beside it.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from importlib import metadata
from pathlib import Path, PurePath

from im2win.runtime.libraries import BUNDLED, libraries_folder
from im2win.runtime.manifest import ArtefactError

PACKAGE = Path(__file__).parents[1]
FIRST = "runtime"  # the room that is wanted; the others follow from its imports
# Parts of tvm-ffi with which programs are compiled.
FOR_COMPILING = ("3rdparty", "cython", "include", "share", "src", "stub", "testing")
_IMPORT = re.compile(r"^\s*(?:from|import) im2win\.(\w+)", re.MULTILINE)


def export_runtime(folder: str | os.PathLike[str]) -> Path:
    """Writes what `im2win.load` and `im2win.load_model` need into a new folder, which a program puts on its path.

    The folder works with the Python version and platform that wrote it.

    Raises:
        ArtefactError: the folder is not empty or cannot be written, or an installed package does not say what belongs to it.
    """
    target = Path(folder)
    try:
        target.mkdir(parents=True, exist_ok=True)
        if any(target.iterdir()):
            raise ArtefactError(f"`folder` (={str(target)!r}) must be empty or new.")
        for room in rooms():
            shutil.copytree(PACKAGE / room, target / "im2win" / room, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("__init__.py", "py.typed"):
            shutil.copy2(PACKAGE / name, target / "im2win" / name)
        _copy("apache-tvm-ffi", target, lambda path: not set(path.parts) & {"__pycache__", *FOR_COMPILING})
        _copy("ml_dtypes", target, lambda path: "__pycache__" not in path.parts)  # bfloat16 for numpy
        _copy("typing-extensions", target, lambda path: "__pycache__" not in path.parts)  # tvm-ffi's
        _copy_libraries(target / "im2win" / BUNDLED.relative_to(PACKAGE))
    except OSError as error:
        raise ArtefactError(f"`folder` (={str(target)!r}) must be a folder that can be written: {error.strerror or error}.") from None
    return target


def rooms() -> list[str]:
    """The rooms of im2win that the runtime imports, itself included, directly or through others."""
    found, new = set[str](), {FIRST}
    while new:
        found |= new
        texts = [path.read_text(encoding="utf-8") for room in new for path in (PACKAGE / room).rglob("*.py")]
        new = {room for text in texts for room in _IMPORT.findall(text)} - found
    return sorted(found)


def size(folder: Path) -> int:
    """The bytes of all files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _copy_libraries(folder: Path) -> None:
    """Copies TVM's runtime libraries, for a CPU and for a GPU, and their licenses."""
    folder.mkdir()
    source = libraries_folder()
    for library in source.iterdir():
        if library.name.startswith(("libtvm_runtime.", "libtvm_runtime_cuda.")):
            shutil.copy2(library, folder / library.name)
    licenses = source.parent / "licenses"
    if licenses.is_dir():
        shutil.copytree(licenses, folder / "licenses")
    for path in metadata.distribution("apache-tvm").files or ():
        if path.name == "LICENSE" and path.parts[0].endswith(".dist-info"):
            (folder / "licenses").mkdir(exist_ok=True)
            shutil.copy2(str(path.locate()), folder / "licenses" / "LICENSE")


def _copy(name: str, target: Path, wanted: Callable[[PurePath], bool]) -> None:
    """Copies the wanted files of an installed package."""
    for path in metadata.distribution(name).files or ():
        if path.parts[0] != ".." and wanted(path):
            goal = target / path
            goal.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(str(path.locate()), goal)
    if not any(target.glob(f"{name.replace('-', '_')}-*.dist-info")):
        raise ArtefactError(f"the package {name} must be installed with a list of its files.")
