"""The tile of the depthwise schedule on CPUs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from im2win.common.caching import derived
from im2win.packing.cpu_channels import ChannelPack
from im2win.schedules.cpu.tile import RegisterTile
from im2win.spec.conv2d import Conv2d


@dataclass(frozen=True)
class DepthwiseTile(RegisterTile):
    """The tile of depthwise layers: channels of a vector belong to different groups; with axis "windows" `cols` is 1, a single channel."""

    @derived
    def pack(self) -> ChannelPack:
        """The packing of filters for this tile."""
        return ChannelPack(self.block)

    @property
    def deduplication_key(self) -> tuple[Any, ...]:
        """The register tile: the tuner begins with one tile of each."""
        return "depthwise", *super().deduplication_key


def in_place(conv: Conv2d, tile: DepthwiseTile) -> bool:
    """Whether vectors are read from the input, which needs no copy then: channels side by side, each with one filter."""
    return tile.axis == "channels" and conv.layout == "NHWC" and conv.out_channels == conv.groups
