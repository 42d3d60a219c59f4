"""The numbers of a CPU schedule, and the one statement of which of them are legal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from im2win.machine import Machine
from im2win.packing import FilterPack
from im2win.problem import Conv2d

ORDERS = ("cuv", "cvu")
AXES = ("channels", "windows")
VECTORS = (4, 8, 16)  # float32 lanes a vector may have


@dataclass(frozen=True)
class Tile:
    """A register tile, the strip of output rows it sweeps, and the order of the sums.

    axis: what a vector holds: "channels" (one window, `lanes` output channels; inputs are broadcast) or "windows" (one channel, `lanes`
        neighbouring windows; filters are broadcast).
    lanes: float32 elements of a vector.
    vectors: on the channels axis, vectors of channels in the register tile; on the windows axis, vectors of windows.
    rows, cols: on the channels axis, the windows of the register tile; on the windows axis `rows` output rows and `cols` channels.
    strip: output rows that one parallel step computes (for every channel block of its pass); what is staged is staged per strip.
    pass_blocks: channel blocks computed per strip before the next strip: the larger, the more often an input strip is reused; the smaller,
        the more often a filter block is.
    order: the order of the sum, outermost first: c channel, u kernel row, v kernel column. Filters are packed in it.
    unroll: steps of the sum unrolled in the micro-kernel (the innermost kernel axis as a whole, or this many channels of a 1x1 filter).
    """

    axis: str
    lanes: int
    vectors: int
    rows: int
    cols: int
    strip: int
    pass_blocks: int
    order: str
    unroll: int

    @property
    def block(self) -> int:
        """Output channels of a filter block."""
        return self.lanes * self.vectors if self.axis == "channels" else self.cols

    @property
    def pack(self) -> FilterPack:
        """How filters are packed for this tile."""
        return FilterPack(self.block, self.order)  # type: ignore[arg-type]

    @property
    def accumulators(self) -> int:
        """Vector registers that hold sums."""
        return self.rows * self.cols * self.vectors

    def as_dict(self) -> dict[str, Any]:
        """The tile as plain values, for a record or a manifest."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Tile:
        """The inverse of `as_dict`.

        Raises:
            ValueError: a field is missing, unknown or of the wrong type.
        """
        names = {field.name: field.type for field in fields(cls)}
        if set(values) != set(names):
            raise ValueError(f"tile: fields {sorted(values)} must be {sorted(names)}.")
        for name, kind in names.items():
            good = isinstance(values[name], str) if kind == "str" else isinstance(values[name], int) and not isinstance(values[name], bool)
            if not good:
                raise ValueError(f"tile: `{name}` (={values[name]!r}) must be of type {kind}.")
        return cls(**values)


def problems(conv: Conv2d, tile: Tile, machine: Machine, *, matrix: bool) -> list[str]:
    """Every rule that this tile breaks; empty if it is legal. `matrix`: the algorithm multiplies a matrix whose windows have no rows."""
    rules = [
        (tile.axis in AXES, f"`axis` (={tile.axis}) must be one of {', '.join(AXES)}"),
        (tile.order in ORDERS, f"`order` (={tile.order}) must be one of {', '.join(ORDERS)}"),
        (tile.lanes in VECTORS, f"`lanes` (={tile.lanes}) must be one of {VECTORS}"),
    ]
    counts = ("vectors", "rows", "cols", "strip", "pass_blocks", "unroll")
    rules += [(getattr(tile, name) >= 1, f"`{name}` (={getattr(tile, name)}) must be at least 1") for name in counts]
    broken = [text for holds, text in rules if not holds]
    return broken or [text for holds, text in _fits(conv, tile, machine, matrix) if not holds]


def _fits(conv: Conv2d, tile: Tile, machine: Machine, matrix: bool) -> list[tuple[bool, str]]:
    out_h, out_w = conv.output_size
    group_channels, blocks = conv.out_channels // conv.groups, tile.pack.blocks(conv)
    line = tile.strip * out_w if matrix else out_w
    windows = tile.cols if tile.axis == "channels" else tile.vectors * tile.lanes
    # A tile of more windows than a line has only computes a smaller tile; the one that fits is the same kernel, so only that one is legal.
    whole_vectors = -(-line // tile.lanes) * tile.lanes
    return [
        (tile.lanes <= machine.lanes, f"`lanes` (={tile.lanes}) must be at most the machine's {machine.lanes}"),
        # sums, one K step of the other vector operand, and one broadcast
        (tile.accumulators + tile.vectors + 1 <= machine.registers + 1, f"sums and operands must fit the {machine.registers} registers"),
        (windows <= (line if tile.axis == "channels" else whole_vectors), f"the tile's windows (={windows}) must fit the line (={line})"),
        (not matrix or tile.rows == 1, "`rows` must be 1: the windows of a matrix have no rows"),
        (not matrix or tile.axis == "channels" or tile.strip == 1, "`strip` must be 1: vectors of a matrix's windows stay in one row"),
        (out_h % tile.strip == 0, f"`strip` (={tile.strip}) must divide the output's rows (={out_h})"),
        (matrix or tile.strip % tile.rows == 0, f"`rows` (={tile.rows}) must divide `strip` (={tile.strip})"),
        (blocks % tile.pass_blocks == 0, f"`pass_blocks` (={tile.pass_blocks}) must divide the channel blocks (={blocks})"),
        # a group's last block may be padded only when it is the layer's last block
        (
            group_channels % tile.block == 0 or (conv.groups == 1 and tile.axis == "channels"),
            f"the block (={tile.block}) must divide a group's channels (={group_channels})",
        ),
        (
            tile.axis == "windows" or tile.block < group_channels + tile.lanes,
            f"the block (={tile.block}) must not hold a whole vector of padding beyond {group_channels} channels",
        ),
        (
            tile.axis == "windows" or tile.strip * out_w * tile.block * 4 <= machine.l2_bytes // 2,
            f"a strip's block of outputs must fit half of the level-2 cache (={machine.l2_bytes})",
        ),
        (tile.axis == "channels" or conv.layout == "NCHW", "vectors of windows need NCHW"),
    ]


def scratch_bytes(conv: Conv2d, tile: Tile, *, matrix: bool) -> int:
    """Bytes of outputs that one thread holds on their way out: a strip's block in [window][channel] form, and its turned form."""
    if tile.axis == "windows":
        return 0
    line = conv.output_size[1] * (tile.strip if matrix else 1)
    lines = 1 if matrix else tile.strip
    turned = conv.residual and conv.layout == "NCHW" and (conv.out_channels // conv.groups) % tile.block == 0
    # the rest of a line is computed by a smaller tile, but the buffer has room for a whole one
    rows = lines * line + (-line % tile.cols)
    return conv.itemsize * (rows * tile.block + (tile.lanes * tile.strip * conv.output_size[1] if turned else 0))
