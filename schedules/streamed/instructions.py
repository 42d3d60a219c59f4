"""What kernels of filters and windows in steps call beside the device functions of blocks that stay."""

from __future__ import annotations

import re
from pathlib import Path

_CALL = re.compile(r"im2win::start_slot<\d+>")


def slot_functions(source: str) -> str:
    """Device functions, in namespace im2win, for sources that call them; nothing for others."""
    return (Path(__file__).parent / "device.hpp").read_text() if _CALL.search(source) else ""
