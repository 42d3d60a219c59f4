"""The manifest of a compiled model and the path and checks of its weights. Needs numpy only, no compiler."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from im2win.runtime import rules
from im2win.runtime.manifest import ArtefactError, manifest_path, read_values
from im2win.runtime.seal import is_sealed
from im2win.spec import methods

SCHEMA, KIND = 4, "model"
VERIFIED_BYTES = 32 << 20  # of weights whose digest is checked unless told otherwise
_OLDER = (1, 2, 3)  # schemas whose libraries have no seal
_RULES = {
    "target": rules.one_of("cpu", "cuda"), "machine": rules.TEXT, "isa": rules.TEXT, "threads": rules.count(1), "tvm": rules.TEXT,
    "im2win": rules.TEXT, "library": rules.TEXT, "sha256": rules.DIGEST, "weights": rules.TEXT, "weights_bytes": rules.count(),
    "weights_sha256": rules.DIGEST,
}  # fmt: skip
_PORT = {"name": rules.TEXT, "dtype": rules.DTYPE, "shape": rules.SHAPE, "batched": rules.FLAG}
_BUCKET = {"batch": rules.count(1), "function": rules.TEXT, "workspace": rules.count()}
_LAYER = {
    "name": rules.TEXT, "conv": rules.TEXT, "algorithm": rules.TEXT, "tile": rules.TILE, "tier": rules.TEXT, "extra_bytes": rules.count(),
}  # fmt: skip


@dataclass(frozen=True)
class Port:
    """An input or output of a model.

    Attributes:
        shape: at the first batch.
        batched: whether the first axis counts images.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    batched: bool

    def at(self, batch: int) -> tuple[int, ...]:
        """The shape with `batch` images."""
        return (batch, *self.shape[1:]) if self.batched else self.shape


@dataclass(frozen=True)
class Bucket:
    """A compiled batch: the number of images, the name of its function, and the bytes of workspace that it needs."""

    batch: int
    function: str
    workspace: int


@dataclass(frozen=True)
class ModelLayer:
    """A convolution or product of the model.

    Attributes:
        name: of the node.
        conv: key of the problem.
        tier: of the look-up that the algorithm and tile come from.
        extra_bytes: bytes that the kernel allocates beside its arguments.
    """

    name: str
    conv: str
    algorithm: str
    tile: dict[str, Any]
    tier: str
    extra_bytes: int = 0


@dataclass(frozen=True)
class ModelManifest:
    """What a compiled model holds.

    Attributes:
        skipped: convolutions that TVM compiles instead, with the reason.
        weights_bytes: size of the weights' file.
        weights_sha256, sha256: digests of the weights' file and of the library.
    """

    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    buckets: tuple[Bucket, ...]
    layers: tuple[ModelLayer, ...]
    skipped: tuple[str, ...]
    target: str
    machine: str
    isa: str
    threads: int
    tvm: str
    im2win: str
    library: str = ""
    sha256: str = ""
    weights: str = ""
    weights_bytes: int = 0
    weights_sha256: str = ""
    kind: str = field(default=KIND)
    schema: int = field(default=SCHEMA)

    def facts(self) -> dict[str, Any]:
        """What the manifest says; see `im2win.runtime.seal`."""
        return asdict(self)

    def to_json(self) -> str:
        """The manifest as JSON."""
        return json.dumps(self.facts(), indent=1) + "\n"

    @classmethod
    def read(cls, path: Path) -> ModelManifest:
        """Reads a manifest file.

        Raises:
            ArtefactError: the file is missing, not JSON, or not a manifest of this schema.
        """
        values = read_values(path, "im2win compile")
        if not isinstance(values, dict) or values.get("kind") != KIND:
            raise ArtefactError(f"{path}: not the manifest of a model; `im2win.load` reads those of single layers.")
        if values.get("schema") not in (*_OLDER, SCHEMA):
            raise ArtefactError(f"{path}: manifest schema {values.get('schema')} is not {SCHEMA}; compile the model again.")
        try:
            if values["schema"] in (1, 2):
                values = {**values, "schema": 3, "layers": [_converted(one) for one in values["layers"]]}
            rules.check(values, _RULES)
            for name, of_part in (("inputs", _PORT), ("outputs", _PORT), ("buckets", _BUCKET), ("layers", _LAYER)):
                for place, one in enumerate(values[name]):
                    rules.check(one, of_part, f"{name}[{place}].")
            if not values["buckets"]:
                raise ValueError("`buckets` must hold a compiled batch.")
            for name, kind in (("inputs", Port), ("outputs", Port), ("buckets", Bucket), ("layers", ModelLayer)):
                values[name] = tuple(kind(**one) for one in values[name])
            values["inputs"], values["outputs"] = (
                tuple(Port(one.name, one.dtype, tuple(one.shape), one.batched) for one in values[name]) for name in ("inputs", "outputs")
            )
            return cls(**{**values, "skipped": tuple(values["skipped"])})
        except (AttributeError, KeyError, TypeError) as error:
            raise ArtefactError(f"{path}: not a manifest of im2win ({error}).") from None
        except ValueError as error:
            raise ArtefactError(f"{path}: {error}") from None


def _converted(layer: dict[str, Any]) -> dict[str, Any]:
    """A layer of an older schema: schema 1 called the tier a rung, and schemas 1 and 2 had other names for some fields of tiles."""
    values = {"tier" if name == "rung" else name: value for name, value in layer.items()}
    return {**values, "tile": methods.converted_tile(values["tile"])}


def weights_path(library: Path) -> Path:
    """The path of a model's weights: the library's path with .weights appended."""
    return library.with_name(library.name + ".weights")


def digest(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal digits.

    Raises:
        ArtefactError: the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() if hasattr(hashlib, "file_digest") else _blockwise(file)
    except OSError as error:
        raise ArtefactError(f"{path}: cannot be read ({error.strerror}).") from None


def _blockwise(file: Any) -> str:  # Python 3.10
    """SHA-256 of an open file, read in blocks."""
    total = hashlib.sha256()
    while block := file.read(1 << 20):
        total.update(block)
    return total.hexdigest()


def check(library: Path, manifest: ModelManifest, *, verify: bool | None) -> Path:
    """Checks a library against its manifest, and the weights by size or by digest. Returns the weights' path.

    Args:
        verify: whether the digest of the weights is checked; None: if they have at most `VERIFIED_BYTES`.

    Raises:
        ArtefactError: a file is missing, truncated or another one.
    """
    if digest(library) != manifest.sha256:
        raise ArtefactError(f"{library}: truncated, or not the library its manifest describes (checksums differ).")
    if manifest.schema == SCHEMA and not is_sealed(library.read_bytes(), manifest.facts()):
        raise ArtefactError(f"{manifest_path(library)}: changed since it was written: {library.name} is sealed with other facts.")
    weights = library.with_name(manifest.weights)
    try:
        size = os.stat(weights).st_size
    except OSError:
        raise ArtefactError(f"{weights}: no weights there; `im2win compile` writes them beside the library.") from None
    if verify is None:
        verify = size <= VERIFIED_BYTES
    if size != manifest.weights_bytes or (verify and digest(weights) != manifest.weights_sha256):
        raise ArtefactError(f"{weights}: truncated, or not the weights that {manifest_path(library).name} describes.")
    return weights
