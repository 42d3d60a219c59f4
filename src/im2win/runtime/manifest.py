"""The manifest of a built library: a JSON file beside it that says what the library holds."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from im2win.common.json_text import parsed
from im2win.packing import codec as packs
from im2win.runtime import rules
from im2win.spec import methods
from im2win.spec.conv2d import Conv2d, ConvError

SCHEMA, UNSEALED = 6, 5  # of today's manifests; the last whose libraries have no seal
_FIELDS = {
    "schema", "conv", "algorithm", "schedule", "tile", "pack", "target", "machine", "isa", "threads", "tuned", "extra_bytes", "tvm",
    "im2win", "library", "sha256", "made",
}  # fmt: skip
_RULES = {
    "algorithm": rules.TEXT, "schedule": rules.TEXT, "tile": rules.TILE, "target": rules.one_of("cpu", "cuda"), "machine": rules.TEXT,
    "isa": rules.TEXT, "threads": rules.count(1), "tuned": rules.FLAG, "extra_bytes": rules.count(), "tvm": rules.TEXT,
    "im2win": rules.TEXT, "library": rules.TEXT, "sha256": rules.DIGEST, "made": rules.count(),
}  # fmt: skip


class ArtefactError(ValueError):
    """A library or manifest that cannot be loaded. The message names the file and what is wrong with it."""


@dataclass(frozen=True)
class Manifest:
    """What a shared library holds, as stored in the JSON file beside it.

    Attributes:
        isa: instruction set of the CPU, or architecture of the GPU, that the library was built for.
        extra_bytes: bytes that a call allocates beside input, filter and output.
        made: on a GPU, elements of the workspace for the transformed tensor, whole or a part at a time; 0 without a transform.
    """

    conv: Conv2d
    algorithm: str
    schedule: str
    tile: dict[str, Any]
    pack: packs.Pack
    target: str
    machine: str
    isa: str
    threads: int
    tuned: bool
    extra_bytes: int
    tvm: str
    im2win: str
    made: int = 0

    @property
    def method(self) -> str:
        """Algorithm and schedule in one word."""
        return methods.key(self.algorithm, self.schedule)

    def facts(self) -> dict[str, Any]:
        """What the manifest says of any file that holds the library; see `im2win.runtime.seal`."""
        return {
            "schema": SCHEMA, "conv": str(self.conv), "algorithm": self.algorithm, "schedule": self.schedule, "tile": self.tile,
            "pack": packs.as_dict(self.pack),
            "target": self.target, "machine": self.machine, "isa": self.isa, "threads": self.threads, "tuned": self.tuned,
            "extra_bytes": self.extra_bytes, "tvm": self.tvm, "im2win": self.im2win, "made": self.made,
        }  # fmt: skip

    def to_json(self, library: Path) -> str:
        """The manifest as JSON, for the library that it describes, which is sealed with its facts."""
        named = {"library": library.name, "sha256": hashlib.sha256(library.read_bytes()).hexdigest()}
        return json.dumps({**self.facts(), **named}, indent=1) + "\n"

    @classmethod
    def read(cls, path: Path) -> tuple[Manifest, str, bool]:
        """Reads a manifest file. Returns the manifest, the library's SHA-256, and whether the library is sealed.

        Raises:
            ArtefactError: the file is missing, not JSON, or not a manifest of this schema.
        """
        values = read_values(path, "im2win build")
        if not isinstance(values, dict) or "schema" not in values:
            raise ArtefactError(f"{path}: not a manifest of im2win (its fields differ).")
        if values.get("kind") == "model":
            raise ArtefactError(f"{path}: the manifest of a whole model; `im2win.load_model` loads it.")
        sealed = values["schema"] == SCHEMA
        values = _converted(values)
        if values["schema"] not in (SCHEMA, UNSEALED):
            raise ArtefactError(f"{path}: manifest schema {values['schema']} is not {SCHEMA}; build the library again.")
        if set(values) != _FIELDS:
            raise ArtefactError(f"{path}: not a manifest of im2win (its fields differ).")
        try:
            rules.check(values, _RULES)
            conv, pack = Conv2d.parse(values["conv"]), packs.from_dict(values["pack"])
            shape = pack.shape(conv)
        except (ConvError, KeyError, TypeError, ValueError, ArithmeticError) as error:
            raise ArtefactError(f"{path}: {error}") from None
        if not 0 < math.prod(shape) < rules.MOST or min(shape) < 1:
            raise ArtefactError(f"{path}: `pack` (={values['pack']}) must be a packing of the filters of {conv}.")
        names = ("algorithm", "schedule", "tile", "target", "machine", "isa", "threads", "tuned", "extra_bytes", "tvm", "im2win")
        return cls(conv=conv, pack=pack, made=values["made"], **{name: values[name] for name in names}), values["sha256"], sealed


def _converted(values: dict[str, Any]) -> dict[str, Any]:
    """The values of a manifest of an older schema in today's schema; others are returned unchanged.

    Schema 4 had other names for some fields of tiles. Schema 3 also named an algorithm and its schedule in one word.
    """
    if values["schema"] == 3 and isinstance(values.get("algorithm"), str):
        algorithm, schedule = methods.split(values["algorithm"])
        if schedule:
            values = {**values, "schema": 4, "algorithm": algorithm, "schedule": schedule}
    if values["schema"] == 4 and "tile" in values:
        values = {**values, "schema": UNSEALED, "tile": methods.converted_tile(values["tile"])}
    return values


def read_values(path: Path, writer: str) -> Any:
    """The JSON values of a manifest file, of whatever kind.

    Args:
        writer: the command that writes such manifests, for the message.

    Raises:
        ArtefactError: the file is missing or not JSON.
    """
    try:
        return parsed(path.read_text())
    except FileNotFoundError:
        raise ArtefactError(f"{path}: no manifest there; `{writer}` writes it beside the library.") from None
    except (ValueError, OSError) as error:
        raise ArtefactError(f"{path}: not a readable manifest ({error}).") from None


def manifest_path(library: Path) -> Path:
    """The path of a library's manifest: the library's path with .json appended."""
    return library.with_name(library.name + ".json")
