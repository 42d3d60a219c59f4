"""Artefact cache: a folder of built operators, so that later processes load an operator instead of compiling it.

Layout: ``<folder>/<device>/<conv key>.<algorithm>.<digest>.so`` with its manifest beside it. The digest covers the tile, the source of
the method's kernels, the device and the versions. ``<folder>/<device>/defaults/`` stores the algorithm and tile that the
analytic model ranks first for untuned layers, since ranking takes longer than loading an operator.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from im2win import __version__
from im2win.builder.selections import Selection
from im2win.common.files import default_folder, not_ours, replace_text
from im2win.common.json_text import parsed
from im2win.common.locking import LogError, locked
from im2win.registry.sources import code_digest
from im2win.runtime.load import load
from im2win.runtime.manifest import ArtefactError
from im2win.runtime.op import Op
from im2win.spec.conv2d import Conv2d

_log = logging.getLogger("im2win")
_DIGITS = 12


def _digest(values: Any) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:_DIGITS]


def artefact_name(conv: Conv2d, algorithm: str, tile: Mapping[str, Any], device: Any) -> str:
    """The file name of a built operator.

    It holds the problem's key, the algorithm, and a digest of the tile, the source of that algorithm's kernels, the versions, the device
    (`Machine` or `Gpu`), and on a GPU whether launches overlap. So a stored operator outlives changes of other schedules.
    """
    import tvm

    from im2win.registry.backends import backend_for
    from im2win.registry.cuda_lowering import overlaps
    from im2win.registry.schedules import schedule_of

    backend = backend_for(device)
    instructions = getattr(device, "isa", "") or device.arch
    what = [dict(tile), code_digest(backend.target, algorithm), tvm.__version__, __version__, backend.name, backend.threads, instructions]
    if backend.target == "cuda" and overlaps(conv, row := schedule_of(algorithm), backend.tile(row, tile), device):
        what.append("overlap")
    return f"{conv}.{algorithm.replace('/', '-')}.{_digest(what)}"


def conv_of(name: str) -> Conv2d:
    """The problem that an artefact's name begins with.

    Raises:
        ConvError: the name does not begin with a problem's key.
    """
    return Conv2d.parse(name.rsplit(".", 2)[0])


@functools.cache
def _package() -> str:
    """A digest of the package's sources. It is part of a default choice's name, since any source may change what the model ranks first."""
    root, digest = Path(__file__).parent.parent, hashlib.sha256()
    found = (Path(parent, name) for parent, _, names in os.walk(root, followlinks=True) for name in names)
    for path in sorted(path for path in found if path.suffix in (".py", ".hpp")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:_DIGITS]


class Artefacts:
    """A folder of built operators.

    An operator that cannot be read is built again, and so is one that another user could have written: a library is code. If the folder
    cannot be written, every operator is built and a warning says so.

    Args:
        folder: it is created if it does not exist; `default_folder()` if None.

    Attributes:
        built: operators that were compiled, rather than loaded, through this object.
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        self.folder = default_folder() if folder is None else Path(folder)
        self.built = 0

    def find(self, name: str) -> Op | None:
        """The operator of that name, for any device; None if there is none that can be loaded."""
        for path in sorted(self.folder.glob(f"*/{name}.so")):
            if reason := not_ours(path):
                _log.warning("%s: operators there are not loaded; set IM2WIN_CACHE to a folder of your own", reason)
                continue
            try:
                return load(path)
            except ArtefactError as error:
                _log.info("%s; it is built again", error)
        return None

    def get(self, conv: Conv2d, algorithm: str, tile: Any, device: Any, *, tuned: bool = False) -> tuple[str, Op]:
        """Name and operator of one algorithm with one tile. The operator is loaded if the cache has it, else it is built and stored.

        Raises:
            TileError: the tile is not legal for the problem.
            ToolchainError: there is no linker, or no CUDA compiler.
        """
        name = artefact_name(conv, algorithm, tile.as_dict(), device)
        op = self.find(name)
        if op is None:
            from im2win.builder.build import build_tile

            op = build_tile(conv, algorithm, tile, device, tuned=tuned)
            self.built += 1
            built, path = op, self.path(name, device)
            self._write(path, lambda: built.export(path))
        return name, op

    def selected(self, selection: Selection, conv: Conv2d, device: Any) -> tuple[str, Op]:
        """As `get`, for what was selected for a layer. An operator that the cache has is loaded without TVM's compiler."""
        op = self.find(selection.name)
        if op is not None:
            return selection.name, op
        from im2win.registry.backends import backend_for
        from im2win.registry.schedules import schedule_of

        tile = backend_for(device).tile(schedule_of(selection.algorithm), selection.tile)
        return self.get(conv, selection.algorithm, tile, device, tuned=selection.tier == "exact")

    def default_choice(self, conv: Conv2d, device: Any, accuracy: Any = "float32") -> tuple[str, Any]:
        """Algorithm and tile that the analytic model ranks first, as `im2win.default_tile` returns them.

        Raises:
            ValueError: no algorithm supports the problem, or none has a legal tile for it.
        """
        from im2win.registry.ranking import default_tile

        kept = self.kept_default(conv, device, accuracy)
        if kept is not None:
            return kept
        name, tile = default_tile(conv, "auto", device, accuracy)
        path, text = self._default(conv, device, accuracy), json.dumps({"algorithm": name, "tile": tile.as_dict()}) + "\n"
        self._write(path, lambda: replace_text(path, text))
        return name, tile

    def kept_default(self, conv: Conv2d, device: Any, accuracy: Any = "float32") -> tuple[str, Any] | None:
        """The stored result of `default_choice`; None if there is none, or if the code has changed since."""
        from im2win.registry.backends import backend_for
        from im2win.registry.schedules import schedule_of

        backend = backend_for(device, accuracy)
        try:
            values = parsed(self._default(conv, device, accuracy).read_text())
            row = schedule_of(values["algorithm"])
            tile = backend.tile(row, values["tile"])
        except (OSError, ValueError, TypeError, KeyError):
            return None
        return None if backend.violations(conv, row, tile) else (row.key, tile)

    def _default(self, conv: Conv2d, device: Any, accuracy: Any) -> Path:
        path: Path = self.folder / device.name / "defaults" / f"{conv}.{accuracy}.{_package()}.json"
        return path

    def path(self, name: str, device: Any) -> Path:
        """The path of the operator of that name, whether it exists or not."""
        path: Path = self.folder / device.name / f"{name}.so"
        return path

    def _write(self, path: Path, write: Callable[[], object]) -> None:
        try:
            with locked(path.parent / ".lock"):
                write()
        except (ArtefactError, LogError, OSError) as error:
            _log.warning("nothing is kept in %s (%s): the next process builds again", self.folder, error)
