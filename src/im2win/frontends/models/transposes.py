"""Transpositions of matrices on CPUs with the shuffles of `schedules.cpu.transpose`: between channels first and channels last, for one.

TVM's loops read or write one element at a time. Here a square of vectors is transposed in registers. Where squares do not divide the
matrix, the last one overlaps the one before it, and both write the same there.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

from tvm import relax, tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from im2win.device.cpu import Machine
from im2win.frontends.models.rows import OPAQUE, SCHEDULED
from im2win.schedules.cpu.transpose import bound, butterfly

_LEAST = 4  # vectors of a square that is worth its shuffles


def matrix_of(shape: Sequence[int], axes: Sequence[int]) -> tuple[int, int, int] | None:
    """(count, rows, columns) if a permutation of axes transposes `count` matrices; else None."""
    kept = [axis for axis in axes if shape[axis] > 1]
    order = sorted(kept)
    outer = next((place for place, (one, other) in enumerate(zip(kept, order, strict=True)) if one != other), len(kept))
    left = kept[outer:]
    for place in range(1, len(left)):
        if left[place:] + left[:place] == order[outer:]:
            rows, columns = (math.prod(shape[axis] for axis in part) for part in (left[place:], left[:place]))
            return math.prod(shape[axis] for axis in kept[:outer]), rows, columns
    return None


def transpose(count: int, rows: int, columns: int, lanes: int) -> tirx.PrimFunc:
    """`count` transposes of float32 matrices [rows, columns], each side at least `lanes`."""
    with IRBuilder() as builder, T.prim_func(s_tir=True):
        T.func_name("transpose")
        T.func_attr({"tirx.noalias": True, SCHEDULED: True, "op_pattern": OPAQUE})
        T.arg("data", T.buffer((count, rows, columns), "float32"))
        T.arg("out", T.buffer((count, columns, rows), "float32"))
        T.evaluate(0)
    function = builder.get()
    data, out = function.params
    item, block = tirx.Var("item", "int32"), tirx.Var("block", "int32")
    strips = -(-columns // lanes)
    row, column = tirx.min(block * lanes, rows - lanes), tirx.min(item % strips * lanes, columns - lanes)
    stmts: list[Any] = []
    loads = [tirx.BufferLoad(data, [item // strips, row + i, tirx.Ramp(column, 1, lanes)]) for i in range(lanes)]
    vectors = [bound(f"v{i}", load, lanes, stmts) for i, load in enumerate(loads)]
    for i, vector in enumerate(butterfly(lanes, vectors, stmts)):
        stmts.append(tirx.BufferStore(out, vector, [item // strips, column + i, tirx.Ramp(row, 1, lanes)]))
    inner = tirx.For(block, 0, -(-rows // lanes), tirx.ForKind.SERIAL, tirx.SeqStmt(stmts))
    return function.with_body(tirx.For(item, 0, count * strips, tirx.ForKind.PARALLEL, inner))


def _permute_dims(machine: Machine, builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    """`relax.permute_dims` of float32 where it transposes matrices that are large enough; other calls as they are."""
    (tensor,) = call.args
    shape = [int(extent) for extent in tensor.ty.shape]
    axes = list(reversed(range(len(shape)))) if call.attrs.axes is None else [int(axis) for axis in call.attrs.axes]
    matrix = matrix_of(shape, axes)
    if matrix is None or str(tensor.ty.dtype) != "float32":
        return call
    lanes = machine.lanes
    while lanes > min(matrix[1:]):
        lanes //= 2
    if lanes < _LEAST:
        return call
    return relax.call_tir(builder.add_func(transpose(*matrix, lanes), "transpose"), [tensor], call.ty)


def legalizations(machine: Machine) -> dict[str, Any]:
    """For `relax.transform.LegalizeOps`."""
    return {"relax.permute_dims": functools.partial(_permute_dims, machine)}
