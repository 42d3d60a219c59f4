"""Converts filter packings to the plain values that a manifest stores, and back (numpy only, no compiler)."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, asdict, fields
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from im2win.packing.cpu_blocked import FilterPack
    from im2win.packing.cpu_channels import ChannelPack
    from im2win.packing.cpu_dot import DotPack
    from im2win.packing.mma_fragments import CudaPack
    from im2win.packing.split_k import SplitPack
    from im2win.packing.wgmma_smem import ChunkPack
    from im2win.packing.window_rows import WindowRowPack
    from im2win.packing.winograd import WinogradPack
    from im2win.packing.winograd_int8 import QuantisedPack

CpuPack: TypeAlias = "FilterPack | ChannelPack | WinogradPack | DotPack"
Pack: TypeAlias = "CpuPack | CudaPack | ChunkPack | SplitPack | QuantisedPack | WindowRowPack"

_CLASSES = {  # module and class of each kind
    "filters": ("cpu_blocked", "FilterPack"),
    "channels": ("cpu_channels", "ChannelPack"),
    "cuda": ("mma_fragments", "CudaPack"),
    "winograd": ("winograd", "WinogradPack"),
    "chunks": ("wgmma_smem", "ChunkPack"),
    "split": ("split_k", "SplitPack"),
    "quantised": ("winograd_int8", "QuantisedPack"),
    "dot": ("cpu_dot", "DotPack"),
    "window_rows": ("window_rows", "WindowRowPack"),
}
ONLY_CUDA = frozenset({"cuda", "chunks", "split", "quantised", "window_rows"})  # kinds that no library for a CPU has


class _Kinds(Mapping[str, type[Pack]]):
    """The classes by kind. A module is imported when its class is asked for: a process that runs one library needs one of them."""

    def __getitem__(self, kind: str) -> type[Pack]:
        module, name = _CLASSES[kind]
        made: type[Pack] = getattr(importlib.import_module(f"im2win.packing.{module}"), name)
        return made

    def __iter__(self) -> Iterator[str]:
        return iter(_CLASSES)

    def __len__(self) -> int:
        return len(_CLASSES)


KINDS = _Kinds()


def kind_of(pack: Pack) -> str:
    """The name of a packing's class in a manifest."""
    made = type(pack)
    return next(kind for kind, (_, name) in _CLASSES.items() if made.__name__ == name and made is KINDS[kind])


def as_dict(pack: Pack) -> dict[str, Any]:
    """A packing as plain values, with its kind. Fields in its class's `LATER`, if any, are left out where they have their default."""
    later = {field.name: field.default for field in fields(pack) if field.name in getattr(pack, "LATER", ())}
    values = {name: value for name, value in asdict(pack).items() if name not in later or value != later[name]}
    return {"kind": kind_of(pack), **values}


def from_dict(values: Any) -> Pack:
    """The inverse of `as_dict`.

    Raises:
        ValueError: an unknown kind; a field that is missing, unknown or of the wrong type. Fields with a default may be missing.
    """
    if not isinstance(values, Mapping) or values.get("kind") not in KINDS:
        raise ValueError(f"pack (={values!r}) must be of a kind among {', '.join(KINDS)}.")
    kind = KINDS[values["kind"]]
    numbers = {name: value for name, value in values.items() if name != "kind"}
    names = [field.name for field in fields(kind)]
    needed = {field.name for field in fields(kind) if field.default is MISSING}
    if not needed <= set(numbers) <= set(names):
        raise ValueError(f"pack: fields {sorted(numbers)} must be {sorted(names)}.")
    for name, value in numbers.items():
        wanted = str if name in ("form", "order", "scales", "along") else int
        if not isinstance(value, wanted) or isinstance(value, bool):
            raise ValueError(f"pack: `{name}` (={value!r}) must be of type {wanted.__name__}.")
    return kind(**numbers)
