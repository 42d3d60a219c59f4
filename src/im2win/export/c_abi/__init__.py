"""Exports convolutions to programs in C and C++: a header with libraries, or with CUDA source, without any dependency on TVM."""

from __future__ import annotations

import os
from pathlib import Path

from im2win.builder.build import Kernel
from im2win.device.cpu import Machine
from im2win.device.gpu import Gpu
from im2win.export.c_abi import cpu, cuda
from im2win.export.c_abi.header import Interface, checked, identifier
from im2win.registry.backends import backend_for, device_for
from im2win.registry.schedules import schedule_of
from im2win.runtime.manifest import ArtefactError, Manifest
from im2win.runtime.op import Op


def export_kernel(kernel: Kernel, folder: Path, name: str | None = None) -> tuple[Path, Interface]:
    """Writes a kernel's files: NAME.h, and libNAME.so and libNAME.a, or NAME.cu for a GPU.

    Args:
        name: suffix of the names of functions and files; the problem's key if None.

    Returns:
        The path of the library or of the source, and the contents of the header.

    Raises:
        ArtefactError: the folder cannot be written.
        ValueError: `name` cannot be part of a C identifier.
        TileError: the tile is not legal.
        ToolchainError: there is no C compiler.
    """
    called = checked(name if name is not None else identifier(str(kernel.conv)))
    try:
        if isinstance(kernel.device, Gpu):
            return cuda.export(kernel.conv, kernel.algorithm, kernel.tile, kernel.device, folder, called)
        return cpu.export(kernel.conv, kernel.algorithm, kernel.tile, kernel.device, folder, called)
    except OSError as error:
        raise ArtefactError(f"`folder` (={str(folder)!r}) must be a folder that can be written: {error.strerror or error}.") from None


def export_c(op: Op, folder: str | os.PathLike[str], name: str | None = None) -> Path:
    """Compiles an operator again for programs in C and C++; see `Op.export_c`."""
    return export_manifest(op.manifest, Path(folder), name)


def export_manifest(manifest: Manifest, folder: Path, name: str | None = None) -> Path:
    """Exports the operator that a manifest describes, for this machine. Returns the path of the library or of the source.

    Raises:
        ArtefactError: it was built for another device. Others as for `export_kernel`.
    """
    device = device_for(manifest.target)
    if isinstance(device, Machine):
        device = Machine.host(min(manifest.threads, device.threads))
    if device.name != manifest.machine:
        raise ArtefactError(f"{manifest.conv}: built for {manifest.machine}, which this machine ({device.name}) is not; export it there.")
    tile = backend_for(device).tile(schedule_of(manifest.method), manifest.tile)
    return export_kernel(Kernel(manifest.conv, manifest.method, tile, device, manifest.tuned), folder, name)[0]
