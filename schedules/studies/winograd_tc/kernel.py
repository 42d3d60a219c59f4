"""Winograd on tensor cores as three kernels: input transform, batched products, output transform.

    V = B^T d B        M[position] = V[position] U[position]        Y = A^T M A

Each kernel is launched once, whatever the sizes. The schedule states no barriers: TVM inserts them where shared memory is written and read
(`passes`). The reconstructor then removes those that warps do not need, and fuses the first two kernels (`TensorCoreTile.rules`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from im2win.schedules.cuda.kernels.multistage import arguments
from im2win.schedules.cuda.primitives import CHUNK, Expr, named
from im2win.schedules.studies.winograd_tc.tile import WARP, Sizes, TensorCoreTile
from im2win.schedules.studies.winograd_tc.transforms import each, launch_input_transform, launch_output_transform
from im2win.spec.conv2d import Conv2d


def winograd_kernel(conv: Conv2d, tile: TensorCoreTile, name: str) -> Any:
    """The function of the whole convolution, over "input" and the tensors of `conv.arguments`.

    "data" is the workspace of `Sizes.workspace_bytes` bytes, flat. V and M are tensors of their own here; the reconstructor places those
    that remain in "data".
    """
    sizes = Sizes(conv, tile)
    with IRBuilder() as builder, T.prim_func(s_tir=False):
        T.func_name(name)
        source = T.arg("input", T.buffer(conv.input_shape, conv.dtype))
        tensors = arguments(conv, tile.pack(conv), (sizes.workspace_bytes // conv.itemsize,))  # type: ignore[arg-type]
        tiles = named("tiles", T.alloc_buffer((sizes.transformed,), conv.dtype, scope="global"))
        products = named("products", T.alloc_buffer((sizes.multiplied,), tile.arithmetic.sum_dtype, scope="global"))
        launch_input_transform(sizes, source, tiles)
        launch_products(sizes, tiles, tensors["filter"], products)
        launch_output_transform(sizes, products, tensors)
    return builder.get()


def transform_kernel(conv: Conv2d, tile: TensorCoreTile, name: str) -> Any:
    """The function (data, workspace) of the input transform by itself, to measure its time."""
    sizes = Sizes(conv, tile)
    with IRBuilder() as builder, T.prim_func(s_tir=False):
        T.func_name(name)
        data = T.arg("data", T.buffer(conv.input_shape, conv.dtype))
        out = T.arg("lowered", T.buffer((sizes.workspace_bytes // conv.itemsize,), conv.dtype))
        launch_input_transform(sizes, data, out)
    return builder.get()


# --- products


class _Fragments:
    """The WMMA fragments of a warp, `across` of tiles and `along` of filters, and their products."""

    def __init__(self, tile: TensorCoreTile, across: int, along: int) -> None:
        self.tile, self.across, self.along, self._shape = tile, across, along, tile.shape
        m, n, k = self._shape
        self._sum_dtype = tile.arithmetic.sum_dtype
        self._a = named("tiles_fragment", T.alloc_buffer((across * m * k,), tile.dtype, scope="wmma.matrix_a"))
        self._b = named("filter_fragment", T.alloc_buffer((along * k * n,), tile.dtype, scope="wmma.matrix_b"))
        self._sums = named("sums", T.alloc_buffer((across * along * m * n,), self._sum_dtype, scope="wmma.accumulator"))

    def clear(self) -> None:
        """Clears the accumulators."""
        with T.unroll(self.across * self.along) as i:
            T.evaluate(T.tvm_fill_fragment(self._sums.data, *self._shape, i, tirx.const(0, self._sum_dtype)))

    def multiply(self, a: Callable[[Expr], Expr], b: Callable[[Expr], Expr], leading: tuple[int, int]) -> None:
        """Adds the products of a step.

        Args:
            a, b: first element of a fragment. leading: elements between rows of a fragment.
        """
        with T.unroll(self.across) as i:
            T.evaluate(T.tvm_load_matrix_sync(self._a.data, *self._shape, i, a(i), leading[0], "row_major"))
        order = "col_major" if self.tile.transposed else "row_major"
        with T.unroll(self.along) as j:
            T.evaluate(T.tvm_load_matrix_sync(self._b.data, *self._shape, j, b(j), leading[1], order))
        with T.unroll(self.across) as i, T.unroll(self.along) as j:
            at = i * self.along + j
            T.evaluate(T.tvm_mma_sync(self._sums.data, at, self._a.data, i, self._b.data, j, self._sums.data, at))

    def store(self, sizes: Sizes, products: Any, start: Expr, first: tuple[Expr, Expr] = (0, 0)) -> None:
        """Writes the accumulators to M.

        Args:
            start: first element of a block and position in M. first: index in the block of the warp's first fragment.
        """
        (m, n, _), (down, right) = self._shape, sizes.product_strides
        order = "row_major" if right == 1 else "col_major"
        with T.unroll(self.across) as i, T.unroll(self.along) as j:
            to = T.address_of(products[start + (first[0] + i) * (m * down) + (first[1] + j) * (n * right)])
            T.evaluate(T.tvm_store_matrix_sync(self._sums.data, *self._shape, i * self.along + j, to, max(down, right), order))


def _staged(name: str, count: int, dtype: str) -> Any:
    return named(name, T.alloc_buffer((count,), dtype, scope="shared"))


def _inside(buffer: Any, start: Expr, extent: int) -> Expr:
    """The address of a part of shared memory that is read. TVM inserts barriers according to such addresses."""
    return T.tvm_access_ptr(T.type_annotation(buffer.dtype), buffer.data, start, extent, 1)


class _Rows(NamedTuple):
    """Layout of a step's operand in shared memory: number of rows, elements of a row, elements from a row to the next."""

    many: int
    row: int
    pitch: int


def _staged_rows(tile: TensorCoreTile) -> tuple[_Rows, _Rows]:
    """Layouts of a step's transformed tiles, and of its filters (by channel, or transposed)."""
    filters = (tile.block_n, tile.block_k) if tile.transposed else (tile.block_k, tile.block_n)
    found = [_Rows(many, row, row + tile.spare) for many, row in ((tile.block_m, tile.block_k), filters)]
    return found[0], found[1]


def _copy(to: Any, start: Expr, source: Any, rows: _Rows, threads: int, thread: Expr, where: Callable[[Expr], Expr]) -> None:
    """Copies rows to shared memory, 16 bytes a thread. where(element) is the position of an element in the source."""
    width = CHUNK // np.dtype(str(to.dtype)).itemsize

    def chunk(number: Expr) -> None:
        at = number * width
        with T.vectorized(width) as part:
            T.buffer_store(to, source[where(at) + part], [start + at // rows.row * rows.pitch + at % rows.row + part])

    each(rows.many * rows.row // width, threads, thread, chunk)


def _filter_places(sizes: Sizes, filters: Any) -> Callable[[Expr, Expr, Expr], Callable[[Expr], Expr]]:
    """(block, position, step) -> positions in U of a step's filters in their order in shared memory: by channel, or transposed by filter.
    """
    tile, depth, block_k, block_n = sizes.tile, sizes.depth, sizes.tile.block_k, sizes.tile.block_n
    if not tile.transposed:

        def by_channel(by: Expr, position: Expr, step: Expr) -> Callable[[Expr], Expr]:
            start = ((by * tile.positions + position) * depth + step * block_k) * block_n
            return lambda at: start + at

        return by_channel
    size = sizes.tile.pack(sizes.conv).shape(sizes.conv)[-1]

    def by_filter(by: Expr, position: Expr, step: Expr) -> Callable[[Expr], Expr]:
        start = by * size + position * (block_n * depth) + step * block_k
        return lambda at: start + at // block_k * depth + at % block_k

    return by_filter


def launch_products(sizes: Sizes, tiles: Any, filters: Any, products: Any) -> None:
    """Emits a launch that computes M from V and U.

    Args:
        filters: U in the order of `TensorCoreTile.pack`, flat.
    """
    tile = sizes.tile
    bound = [("blockIdx.x", sizes.blocks), ("blockIdx.y", sizes.filter_blocks), ("threadIdx.x", WARP), ("threadIdx.y", tile.warps)]
    x, y, across, down = (T.launch_thread(*one) for one in bound)
    with x as bx, y as by, across as lane, down as warp:
        if tile.mapping == "sync_free":
            _sync_free(sizes, tiles, filters, products, bx, by, lane, warp)
        else:
            with T.launch_thread("blockIdx.z", tile.positions) as bz:
                _together(sizes, tiles, filters, products, (bx, by, bz), lane, warp)


def _sync_free(sizes: Sizes, tiles: Any, filters: Any, products: Any, bx: Expr, by: Expr, lane: Expr, warp: Expr) -> None:
    """The "sync_free" mapping: a warp has the positions of a column of the tile, in all or some rows, and no other warp accesses its
    operands.
    """
    tile, depth = sizes.tile, sizes.depth
    (m, _, k), block_m, block_n, block_k = tile.shape, tile.block_m, tile.block_n, tile.block_k
    given = _staged("tiles_shared", tile.warps * sizes.staged_tiles, tile.dtype) if tile.staged else None
    used = _staged("filter_shared", tile.warps * sizes.staged_filters, tile.dtype)
    fragments, (of_tiles, of_filters) = _Fragments(tile, *tile.fragments), _staged_rows(tile)
    pitch = of_tiles.pitch if tile.staged else sizes.pitch
    from_filters = _filter_places(sizes, filters)
    with T.serial(tile.positions // tile.warps) as turn:
        position = turn * tile.warps + warp
        first = (bx * tile.positions + position) * (block_m * sizes.pitch)
        fragments.clear()
        with T.serial(depth // block_k) as step:
            if given is not None:
                _copy(given, warp * sizes.staged_tiles, tiles, of_tiles, WARP, lane,
                      lambda at: first + at // block_k * depth + step * block_k + at % block_k)  # fmt: skip
            _copy(used, warp * sizes.staged_filters, filters, of_filters, WARP, lane, from_filters(by, position, step))
            for inner in range(0, block_k, k):

                def operand(i: Expr, inner: int = inner) -> Expr:
                    if given is None:
                        return T.address_of(tiles[first + i * (m * pitch) + step * block_k + inner])
                    return _inside(given, warp * sizes.staged_tiles + i * (m * pitch) + inner, (m - 1) * pitch + k)

                def factor(j: Expr, inner: int = inner) -> Expr:
                    start, extent = _factor(tile, of_filters.pitch, j, inner)
                    return _inside(used, warp * sizes.staged_filters + start, extent)

                fragments.multiply(operand, factor, (pitch, of_filters.pitch))
        fragments.store(sizes, products, ((bx * sizes.filter_blocks + by) * tile.positions + position) * (block_m * block_n))


def _factor(tile: TensorCoreTile, pitch: int, j: Expr, inner: int) -> tuple[Expr, int]:
    """(first element of the fragment of the j-th filters in a step, `inner` channels on; elements that it extends over)."""
    _, n, k = tile.shape
    return (j * (n * pitch) + inner, (n - 1) * pitch + k) if tile.transposed else (inner * pitch + j * n, (k - 1) * pitch + n)


def _together(sizes: Sizes, tiles: Any, filters: Any, products: Any, block: tuple[Expr, Expr, Expr], lane: Expr, warp: Expr) -> None:
    """The "bgemm" mapping: a block has one position. All its warps copy both operands, wait, and multiply a fragment each."""
    tile, depth, (bx, by, position) = sizes.tile, sizes.depth, block
    (m, _, k), block_m, block_n, block_k = tile.shape, tile.block_m, tile.block_n, tile.block_k
    given, used = _staged("tiles_shared", sizes.staged_tiles, tile.dtype), _staged("filter_shared", sizes.staged_filters, tile.dtype)
    fragments, thread, (of_tiles, of_filters) = _Fragments(tile, 1, 1), warp * WARP + lane, _staged_rows(tile)
    from_filters = _filter_places(sizes, filters)
    across, along = warp // tile.fragments[1], warp % tile.fragments[1]
    first = (bx * tile.positions + position) * (block_m * depth)
    fragments.clear()
    with T.serial(depth // block_k) as step:
        _copy(given, 0, tiles, of_tiles, tile.threads, thread,
              lambda at: first + at // block_k * depth + step * block_k + at % block_k)  # fmt: skip
        _copy(used, 0, filters, of_filters, tile.threads, thread, from_filters(by, position, step))
        for inner in range(0, block_k, k):

            def operand(i: Expr, inner: int = inner) -> Expr:
                return _inside(given, across * (m * of_tiles.pitch) + inner, (m - 1) * of_tiles.pitch + k)

            def factor(j: Expr, inner: int = inner) -> Expr:
                return _inside(used, *_factor(tile, of_filters.pitch, along, inner))

            fragments.multiply(operand, factor, (of_tiles.pitch, of_filters.pitch))
    start = ((bx * sizes.filter_blocks + by) * tile.positions + position) * (block_m * block_n)
    fragments.store(sizes, products, start, (across, along))


def functions(conv: Conv2d, tile: TensorCoreTile, symbol: str, transform_symbol: str) -> dict[str, Any]:
    """The functions of a library by name, before reconstruction; the input transform alone only where it stores a tensor."""
    made = {symbol: winograd_kernel(conv, tile, symbol)}
    return made if tile.fusion == "shmem" else {**made, transform_symbol: transform_kernel(conv, tile, transform_symbol)}
