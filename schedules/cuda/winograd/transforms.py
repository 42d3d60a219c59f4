"""The transform kernels of Winograd in bands: the input transform and the output transform.

The 32 threads of a warp have neighbouring channels and store 128 bytes of V, or load 128 bytes of M, at a time. With channels last a warp
accesses pixels in the same way and needs no shared memory (`channels_last`); with channels first, pixels pass through shared memory
(`channels_first`).
"""

from __future__ import annotations

from typing import Any

from im2win.numerics.winograd_tiling import Tiles
from im2win.schedules.cuda.loaders.stored_windows import First
from im2win.schedules.cuda.winograd import channels_first, channels_last


def launch_input_transform(tiles: Tiles, data: Any, out: Any, first: First) -> None:
    """Emits the launch of the input transform, which stores V of a band.

    Args:
        data: the input. out: V [tiles of a band, positions, channels], flat.
        first: emits the first image and output row of the band.
    """
    kernels = channels_first if tiles.conv.layout == "NCHW" else channels_last
    kernels.input_transform(tiles, data, out, first)


def launch_output_transform(tiles: Tiles, products: Any, tensors: dict[str, Any], first: First) -> None:
    """Emits the launch of the output transform, which stores the outputs of a band with bias, residual and activation.

    Args:
        products: M [tiles of a band, positions, output channels], flat.
        tensors: flat views: "output", and where the problem has them "bias" [out_channels] and "residual".
        first: emits the first image and output row of the band.
    """
    kernels = channels_first if tiles.conv.layout == "NCHW" else channels_last
    kernels.output_transform(tiles, products, tensors, first)
