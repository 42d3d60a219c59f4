"""What kernels of Winograd's form in int8 call beside other device functions."""

from __future__ import annotations

from pathlib import Path


def tile_transforms(source: str) -> str:
    """Device functions, in namespace im2win, for sources that call them; nothing for others."""
    return (Path(__file__).parent / "device.hpp").read_text() if "im2win::quantised_tile(" in source else ""
