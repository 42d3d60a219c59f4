"""The registry of convolution algorithms, each a piece of mathematics. A new one is one file in compute/ and one row here.

How they run is said by `im2win.registry.schedules`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from im2win.compute import direct, im2col, im2win, implicit_gemm, mcfa, mec, winograd
from im2win.spec.conv2d import Conv2d

Define = Callable[..., list[Any]]


@dataclass(frozen=True)
class Algorithm:
    """One way to compute a convolution.

    title: what it is called in full. paper: where it is described.
    define: the tensor-expression definition: (conv, pack, row block, what else a schedule says) -> the kernel's tensors, output last.
    transform_bytes: bytes of the whole transformed tensor, the formula of its paper; 0 where there is none.
    exact: whether its outputs round as sums of products do, no more.
    """

    name: str
    title: str
    paper: str
    define: Define
    transform_bytes: Callable[[Conv2d], int]
    exact: bool = True


_ROWS = (
    Algorithm("direct", "direct convolution", "thesis Alg. 1", direct.define, direct.transform_bytes),
    Algorithm("im2win", "im2win", "thesis Alg. 2 and 3, arXiv 2306.14320", im2win.define, im2win.transform_bytes),
    Algorithm("im2col", "im2col and product", "Chellapilla et al. 2006", im2col.define, im2col.transform_bytes),
    Algorithm(
        "implicit_gemm", "implicit GEMM", "Chetlur et al. 2014, arXiv 1410.0759", implicit_gemm.define, implicit_gemm.transform_bytes
    ),
    Algorithm("mec", "MEC, memory-efficient convolution", "Cho and Brand 2017, arXiv 1706.06873", mec.define, mec.transform_bytes),
    Algorithm("mcfa", "MCFA, blocked im2col", "Fang and Chen 2019", mcfa.define, mcfa.transform_bytes),
    Algorithm(
        "winograd", "Winograd's minimal filtering", "Lavin and Gray 2015, arXiv 1509.09308", winograd.define, direct.transform_bytes, False
    ),
)
ALGORITHMS: dict[str, Algorithm] = {row.name: row for row in _ROWS}


def algorithm(name: str) -> Algorithm:
    """The algorithm of that name.

    Raises:
        ValueError: there is none; the message names those there are.
    """
    if name not in ALGORITHMS:
        raise ValueError(f"`algorithm` (={name!r}) must be one of {', '.join(ALGORITHMS)}.")
    return ALGORITHMS[name]
