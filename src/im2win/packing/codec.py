"""Converts filter packings to the plain values that a manifest stores, and back (numpy only, no compiler)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields
from typing import Any

from im2win.packing.cpu_blocked import FilterPack
from im2win.packing.cpu_channels import ChannelPack
from im2win.packing.cpu_dot import DotPack
from im2win.packing.mma_fragments import CudaPack
from im2win.packing.split_k import SplitPack
from im2win.packing.wgmma_smem import ChunkPack
from im2win.packing.window_rows import WindowRowPack
from im2win.packing.winograd import WinogradPack
from im2win.packing.winograd_int8 import QuantisedPack

Pack = FilterPack | ChannelPack | CudaPack | WinogradPack | ChunkPack | SplitPack | QuantisedPack | DotPack | WindowRowPack

KINDS: dict[str, type[Pack]] = {
    "filters": FilterPack,
    "channels": ChannelPack,
    "cuda": CudaPack,
    "winograd": WinogradPack,
    "chunks": ChunkPack,
    "split": SplitPack,
    "quantised": QuantisedPack,
    "dot": DotPack,
    "window_rows": WindowRowPack,
}


def as_dict(pack: Pack) -> dict[str, Any]:
    """A packing as plain values, with its kind. Fields in its class's `LATER`, if any, are left out where they have their default."""
    later = {field.name: field.default for field in fields(pack) if field.name in getattr(pack, "LATER", ())}
    values = {name: value for name, value in asdict(pack).items() if name not in later or value != later[name]}
    return {"kind": next(kind for kind, one in KINDS.items() if type(pack) is one), **values}


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
