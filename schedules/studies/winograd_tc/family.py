"""Winograd on tensor cores as a CUDA schedule: its tiles, their legality, search space and cost model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from im2win.device.gpu import Gpu
from im2win.numerics.winograd_error import quantised_forms
from im2win.numerics.winograd_tiling import Tiles, spread, square_refusal
from im2win.packing.codec import Pack
from im2win.schedules.cuda.families.base import CudaSchedule, Reconstruction
from im2win.schedules.cuda.model.multistage import Estimate
from im2win.schedules.studies.winograd_tc import kernel
from im2win.schedules.studies.winograd_tc.legality import violations
from im2win.schedules.studies.winograd_tc.model import estimate
from im2win.schedules.studies.winograd_tc.passes import PIPELINE
from im2win.schedules.studies.winograd_tc.space import space
from im2win.schedules.studies.winograd_tc.tile import ARITHMETIC, Sizes, TensorCoreTile
from im2win.spec.accuracy import Accuracy, allows
from im2win.spec.conv2d import Conv2d
from im2win.spec.dtypes import ELEMENT_TYPES
from im2win.spec.symbols import SYMBOL, TRANSFORM_PARTS


def _quantised_refusal(conv: Conv2d, accuracy: Accuracy) -> str | None:
    """Why no tile computes an int8 problem with 3x3 kernels at that accuracy; None if one does."""
    if (reason := spread(conv)) is not None:
        return reason
    if not allows(accuracy, "winograd"):
        return "int8 does not hold transformed tiles exactly; accuracy 'winograd' allows it"
    if not quantised_forms(conv):
        return f"{conv.activation} cuts off outputs of such sums, but not the errors of transformed tiles in {conv.dtype}"
    return None


@dataclass(frozen=True)
class TensorCores(CudaSchedule):
    """Input transform, products and output transform as kernels that the reconstructor fuses."""

    def transform_bytes(self, conv: Conv2d) -> int:
        """Bytes of V with four outputs along a tile's side (two in int8): t * t * Ci * tiles elements, in whichever memory."""
        outputs = 2 if ELEMENT_TYPES[conv.dtype].integer else 4
        down, across = Tiles(conv, outputs, 1, 1).counts
        return (outputs + 2) ** 2 * conv.batch * down * across * conv.in_channels * conv.itemsize

    def workspace_bytes(self, conv: Conv2d, tile: TensorCoreTile) -> int:
        """Bytes of workspace between the kernels: V unless it stays in shared memory, and M."""
        return Sizes(conv, tile).workspace_bytes

    def unsupported_reason(self, conv: Conv2d, accuracy: Accuracy) -> str | None:
        """Why no tile computes a problem with that accuracy; None if one does."""
        if conv.kernel != (3, 3):
            return f"Winograd's form on tensor cores is for kernels of 3x3, not {conv.kernel[0]}x{conv.kernel[1]}"
        if conv.dtype not in ARITHMETIC:
            return f"Winograd's form on tensor cores multiplies {' or '.join(ARITHMETIC)}, not {conv.dtype}"
        if conv.groups != 1:
            return f"Winograd's form on tensor cores is for one group, not {conv.groups}"
        if conv.requantised:
            return f"Winograd's form in int8 stores int32 outputs, not {conv.out_dtype}"
        return _quantised_refusal(conv, accuracy) if ELEMENT_TYPES[conv.dtype].integer else square_refusal(conv, accuracy)

    def tile(self, values: Mapping[str, Any]) -> TensorCoreTile:
        """The tile with these plain values.

        Raises:
            ValueError: the values are not those of a tile.
        """
        return TensorCoreTile.from_dict(values)

    def space(self, conv: Conv2d, gpu: Gpu, accuracy: Accuracy) -> list[TensorCoreTile]:
        """Every legal tile worth a trial, in a fixed order."""
        return space(conv, gpu)

    def violations(self, conv: Conv2d, tile: TensorCoreTile, gpu: Gpu) -> list[str]:
        """Every rule that a tile breaks, as a message; empty if the tile is legal."""
        reason = self.unsupported_reason(conv, "winograd")
        return violations(conv, tile, gpu) if reason is None else [reason]

    def estimate(self, conv: Conv2d, tile: TensorCoreTile, gpu: Gpu) -> Estimate:
        """The cost model's estimate for a legal tile."""
        return estimate(conv, tile, gpu)

    def pack(self, conv: Conv2d, tile: TensorCoreTile) -> Pack:
        """The packing of filters for a tile."""
        return tile.pack(conv)

    def reconstruction(self, tile: TensorCoreTile) -> Reconstruction:
        """How the reconstructor rewrites these kernels."""
        return Reconstruction(tile.rules, tile.wave, PIPELINE)

    def kernels(self, conv: Conv2d, tile: TensorCoreTile, gpu: Gpu) -> dict[str, Any]:
        """The kernels of a legal tile by name, before reconstruction."""
        return kernel.functions(conv, tile, SYMBOL, TRANSFORM_PARTS)
