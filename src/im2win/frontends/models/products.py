"""Products of two computed matrices on CPUs, those of attention: one packed copy of the right factor, then register tiles.

A product with a constant matrix is a 1x1 convolution, whose filters are packed when the model is compiled. Here the packing is a part of
every call: panels of two vectors of columns, [panel][k][column], read from the factor or from its transpose.

Nothing is padded. Where tiles do not divide the matrix, the last one overlaps the one before it, and both compute the same values there.
"""

from __future__ import annotations

import math
from typing import Any

from tvm import relax, tirx
from tvm.relax.expr_functor import PyExprMutator, mutator
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from im2win.device.cpu import Machine
from im2win.frontends.models.rows import OPAQUE, SCHEDULED

_VECTORS = 2  # of a panel


def _rows_of(rows: int, machine: Machine) -> int:
    """Rows of a register tile: as many as accumulators leave registers for, unless fewer waste fewer products at the last tile."""
    most = min(rows, (machine.registers - _VECTORS - 1) // _VECTORS)
    return min(range(max(1, most // 2), most + 1), key=lambda tile: (-(-rows // tile) * (tile + _VECTORS), -tile))


def product(count: int, rows: int, columns: int, depth: int, transposed: bool, machine: Machine) -> tirx.PrimFunc:
    """`count` products of [rows, depth] and [depth, columns], or [columns, depth] with `transposed`. A panel's columns must be there."""
    lanes = machine.lanes
    width, tile = _VECTORS * lanes, _rows_of(rows, machine)
    panels, steps = -(-columns // width), -(-rows // tile)
    with IRBuilder() as builder, T.prim_func(s_tir=True):
        T.func_name("product")
        T.func_attr({"tirx.noalias": True, SCHEDULED: True, "op_pattern": OPAQUE})
        left = T.arg("left", T.buffer((count, rows, depth), "float32"))
        right = T.arg("right", T.buffer((count, columns, depth) if transposed else (count, depth, columns), "float32"))
        out = T.arg("out", T.buffer((count, rows, columns), "float32"))
        packed = T.alloc_buffer((count, panels, depth, width), "float32")
        with T.parallel(count * panels) as item, T.serial(depth) as k, T.vectorized(width) as lane:
            one, panel = item // panels, item % panels
            column = tirx.min(panel * width, columns - width) + lane
            T.buffer_store(packed, right[(one, column, k) if transposed else (one, k, column)], [one, panel, k, lane])
        with T.parallel(count * steps) as item, T.serial(panels) as panel:
            one = item // steps
            first, column = tirx.min(item % steps * tile, rows - tile), tirx.min(panel * width, columns - width)
            sums = [[T.alloc_buffer((lanes,), "float32") for _ in range(_VECTORS)] for _ in range(tile)]
            for buffer in (each for row in sums for each in row):
                with T.vectorized(lanes) as lane:
                    T.buffer_store(buffer, tirx.const(0, "float32"), [lane])
            with T.serial(depth) as k:
                for row in range(tile):
                    for vector in range(_VECTORS):
                        with T.vectorized(lanes) as lane:
                            term = left[one, first + row, k] * packed[one, panel, k, vector * lanes + lane]
                            T.buffer_store(sums[row][vector], sums[row][vector][lane] + term, [lane])
            for row in range(tile):
                for vector in range(_VECTORS):
                    with T.vectorized(lanes) as lane:
                        T.buffer_store(out, sums[row][vector][lane], [one, first + row, column + vector * lanes + lane])
    return builder.get()


@mutator
class Products(PyExprMutator):  # type: ignore[misc]
    """Replaces `relax.matmul` of computed float32 matrices, large enough for a register tile, by `product`.

    A transposition of the right factor is a part of its packing.
    """

    def __init__(self, module: Any, machine: Machine) -> None:
        super().__init__(module)
        self._machine = machine

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = super().visit_call_(call)
        made = self._product(call) if getattr(call.op, "name", "") == "relax.matmul" else None
        return call if made is None else made

    def _product(self, call: relax.Call) -> relax.Expr | None:
        left, right = call.args
        source = self._transposed(right)
        shapes = [[int(extent) for extent in one.ty.shape] for one in (left, right, call)]
        dtypes = {str(one.ty.dtype) for one in (left, right, call)}
        given, taken, _ = shapes
        if dtypes != {"float32"} or min(map(len, shapes)) < 2 or given[:-2] != taken[:-2]:
            return None
        rows, depth, columns = given[-2], given[-1], taken[-1]
        if columns < _VECTORS * self._machine.lanes or rows < 2:
            return None
        function = product(math.prod(given[:-2]), rows, columns, depth, source is not None, self._machine)
        return relax.call_tir(self.builder_.add_func(function, "product"), [left, right if source is None else source], call.ty)

    def _transposed(self, tensor: relax.Expr) -> relax.Expr | None:
        """What the tensor is the transpose of, in its last two axes; None if it is no such transpose."""
        value = self.lookup_binding(tensor) if isinstance(tensor, relax.Var) else None
        if not isinstance(value, relax.Call) or getattr(value.op, "name", "") != "relax.permute_dims":
            return None
        rank = len(value.ty.shape)
        axes = [int(axis) for axis in value.attrs.axes] if value.attrs.axes is not None else list(reversed(range(rank)))
        return value.args[0] if axes == [*range(rank - 2), rank - 1, rank - 2] else None


def with_products(module: Any, machine: Machine) -> Any:
    """The module with its products of computed matrices replaced."""
    changed = Products(module, machine)
    for name, function in module.functions_items():
        if isinstance(function, relax.Function):
            changed.builder_.update_func(name, changed.visit_expr(function))
    return relax.transform.DeadCodeElimination()(changed.builder_.get())
