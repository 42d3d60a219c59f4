"""Names of studies and of the entries in their files: what measurements write and reports read."""

from __future__ import annotations

from collections.abc import Container, Sequence

LADDER = "ladder-"  # starts the suite's name in a ladder's result
LADDER_TRANSFORM = "transform"  # the transform alone, beside a GPU's rungs


def last_rung(names: Sequence[str], rungs: Container[str]) -> str:
    """The highest of a ladder's rungs among names; where there is none, the last name."""
    return next((name for name in reversed(names) if name in rungs), names[-1])


TAPS, ROWS, STAYS = "taps", "rows", "stays"  # kinds of tiles

SLIDING = "sliding-window"
IM2COL, DEFAULT = "im2col", "default"  # forms of ours that have no thread block to vary

WINOGRAD_TC = "winograd-tensor-cores"
PROTOTYPE, SYNCHRONOUS, WHOLE, OTHERS, INTEGERS, TVM = "prototype", "synchronous", "whole", "others", "int8", "tvm"
FUSED = ("pkf-shmem-16", "pkf-shmem-32", "pkf-llc-16", "pkf-llc-32")
REQUANTISED = "requantised"  # int8 to int8, without Winograd's form
REQUANTISED_PEER = f"{REQUANTISED}-cudnn_"  # and so on: cuDNN's algorithms by name on the same problem
INT8 = tuple(f"{INTEGERS}-{form}" for form in (PROTOTYPE, *FUSED))  # Winograd's form in int8
