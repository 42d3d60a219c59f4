"""Device functions of products whose operands `ldmatrix` loads from shared memory."""

from __future__ import annotations

import re
from pathlib import Path

_CALL = re.compile(r"im2win::(?:load_matrices|product_lines_)")


def matrix_loads(source: str) -> str:
    """Device functions, in namespace `im2win`, for sources that call them; "" for others."""
    return (Path(__file__).parent / "load_matrices.hpp").read_text() if _CALL.search(source) else ""
