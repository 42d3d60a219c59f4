"""Positions in the output of the columns of a product over a halo tile."""

from __future__ import annotations

from tvm import tirx

from im2win.schedules.cuda.primitives import Expr
from im2win.schedules.cuda.tiles.halo_tiles import StagedHaloTile
from im2win.schedules.cuda.tiles.persistent import HaloTile


class Outputs:
    """Maps the columns of a product to the output, for the tile of outputs with index `output_tile`."""

    def __init__(self, field: HaloTile, output_tile: Expr) -> None:
        self._field, (down, across) = field, field.counts
        row, col = output_tile // across % down, output_tile % across
        self._corner = output_tile // (down * across), row * field.tile.rows, col * field.tile.cols

    @property
    def pitch(self) -> int:
        """Columns from one row of outputs to the next."""
        return self._field.pitch

    @property
    def images(self) -> int:
        """Images of a tile."""
        return self._field.images

    @property
    def run_of_outputs(self) -> int:
        """See `HaloTile.run_of_outputs`."""
        return self._field.run_of_outputs

    def at(self, down: Expr, col: Expr) -> tuple[Expr, Expr, Expr, list[Expr]]:
        """(n, m, x, conditions) of a row and a column of the tile: the output, and the conditions under which it exists."""
        field, (height, width), (n, top, left) = self._field, self._field.conv.output_size, self._corner
        conditions = [top + down < height] if height % field.tile.rows else []
        if width % field.tile.cols:
            conditions.append(left + col < width)
        return n, top + down, left + col, conditions

    def output(self, window: tuple[int, Expr]) -> tuple[Expr, Expr, Expr, list[Expr]]:
        """The same for a column of the product, given as (first of a run of eight columns, index in the run)."""
        field, tile, conditions = self._field, self._field.tile, list[Expr]()
        (row_, first), lane = divmod(window[0], field.pitch), window[1]
        down, col = tirx.const(row_, "int32"), first + lane
        if field.pitch < 8:  # the run covers several rows
            down, col = (window[0] + lane) // field.pitch, (window[0] + lane) % field.pitch
            conditions.append(down < tile.rows)
        elif first + 7 >= field.pitch:  # the run continues in the next row
            down = tirx.Select(col < field.pitch, down, down + 1)
            col = tirx.Select(col < field.pitch, col, col - field.pitch)
            if row_ + 1 >= tile.rows:
                conditions.append(down < tile.rows)
        if first + 7 >= tile.cols:
            conditions.append(col < tile.cols)
        n, m, x, inside = self.at(down, col)
        return n, m, x, [*conditions, *inside]


class StagedOutputs(Outputs):
    """`Outputs` of the warp-specialized kernel, whose tiles may have several images."""

    _field: StagedHaloTile

    def __init__(self, field: StagedHaloTile, output_tile: Expr) -> None:
        super().__init__(field, output_tile)
        n, top, left = self._corner
        self._corner = n * field.tile.images, top, left

    def output(self, window: tuple[int, Expr]) -> tuple[Expr, Expr, Expr, list[Expr]]:
        """(n, m, x, conditions) of a column, given as (first of a run of eight columns, index in the run)."""
        tile, conv = self._field.tile, self._field.conv
        image, down, col, conditions = self.place(window)
        n, top, left = self._corner
        place, sizes = (n + image, top + down, left + col), (tile.images, tile.rows, tile.cols)
        ends = zip(place, (conv.batch, *conv.output_size), sizes, strict=True)
        conditions += [value < end for value, end, size in ends if end % size]
        return *place, conditions

    @property
    def corner(self) -> tuple[Expr, Expr, Expr]:
        """(first image, first row, first column) of the tile."""
        return self._corner

    def place(self, window: tuple[int, Expr]) -> tuple[Expr, Expr, Expr, list[Expr]]:
        """(image, row, column, conditions) of a column of the product in the tile, and the conditions under which the tile has it."""
        field, tile, conditions = self._field, self._field.tile, list[Expr]()
        image, down, col = self._place(*window)
        columns = [window[0] + lane for lane in range(8)]
        places = [(*divmod(column // field.pitch, field.lines), column % field.pitch) for column in columns]
        for value, size, which in ((image, tile.images, 0), (down, tile.rows, 1), (col, tile.cols, 2)):
            if any(place[which] >= size for place in places):
                conditions.append(value < size)
        return image, down, col, conditions

    def _place(self, first: int, lane: Expr) -> tuple[Expr, Expr, Expr]:
        """(image, row, column) of a column of the product, in the tile."""
        field = self._field
        line, at = divmod(first, field.pitch)
        if field.pitch < 8:  # the run covers several rows
            line_, col = (first + lane) // field.pitch, (first + lane) % field.pitch
            return line_ // field.lines, line_ % field.lines, col
        (image, down), (later, below) = divmod(line, field.lines), divmod(line + 1, field.lines)
        if at + 7 < field.pitch:
            return tirx.const(image, "int32"), tirx.const(down, "int32"), at + lane
        here = at + lane < field.pitch  # whether the column is in the run's first row; others are in the next
        col = tirx.Select(here, at + lane, at + lane - field.pitch)
        return self._either(here, image, later), self._either(here, down, below), col

    @staticmethod
    def _either(here: Expr, first: int, second: int) -> Expr:
        return tirx.const(first, "int32") if first == second else tirx.Select(here, tirx.const(first, "int32"), tirx.const(second, "int32"))
