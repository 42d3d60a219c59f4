"""Loads built operators: single convolutions and whole models. Modules of other devices and of models are imported when they are needed."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

from im2win.runtime.libraries import cpu_flags
from im2win.runtime.manifest import ArtefactError, Manifest, manifest_path
from im2win.runtime.op import Op
from im2win.runtime.seal import is_sealed

if TYPE_CHECKING:
    from im2win.runtime.model import Model


def load(path: str | os.PathLike[str]) -> Op:
    """Loads an exported convolution. Needs only the TVM runtime.

    Raises:
        ArtefactError: the library or its manifest is missing, truncated, not of im2win, or built for instructions that this CPU lacks.
    """
    library = Path(path).resolve()  # the dynamic linker would search the library path for a bare name
    manifest, digest, sealed = Manifest.read(manifest_path(library))
    try:
        content = library.read_bytes()
    except OSError as error:
        raise ArtefactError(f"{library}: cannot read the library ({error.strerror}).") from None
    if hashlib.sha256(content).hexdigest() != digest:
        raise ArtefactError(f"{library}: truncated, or not the library its manifest describes (checksums differ).")
    if sealed and not is_sealed(content, manifest.facts()):
        raise ArtefactError(f"{manifest_path(library)}: changed since it was written: {library.name} is sealed with other facts.")
    if manifest.target == "cuda":
        from im2win.runtime.cuda import CudaOp

        return CudaOp(manifest, library)
    flags = cpu_flags()
    if flags and manifest.isa and manifest.isa not in flags:
        raise ArtefactError(f"{library}: built for {manifest.isa} ({manifest.machine}), which this CPU lacks; build it for this machine.")
    return Op(manifest, library)


def load_model(path: str | os.PathLike[str], *, verify: bool | None = None) -> Model:
    """Loads a compiled model. Needs only the TVM runtime and compiles nothing. Weights are read when they are first used.

    Args:
        verify: check the digest of the weights too, which reads the whole file; if False only its size. None: the digest of files of at
            most `VERIFIED_BYTES`, which takes some milliseconds.

    Raises:
        ArtefactError: a file is missing, truncated, not of im2win, or built for instructions that this CPU lacks.
    """
    from im2win.runtime.model import Model
    from im2win.runtime.model_manifest import ModelManifest, check

    library = Path(path).resolve()
    manifest = ModelManifest.read(manifest_path(library))
    weights = check(library, manifest, verify=verify)
    if manifest.target == "cuda":
        from im2win.runtime.cuda_model import CudaModel

        return CudaModel(manifest, library, weights)
    flags = cpu_flags()
    if flags and manifest.isa and manifest.isa not in flags:
        raise ArtefactError(f"{library}: built for {manifest.isa} ({manifest.machine}), which this CPU lacks; compile it for this machine.")
    return Model(manifest, library, weights)
