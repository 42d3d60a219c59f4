"""Winograd's form in int8 as one kernel: transformed tiles stay in shared memory, products in registers, and outputs leave from there.

A warp has 16 tiles and 8 or 16 filters, and the sums of all 16 positions: of each position a lane holds the same tiles and filters, so that
the transform back takes no other lane's. Neither V nor M is ever in global memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from im2win.numerics.matvec_program import program
from im2win.numerics.winograd_int8 import LARGEST
from im2win.numerics.winograd_matrices import transform
from im2win.packing.mma_fragments import column
from im2win.packing.winograd_int8 import QuantisedPack
from im2win.schedules.cuda.epilogue.store import activated
from im2win.schedules.cuda.kernels.multistage import arguments
from im2win.schedules.cuda.primitives import CHUNK, Arena, Expr, barrier, call, local, named, pointer
from im2win.schedules.studies.winograd_tc.tile import SLAB, WARP, Sizes, TensorCoreTile
from im2win.schedules.studies.winograd_tc.transforms import both_ways, each, quantised, rounded, scales_of
from im2win.spec.conv2d import Conv2d

WORD = 4  # bytes, and channels that a thread transforms at once where they lie side by side
ROWS, PARTS, FRAGMENT = 16, 2, 4  # of a product, of a slab, and words of a product that a lane brings


def whole_kernel(conv: Conv2d, tile: TensorCoreTile, name: str) -> Any:
    """The kernel over the tensors of `conv.arguments`."""
    sizes = Sizes(conv, tile)
    with IRBuilder() as builder, T.prim_func(s_tir=False):
        T.func_name(name)
        tensors = arguments(conv, tile.pack(conv))  # type: ignore[arg-type]
        bound = [("blockIdx.x", sizes.blocks), ("blockIdx.y", sizes.filter_blocks), ("threadIdx.x", tile.threads)]
        x, y, threads = (T.launch_thread(*one) for one in bound)
        with x as bx, y as by, threads as tid:
            _Whole(sizes, tensors, bx, by, tid).run()
    return builder.get()


class _Whole:
    def __init__(self, sizes: Sizes, tensors: dict[str, Any], bx: Expr, by: Expr, tid: Expr) -> None:
        self._sizes, self._conv, self._tile, self._tensors = sizes, sizes.conv, sizes.tile, tensors
        self._bx, self._by, self._tid = bx, by, tid
        pack = sizes.tile.pack(sizes.conv)
        assert isinstance(pack, QuantisedPack)
        self._pack = pack
        lane, warp, (tiles, filters, _) = tid % WARP, tid // WARP, sizes.tile.shape
        down = sizes.tile.block_m // tiles
        self._g, self._t = lane // 4, lane % 4
        self._group, self._filter = warp % down, warp // down * filters  # of the warp, in the block
        self._cols = filters // 8
        self._run = 2 * self._cols  # neighbouring filters of a lane
        self._words = sizes.conv.layout == "NHWC" and sizes.conv.in_channels % WORD == 0
        dtype, self._unit = ("int32", 1) if self._words else ("int8", WORD)  # and how many of it are a word
        self._slabs = sizes.depth // SLAB
        shape = sizes.tile.positions, self._slabs, down, PARTS * WARP * FRAGMENT * self._unit
        self._shared = Arena(sizes.held_bytes, dtype).take("tiles", shape, dtype)
        self._sums = local("sums", (sizes.tile.positions, self._cols, 4), "int32")

    def run(self) -> None:
        """Emits the block."""
        tile, depth = self._tile, self._sizes.depth
        count = tile.block_m * depth // (WORD if self._words else 1)
        each(count, tile.threads, self._tid, self._transform_words if self._words else self._transform_one)
        with T.unroll(tile.positions) as i, T.unroll(self._cols) as j, T.unroll(4) as e:
            T.buffer_store(self._sums, tirx.const(0, "int32"), [i, j, e])
        barrier()
        with T.serial(depth // SLAB) as slab, T.unroll(tile.positions) as position:
            self._multiply(slab, position)
        with T.unroll(2) as half:
            number = self._bx * tile.block_m + self._group * ROWS + half * 8 + self._g
            with T.If(number < self._sizes.tiles), T.Then():
                self._write(number, half)

    # --- tiles of the input

    def _corner(self, number: Expr) -> tuple[Expr, Expr, Expr]:
        """Image, row and column of a tile's first output."""
        rows, cols = self._sizes.counts
        return number // (rows * cols), number // cols % rows * self._tile.outputs, number % cols * self._tile.outputs

    def _load(self, name: str, source: Any, place: Expr, c: Expr, channels: int) -> Any:
        """Registers with a tile of the input, zeros outside; source: [batch, height, width, channels], or channels first."""
        conv, t = self._conv, self._tile.size
        n, y, x = self._corner(self._bx * self._tile.block_m + place)
        given = local(name, (t, t), "int32")
        with T.unroll(t) as i, T.unroll(t) as j:
            h, w = y - conv.padding[0] + i, x - conv.padding[1] + j
            inside = tirx.all(n < conv.batch, c < channels, h >= 0, h < conv.height, w >= 0, w < conv.width)
            if conv.layout == "NCHW":
                at = ((n * channels + c) * conv.height + h) * conv.width + w
            else:
                at = ((n * conv.height + h) * conv.width + w) * channels + c
            T.buffer_store(given, T.if_then_else(inside, source[at].astype("int32"), tirx.const(0, "int32")), [i, j])
        return given

    def _transformed(self, given: Any, name: str) -> Any:
        return both_ways(program(transform(self._tile.outputs, self._conv.kernel[0]).bt), given, name, "int32")

    def _held(self, position: Expr, place: Expr, word: Expr) -> list[Expr]:
        """Where a tile's word of four channels is held: as lanes bring them to products, four words each that are one load.

        Lane 4*g + t brings words t and t + 4 of rows g and g + 8. Those are words 4*t and 4*t + 1 of the slab, and 4*t + 2 and 4*t + 3 for
        the second product: any order of the sum is right, as long as filters have the same. Rows of it change places: stores of a warp
        meet in no bank.
        """
        slab, word = word // (SLAB // WORD), word % (SLAB // WORD)
        part, t = word // 2 % 2, word // 4
        lane = T.bitwise_xor(place % 8, part) * 4 + t
        inner = (part * WARP + lane) * FRAGMENT + place // 8 % 2 + word % 2 * 2
        return [position, slab, place // ROWS, inner * self._unit]

    def _transform_one(self, at: Expr) -> None:
        """One channel of a tile: neighbouring threads have neighbours of whichever lies side by side in the input."""
        depth, t, rows = self._sizes.depth, self._tile.size, self._tile.block_m
        place, c = (at // depth, at % depth) if self._conv.layout == "NHWC" else (at % rows, at // rows)
        found = self._transformed(self._load("given", self._tensors["data"], place, c, self._conv.in_channels), "transformed")
        with T.unroll(t) as i, T.unroll(t) as j:
            value = T.min(quantised(found[i, j]), LARGEST).astype("int8")
            *held, inner = self._held(i * t + j, place, c // WORD)
            T.buffer_store(self._shared, value, [*held, inner + c % WORD])

    def _transform_words(self, at: Expr) -> None:
        """Four channels of a tile. A warp has a slab's words of tiles g and g + 8, which it stores in all banks."""
        t, channels, words_of_slab = self._tile.size, self._conv.in_channels // WORD, SLAB // WORD
        rest = at // WARP // self._slabs
        place = rest // 8 * ROWS + at // words_of_slab % 2 * 8 + rest % 8
        c = at // WARP % self._slabs * words_of_slab + at % words_of_slab
        pixels = self._conv.batch * self._conv.height * self._conv.width
        source = T.decl_buffer((pixels * channels,), "int32", data=self._tensors["data"].data)
        words = self._load("words", named("data", source), place, c, channels)
        packed = local("packed", (t, t), "int32")
        call("quantised_tile", pointer(packed, 0, 0), pointer(words, 0, 0))
        with T.unroll(t) as i, T.unroll(t) as j:
            T.buffer_store(self._shared, packed[i, j], self._held(i * t + j, place, c))

    # --- products

    def _multiply(self, slab: Expr, position: Expr) -> None:
        """Adds the products of 64 channels at a position: 16 bytes of a filter are words of both."""
        tiles, filters = local("a", (PARTS, FRAGMENT), "uint32"), local("b", (self._cols, 4), "uint32")
        for part in range(PARTS):
            lane = T.bitwise_xor(self._g, part) * 4 + self._t
            inner = (part * WARP + lane) * FRAGMENT * self._unit
            call("load_words", pointer(tiles, part, 0), pointer(self._shared, position, slab, self._group, inner))
        with T.unroll(self._cols) as j:
            row = position * self._tile.block_n + self._filter + column(j, self._g, self._run)
            at = self._by * self._pack.shape(self._conv)[1] + row * self._sizes.depth + slab * SLAB + self._t * CHUNK
            call("load_words", pointer(filters, j, 0), pointer(self._tensors["filter"], at))
        for part in range(PARTS):
            with T.unroll(self._cols) as j:
                call("product_s8", pointer(self._sums, position, j, 0), pointer(tiles, part, 0), pointer(filters, j, part * 2))

    # --- outputs

    def _write(self, number: Expr, half: Expr) -> None:
        """The outputs of a tile, of the filters that a lane has."""
        conv, tile, m, t = self._conv, self._tile, self._tile.outputs, self._tile.size
        steps = program(transform(m, conv.kernel[0]).at)
        inner = self._filter + self._t * self._run  # first filter of the lane, in the block
        scale = scales_of(self._pack, conv, self._tensors["filter"])
        channels_last = conv.layout == "NHWC"
        values = local("values", (m, m, self._run) if channels_last else (m, self._run, m), "int32")
        for r in range(self._run):
            given = local("given", (t, t), "int32")
            with T.unroll(t) as i, T.unroll(t) as j:
                T.buffer_store(given, self._sums[i * t + j, r // 2, half * 2 + r % 2], [i, j])
            found = both_ways(steps, given, "outputs", "int32")
            with T.unroll(m) as i, T.unroll(m) as j:
                value = rounded(found[i, j], scale(self._by * tile.block_n + inner + r))
                T.buffer_store(values, value, [i, j, r] if channels_last else [i, r, j])
        n, y, x = self._corner(number)
        (out_h, out_w), k = conv.output_size, self._by * tile.block_n + inner
        if channels_last:
            with T.unroll(m) as i, T.unroll(m) as j, T.If(tirx.all(y + i < out_h, x + j < out_w)), T.Then():
                at = ((n * out_h + y + i) * out_w + x + j) * conv.out_channels + k
                self._store(self._run, lambda r: values[i, j, r], at, lambda r: k + r, k, conv.out_channels)
            return
        for r in range(self._run):
            with T.unroll(m) as i, T.If(tirx.all(y + i < out_h, k + r < conv.out_channels)), T.Then():
                at = ((n * conv.out_channels + k + r) * out_h + y + i) * out_w + x
                self._store(m, lambda j, i=i, r=r: values[i, r, j], at, lambda j, r=r: k + r, x, out_w)  # type: ignore[misc]

    def _store(
        self, count: int, value: Callable[[Any], Expr], at: Expr, channel: Callable[[Any], Expr], first: Expr, extent: int
    ) -> None:
        """So many neighbours in the output from the place `at` on, by one store where none begins elsewhere than at their number.

        value, channel: of a neighbour by number. first, extent: where the first lies on the innermost axis, and how many there are.
        """
        conv, tensors = self._conv, self._tensors

        def finished(e: Any) -> Expr:
            whole = value(e)
            if conv.bias:
                whole = whole + tensors["bias"][channel(e)]
            if conv.residual:
                whole = whole + tensors["residual"][at + e]
            return activated(conv.activation, whole, "int32")

        if extent % count == 0:
            with T.If(first < extent), T.Then(), T.vectorized(count) as e:
                T.buffer_store(tensors["output"], finished(e), [at + e])
        else:
            for e in range(count):
                with T.If(first + e < extent), T.Then():
                    T.buffer_store(tensors["output"], finished(e), [at + e])
