"""int8, uint8, bfloat16 and float16 on CPUs: dot products of words of channels.

parallel (channel pass, n, block of output rows)
    copy = input rows in words, zeros around them          # level-1 or level-2 cache
    for channel block in pass
        for register tile of windows
            sums = 0                                        # registers
            for u, v, word: sums += dot(copy, filter)
            out = epilogue(sums + offsets)                  # by way of a buffer of sums, in level-1 cache

The epilogue of AMX tiles follows the product of the next ones, so that neither waits for the other.

With axis "windows", where register tiles cross the ends of rows, the epilogue follows when all windows of a line (`geometry`) have their
sums. Elsewhere lines are the inner loop: neighbouring rows read many of the same inputs, which are still in the level-1 cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import tvm
from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from im2win.compute.dot_product import activated, bits_widened, finished, limited, scaled, summed
from im2win.schedules.cpu_dot import vectors
from im2win.schedules.cpu_dot.geometry import Geometry
from im2win.schedules.cpu_dot.instructions import (
    AVX512_LANES,
    PACKED,
    Instruction,
    definitions,
    instruction,
    narrowed,
    narrows,
    packed,
    rounded,
)
from im2win.schedules.cpu_dot.product import PERMISSION, Product, configure, release
from im2win.schedules.cpu_dot.stage import Copy
from im2win.schedules.cpu_dot.tile import DotTile
from im2win.schedules.cpu_dot.vectors import clamped, load
from im2win.spec.conv2d import STEP_NUMBERS, Conv2d
from im2win.spec.dtypes import ELEMENT_TYPES

Expr = Any


def module(conv: Conv2d, tile: DotTile, name: str) -> tvm.IRModule:
    """The kernel of a legal tile as a module with one function."""
    one = instruction(tile.instruction, conv.dtype)
    assert one is not None
    function = _Kernel(conv, tile, one).function(name)
    code = definitions(one, tile.lanes) + (PERMISSION if one.tiles else "")
    if code:
        text = tvm.ir.StringImm(code)
        function = function.with_body(tirx.AttrStmt(tirx.IntImm("int32", 0), "pragma_import_llvm", text, function.body))
    return tvm.IRModule({name: function})


def held_bytes(conv: Conv2d, tile: DotTile) -> int:
    """Bytes that packed filters take beyond the filters."""
    packed = math.prod(tile.pack.shape(conv)) * conv.itemsize
    return max(packed - math.prod(conv.filter_shape) * conv.itemsize, 0)


class _Kernel:
    """Emits the kernel of a problem with a tile."""

    def __init__(self, conv: Conv2d, tile: DotTile, one: Instruction) -> None:
        self.conv, self.tile, self.one = conv, tile, one
        self.geometry, self.pack = Geometry(conv, tile), tile.pack
        self.sums = one.sums
        self.per_group = self.pack.blocks_per_group(conv)
        self.group_channels = self.pack.single_group(conv).out_channels // self.pack.single_group(conv).groups
        self.stored = 4 // conv.itemsize
        self.block_words = (self.pack.stored(conv) + (self.sums == "int32")) * tile.block

    def function(self, name: str) -> Any:
        """The function over the tensors of `conv.arguments`."""
        conv = self.conv
        shapes = {
            "data": conv.input_shape, "filter": self.pack.shape(conv), "bias": (conv.out_channels,), "scale": (conv.scales,),
            "residual": conv.output_shape, "output": conv.output_shape,
        }  # fmt: skip
        with IRBuilder() as builder, T.prim_func(s_tir=False):
            T.func_name(name)
            T.func_attr({"global_symbol": name, "tirx.noalias": True})
            self.tensors = {}
            given = {key: T.arg(key, T.buffer(shapes[key], conv.dtypes[key])) for key in conv.arguments}
            for key, buffer in given.items():
                dtype = conv.dtypes[key]
                bits = "uint16" if ELEMENT_TYPES[dtype].narrow and key in ("data", "filter", "bias") else dtype
                self.tensors[key] = vectors.flat(buffer, math.prod(shapes[key]), bits, ELEMENT_TYPES[dtype].itemsize)
            self._body()
        return builder.get()

    def _body(self) -> None:
        conv, tile = self.conv, self.tile
        out_h = conv.output_size[0]
        row_blocks, passes = -(-out_h // tile.row_block), self.pack.blocks(conv) // tile.pass_blocks
        if self.one.tiles:
            T.evaluate(tirx.call_extern("void", "im2win_amx"))
        with T.parallel(passes * conv.batch * row_blocks) as item:
            n = T.bind(item // row_blocks % conv.batch)
            first_row = T.bind(clamped(item % row_blocks, tile.row_block, row_blocks, out_h))
            first_block = T.bind(item // (row_blocks * conv.batch) * tile.pass_blocks)
            if self.one.tiles:
                configure(self.geometry)
            self._step(n, first_row, first_block)
            if self.one.tiles:
                release()

    def _step(self, n: Expr, first_row: Expr, first_block: Expr) -> None:
        """A parallel step."""
        conv, tile, geometry = self.conv, self.tile, self.geometry
        copy = T.alloc_buffer((geometry.copied * self.one.group,), self.one.staged)
        copier = Copy(geometry, self.one, self.tensors["data"], copy)
        self.held = T.alloc_buffer((geometry.held,), self.sums)
        if self.one.tiles:  # TVM would let the sums have the copy's memory where that is not read again, but cannot type their address
            T.buffer_store(self.held, tirx.const(0, self.sums), [0])
        self.product = Product(geometry, self.one, copy, self.tensors["filter"], self.held)
        if tile.axis == "depthwise":
            with T.serial(tile.pass_blocks) as b:
                channel = T.bind(self._channel(first_block + b))
                copier.emit(n, first_row, channel)
                self._block(n, first_row, first_block + b, channel)
            return
        whole_groups = max(tile.pass_blocks // self.per_group, 1)
        with T.serial(whole_groups) as g:
            group = T.bind(first_block // self.per_group + g)
            copier.emit(n, first_row, group * (conv.in_channels // conv.groups))
            with T.serial(min(tile.pass_blocks, self.per_group)) as b:
                block = T.bind(first_block + g * self.per_group + b)
                self._block(n, first_row, block, T.bind(self._channel(block)))

    def _channel(self, block: Expr) -> Expr:
        """The first output channel of a block."""
        inside = clamped(block % self.per_group, self.tile.block, self.per_group, self.group_channels)
        return block // self.per_group * self.group_channels + inside

    def _block(self, n: Expr, first_row: Expr, block: Expr, channel: Expr) -> None:
        """The products and the epilogue of a channel block."""
        geometry, tile = self.geometry, self.tile
        words = T.bind(block * self.block_words)
        if not geometry.by_tile:
            with T.serial(geometry.tiles) as t:
                place = T.bind(clamped(t, tile.windows, geometry.tiles, geometry.line))
                self.product.emit(place, words, place, geometry.held_line)
            self._write_lines(n, first_row, words, channel)
            return
        known = {} if tile.axis == "windows" else self._numbers_of_block(words, channel)

        def write(i: Expr, sums: Expr) -> None:
            if tile.axis == "windows":
                self._write_channels(n, first_row, i, words, channel, sums)
            else:
                self._write_tile(n, first_row, i, channel, known, sums)

        count, size = geometry.lines * geometry.tiles, tile.block * tile.windows
        if not self.one.tiles or count == 1:
            with T.serial(count) as i:
                self._multiply(i, words, tirx.const(0, "int32"))
                write(i, tirx.const(0, "int32"))
            return
        with T.serial(count) as i:
            self._multiply(i, words, T.bind(i % 2 * size))
            with T.If(i > 0), T.Then():
                write(i - 1, T.bind((i + 1) % 2 * size))
        write(tirx.const(count - 1, "int32"), tirx.const((count - 1) % 2 * size, "int32"))

    def _place(self, index: Expr) -> tuple[Expr, Expr]:
        """(line of the row block, first place in it) of a register tile."""
        geometry, windows = self.geometry, self.tile.windows
        if geometry.expanded:
            return index % geometry.lines, T.bind(index // geometry.lines * windows)
        line, t = (0, index) if geometry.lines == 1 else (index // geometry.tiles, index % geometry.tiles)
        return line, T.bind(clamped(t, windows, geometry.tiles, geometry.line))

    def _multiply(self, index: Expr, words: Expr, sums: Expr) -> None:
        """The product of a register tile, whose sums begin at an element of the buffer."""
        geometry, tile = self.geometry, self.tile
        line, place = self._place(index)
        row = line * (geometry.strides[0] * geometry.size[1] * (1 if geometry.shuffled else geometry.words))
        if tile.axis == "windows":
            self.product.emit(T.bind(row + place * (geometry.strides[1] if geometry.shuffled else 1)), words, sums, tile.windows)
        else:
            self.product.emit(T.bind(row + place * (geometry.strides[1] * geometry.words)), words, sums, tile.block)

    # --- the epilogue

    def _finish(self, width: int, at: Expr, sums: Expr, number: Callable[[str], Expr], output: Any = None) -> None:
        """Stores `width` neighbouring outputs from `at` on: those of a vector, fewer, or `PACKED`.

        Args:
            sums: of the first one. number: name -> vector of offsets, biases or scales, in the type that they are used in.
            output: where to, if not to the kernel's output.
        """
        conv, tensors = self.conv, self.tensors
        output = tensors["output"] if output is None else output
        if width == PACKED:
            firsts = range(0, width, AVX512_LANES)
            quarters = [self._whole(at + first, self._scaled(AVX512_LANES, at + first, sums + first, number)) for first in firsts]
            vectors.store(output, at, packed(quarters, conv.out_dtype), width)
            return
        values = self._scaled(width, at, sums, number)
        if width == AVX512_LANES and self._converts:
            self._convert(at, values, output)
            return

        def value(lane: Expr) -> Expr:
            return finished(conv, values[lane], tensors["residual"][at + lane] if self._adds else None)

        if width == 1:
            T.buffer_store(output, value(tirx.const(0, "int32")), [at])
            return
        with T.vectorized(width) as lane:
            T.buffer_store(output, value(lane), [at + lane])

    @property
    def _adds(self) -> bool:
        """Whether the residual is added to what `_scaled` stores; else that has it already, if there is one."""
        return self.conv.residual and not self.conv.own_steps

    def _scaled(self, width: int, at: Expr, sums: Expr, number: Callable[[str], Expr]) -> Any:
        """A buffer of `width` sums with offset and bias, and scaled if outputs are requantised; arguments as for `_finish`."""
        conv = self.conv
        total = load(self.held, sums, width)
        if self.sums == "int32":
            total = total + number("offset")
        if conv.bias:
            total = total + number("bias")
        if conv.requantised:
            total = scaled(total, number("scale"), width)
        if conv.own_steps:
            steps = [vectors.splat(self.tensors["scale"][conv.out_channels + place], width) for place in range(STEP_NUMBERS)]
            total = summed(total, load(self.tensors["residual"], at, width), steps, width)
        values = T.alloc_buffer((width,), "float32" if conv.requantised else self.sums, scope="local")
        vectors.store(values, 0, total, width)
        return values

    @property
    def _converts(self) -> bool:
        """Whether outputs are what one instruction of AVX-512 makes of a vector of float32: rounded integers, or bfloat16."""
        conv = self.conv
        return ELEMENT_TYPES[conv.out_dtype].limits is not None or (conv.dtype == conv.out_dtype == "bfloat16" and narrows(self.one))

    def _convert(self, at: Expr, values: Any, output: Any) -> None:
        """Stores the outputs of a vector of sums of AVX-512, from `at` on."""
        lanes = AVX512_LANES
        if self.conv.out_dtype == "bfloat16":
            vectors.store(output, at, tirx.reinterpret(f"bfloat16x{lanes}", narrowed(self._ready(at, values))), lanes)
            return
        vectors.store(output, at, self._whole(at, values).astype(f"{self.conv.out_dtype}x{lanes}"), lanes)

    def _ready(self, at: Expr, values: Any) -> Expr:
        """A vector of outputs of AVX-512 from `at` on, in float32 and in the range of their type, of its sums."""
        conv, lanes = self.conv, AVX512_LANES
        ready = T.alloc_buffer((lanes,), "float32", scope="local")
        with T.vectorized(lanes) as lane:
            residual = self.tensors["residual"][at + lane] if self._adds else None
            T.buffer_store(ready, limited(conv, activated(conv, values[lane], residual)), [lane])
        return load(ready, 0, lanes)

    def _whole(self, at: Expr, values: Any) -> Expr:
        """`_ready` of an integer type, rounded, as int32."""
        whole, zero = rounded(self._ready(at, values)), self.conv.out_zero_point
        return whole + vectors.constant(zero, "int32", AVX512_LANES) if zero else whole

    def _offset(self, words: Expr, channel: Expr) -> Expr:
        """The offset behind a block's filters, of a channel in the block."""
        first = (words + self.pack.stored(self.conv) * self.tile.block + channel) * self.stored
        return tirx.reinterpret("int32", load(self.tensors["filter"], first, self.stored))

    def _per_channel(self) -> list[str]:
        """Arguments with a number for every output channel."""
        return [name for name in ("bias", "scale") if name in self.tensors]

    def _numbers(self, name: str, first: Expr, lanes: int) -> Expr:
        """A vector of biases or scales of neighbouring channels, in the type that they are used in."""
        value = load(self.tensors[name], first, lanes)
        return value if self.sums == "int32" else bits_widened(value, self.conv.dtype, lanes)

    def _numbers_of_block(self, words: Expr, channel: Expr) -> dict[tuple[str, int], Expr]:
        """Vectors of the offsets, biases and scales of a block's channels, which lie side by side, by (name, vector)."""
        conv, tile, lanes = self.conv, self.tile, self.tile.lanes
        known: dict[tuple[str, int], Expr] = {}
        for j in range(tile.vectors):
            if self.sums == "int32":
                first = (words + (self.pack.stored(conv) * tile.block + j * lanes)) * self.stored
                value = load(self.tensors["filter"], first, lanes * self.stored)
                known["offset", j] = T.bind(tirx.reinterpret(vectors.typed("int32", lanes), value))
            for name in self._per_channel():
                known[name, j] = T.bind(self._numbers(name, channel + j * lanes, lanes))
        return known

    def _write_tile(
        self, n: Expr, first_row: Expr, index: Expr, channel: Expr, known: dict[tuple[str, int], Expr], sums: Expr = 0
    ) -> None:
        """The epilogue of a register tile of windows with their channels side by side, whose sums begin at an element of the buffer."""
        conv, tile, geometry = self.conv, self.tile, self.geometry
        (out_h, out_w), lanes = conv.output_size, tile.lanes
        line, place = self._place(index)
        row = first_row + line
        with T.serial(tile.windows) as i:

            def write(m: Expr, x: Expr) -> None:
                at = T.bind(((n * out_h + m) * out_w + x) * conv.out_channels + channel)
                for j in range(tile.vectors):
                    numbers = {name: value for (name, vector), value in known.items() if vector == j}
                    self._finish(lanes, at + j * lanes, sums + (i * tile.block + j * lanes), numbers.__getitem__)

            if not geometry.flat or geometry.pitch == out_w:
                write(row, place + i)
                return
            across = T.bind(place + i)
            down = T.bind(across // geometry.pitch)
            x = T.bind(across - down * geometry.pitch)
            with T.If(x < out_w), T.Then():
                write(row + down, x)

    def _write_channels(self, n: Expr, first_row: Expr, index: Expr, words: Expr, channel: Expr, sums: Expr) -> None:
        """The epilogue of a register tile of neighbouring windows, of one channel after the other; `sums` as for `_write_tile`."""
        geometry, windows = self.geometry, self.tile.windows
        (out_h, out_w), tiles = self.conv.output_size, geometry.tiles
        line, place = self._place(index)
        run = min(windows, geometry.line)
        overlaps = geometry.shuffled and self.tile.lanes <= geometry.line < windows
        last = geometry.line - (tiles - 1) * windows if geometry.expanded else run  # windows of a line's last tile

        def channels(run: int) -> None:
            with T.serial(self.tile.block) as c:
                at = T.bind(((n * self.conv.out_channels + channel + c) * out_h + first_row + line) * out_w + place)
                known = self._numbers_of_channel(words, channel, c)
                if overlaps:
                    for j, first in enumerate(geometry.places):
                        self._write_run(self.tile.lanes, at + first, sums + (c * windows + j * self.tile.lanes), known)
                else:
                    self._write_run(run, at, sums + c * windows, known)

        if last == run:
            channels(run)
            return
        if tiles == 1:
            channels(last)
            return
        with T.If(index < (tiles - 1) * geometry.lines):
            with T.Then():
                channels(run)
            with T.Else():
                channels(last)

    def _write_lines(self, n: Expr, first_row: Expr, words: Expr, channel: Expr) -> None:
        """The epilogue of all windows of a line, of one channel after the other.

        Where rows are shorter than a vector, it is that of whole vectors, with places that are no windows, and rows are copied out of it.
        """
        conv, geometry = self.conv, self.geometry
        out_h, out_w = conv.output_size
        line = T.alloc_buffer((geometry.held_line,), conv.out_dtype) if geometry.finishes_lines else None
        with T.serial(self.tile.block) as c:
            known = self._numbers_of_channel(words, channel, c)
            plane = T.bind(((n * conv.out_channels + channel + c) * out_h + first_row) * out_w)
            if line is not None:
                self._write_run(geometry.held_line, tirx.const(0, "int32"), c * geometry.held_line, known, line)
                with T.serial(self.tile.row_block) as r:
                    vectors.copy(self.tensors["output"], plane + r * out_w, line, r * geometry.pitch, out_w)
                return
            with T.serial(self.tile.row_block) as r:
                self._write_run(out_w, plane + r * out_w, c * geometry.held_line + r * geometry.pitch, known)

    def _numbers_of_channel(self, words: Expr, channel: Expr, c: Expr) -> dict[str, Expr]:
        """Offset, bias and scale of a block's channel."""
        known: dict[str, Expr] = {name: T.bind(self._numbers(name, channel + c, 1)) for name in self._per_channel()}
        if self.sums == "int32":
            known["offset"] = T.bind(self._offset(words, c))
        return known

    def _write_run(self, run: int, at: Expr, sums: Expr, known: dict[str, Expr], output: Any = None) -> None:
        """The epilogue of `run` neighbouring windows of a channel: outputs from `at` on, and their sums; `output` as for `_finish`."""
        lanes = self.tile.lanes
        bytewise = lanes == AVX512_LANES and self.one.packs and self.conv.out_dtype in ("int8", "uint8")
        vectors.sweep(
            run, PACKED if bytewise and run >= PACKED else lanes,
            lambda x, width: self._finish(width, at + x, sums + x, lambda name: vectors.splat(known[name], min(width, lanes)), output),
        )  # fmt: skip
