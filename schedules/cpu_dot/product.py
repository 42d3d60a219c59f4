"""Micro-kernels: the sums of a register tile of windows and channels, kept in vector registers or in AMX tiles until they are complete."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from tvm import tirx
from tvm.tirx.script import builder as T

from im2win.schedules.cpu_dot.geometry import Geometry
from im2win.schedules.cpu_dot.instructions import TILE_ROWS, TILE_WORDS, TILES, Instruction, multiplied
from im2win.schedules.cpu_dot.vectors import load, splat, store, typed

Expr = Any

WORD = 4  # bytes
_ROW = 64  # bytes of a row of sums in an AMX tile


class Product:
    """Emits the product of a register tile.

    Args:
        copy: the inputs, see `stage`. filters: packed filters as a flat buffer. sums: where complete sums are stored, a flat buffer.
    """

    def __init__(self, geometry: Geometry, one: Instruction, copy: Any, filters: Any, sums: Any) -> None:
        self._geometry, self._one, self._copy, self._filters, self._sums = geometry, one, copy, filters, sums
        self._conv, self._tile = geometry.conv, geometry.tile
        self._stored = WORD // self._conv.itemsize  # elements of a word of packed filters

    def emit(self, place: Expr, block: Expr, sums: Expr, sum_distance: int) -> None:
        """Emits the sums of a register tile.

        Args:
            place: word of the copy that the tile's first window begins at, without taps.
            block: word of the packed filters that the channel block begins at.
            sums: element of the first sum. sum_distance: elements from one window's sums to the next; with axis "windows" from one
                channel's to the next.
        """
        if self._one.tiles:
            self._tiles(place, block, sums, sum_distance)
        else:
            self._vectors(place, block, sums, sum_distance)

    # --- vectors

    def _word(self, buffer: Any, at: Expr, lanes: int) -> Expr:
        """A word of the copy, or of the filters, in all lanes of a vector."""
        own = buffer is self._copy
        elements = self._one.group if own else self._stored
        kind = {"float32": "float32"}.get(self._one.staged, "int32")
        value = load(buffer, at * elements, elements)
        word = value if own and elements == 1 else tirx.reinterpret(kind, value)
        return self._as_staged(splat(word, lanes), lanes)

    def _words(self, buffer: Any, at: Expr, lanes: int) -> Expr:
        """A vector of neighbouring words of the copy, or of the filters."""
        own = buffer is self._copy
        elements = self._one.group if own else self._stored
        value = load(buffer, at * elements, lanes * elements)
        return value if own else self._as_staged(value, lanes)

    def _words_of_windows(self, first: Expr, j: int) -> Expr:
        """A vector of words of neighbouring windows."""
        return self._words(self._copy, first + j * self._tile.lanes, self._tile.lanes)

    def _shuffled(self, first: Expr, j: int) -> Expr:
        """A vector of words of columns, out of neighbouring elements of a row; elements behind the kernel's last column have no filter."""
        group, lanes, stride = self._one.group, self._tile.lanes, self._geometry.strides[1]
        row = load(self._copy, first + self._geometry.places[j] * stride, lanes * group)
        return tirx.Shuffle([row], [lane * stride + e for lane in range(lanes) for e in range(group)])

    def _element(self, words: Expr, index: int, lanes: int) -> Expr:
        """One word of a vector in all its lanes, of the type of sums: LLVM knows the instruction by it."""
        whole = tirx.reinterpret(typed(self._one.sums, lanes), words)
        return self._as_staged(tirx.Shuffle([whole], [index] * lanes), lanes)

    def _as_staged(self, value: Expr, lanes: int) -> Expr:
        wanted = typed(self._one.staged, lanes * self._one.group)
        return value if str(value.ty) == wanted else tirx.reinterpret(wanted, value)

    def _vectors(self, place: Expr, block: Expr, sums: Expr, sum_distance: int) -> None:
        tile, lanes, one = self._tile, self._tile.lanes, self._one
        sum_type = typed(one.sums, lanes)
        held = [[T.alloc_buffer((lanes,), one.sums, scope="local") for _ in range(tile.vectors)] for _ in range(tile.cols)]
        for buffer in itertools.chain(*held):
            store(buffer, 0, tirx.const(0, sum_type) if lanes == 1 else splat(tirx.const(0, one.sums), lanes), lanes)

        def steps(data: Expr, taps: Expr) -> None:
            """One step of the sum or `_together`: data, taps are the first words of the first window and of the first channel."""
            operands = self._operands(data, taps)
            for k, (i, row) in itertools.product(range(self._together()), enumerate(held)):
                for j, buffer in enumerate(row):
                    store(buffer, 0, multiplied(one, load(buffer, 0, lanes), *operands(i, j, k), lanes), lanes)

        self._sum(place, block, steps)
        for i, row in enumerate(held):
            for j, buffer in enumerate(row):
                store(self._sums, sums + (i * sum_distance + j * lanes), load(buffer, 0, lanes), lanes)

    def _together(self) -> int:
        """Steps of the sum whose input words are elements of one vector, with axis "channels"; else 1."""
        tile, lanes = self._tile, self._tile.lanes
        return lanes if tile.axis == "channels" and self._one.by_element(lanes) and self._geometry.run % lanes == 0 else 1

    def _operands(self, data: Expr, taps: Expr) -> Callable[[int, int, int], tuple[Expr, Expr]]:
        """(column, vector of the register tile, step) -> its vectors of input words and of filter words, each of which is loaded once."""
        geometry, tile, lanes = self._geometry, self._tile, self._tile.lanes
        together = self._together()
        known: dict[tuple[str, int, int, int], Expr] = {}

        def once(kind: str, i: int, j: int, value: Callable[[], Expr], k: int = 0) -> Expr:
            if (kind, i, j, k) not in known:
                known[kind, i, j, k] = T.bind(value())
            return known[kind, i, j, k]

        def element(i: int) -> Expr:
            """The filter word of a channel, in all lanes: an element of a vector that those of its neighbours share."""
            first = min(i // lanes * lanes, tile.cols - lanes)
            several = once("several", first, 0, lambda: self._words(self._filters, taps + first, lanes))
            return self._element(several, i - first, lanes)

        def of(i: int, j: int, k: int) -> tuple[Expr, Expr]:
            if tile.axis == "windows":
                load_words = self._shuffled if geometry.shuffled else self._words_of_windows
                inputs = once("data", 0, j, lambda: load_words(data, j))
                if self._one.by_element(lanes) and tile.cols >= lanes:
                    return inputs, once("taps", i, 0, lambda: element(i))
                return inputs, once("taps", i, 0, lambda: self._word(self._filters, taps + i, lanes))
            filters = once("taps", 0, j, lambda: self._words(self._filters, taps + (k * tile.block + j * lanes), lanes), k)
            window = data + i * geometry.strides[1] * geometry.words
            if tile.axis == "depthwise":
                return once("data", i, j, lambda: self._words(self._copy, window + j * lanes, lanes)), filters
            if together > 1:
                several = once("several", i, 0, lambda: self._words(self._copy, window, lanes))
                word = once("data", i, 0, lambda: self._element(several, k, lanes), k)
                return (word, filters) if self._one.name == "usdot" else (filters, word)  # elements are second factors; sudot is usdot's
            return once("data", i, 0, lambda: self._word(self._copy, window, lanes)), filters

        return of

    def _sum(self, place: Expr, block: Expr, step: Callable[[Expr, Expr], None]) -> None:
        """Emits the loops over the steps of the sum; ``step(word of the copy, word of the filters)`` emits one, or `_together`."""
        geometry, conv, pack = self._geometry, self._conv, self._tile.pack
        words, run, together = pack.words(conv), geometry.run, self._together()
        if geometry.tile.axis == "channels" and geometry.over_columns:
            with T.serial(conv.kernel[0]) as u, T.serial(run // together) as q:
                k = q * together
                step(place + (geometry.offset(0, u) * geometry.size[1] * words + k), block + (u * run + k) * pack.block)
            return
        columns = 1 if geometry.tile.along == "columns" else conv.kernel[1]
        with T.serial(conv.kernel[0]) as u, T.serial(columns) as v, T.serial(words // together) as q:
            w = q * together
            taken = ((u * columns + v) * words + w) * pack.block
            step(place + geometry.tap(u, v, w), block + taken)

    # --- AMX

    def _tiles(self, place: Expr, block: Expr, sums: Expr, sum_distance: int) -> None:
        tile, geometry, one = self._tile, self._geometry, self._one
        across = tile.axis == "windows"
        rows, cols = tile.cols, tile.vectors
        registers = Registers(rows, cols)
        for accumulator in range(rows * cols):
            amx("tilezero", accumulator)

        def step(data: Expr, taps: Expr, data_distance: int) -> None:
            """A chunk of steps: its words of the copy and of the filters, and the words from one row of an input tile to the next.

            Loads come first: where another thread has a part of the core, each change from loads to products and back costs as much as one
            of either.
            """
            left, right = (taps, data) if across else (data, taps)
            filters, copy = (self._filters, self._stored), (self._copy, one.group)  # with the elements of a word
            (left_buffer, left_word), (right_buffer, right_word) = (filters, copy) if across else (copy, filters)
            left_distance = tile.pack.pitch(self._conv) if across else geometry.strides[1] * geometry.words
            right_distance = data_distance if across else tile.pack.block
            for i in range(rows):
                at = (left + i * tile.rows * left_distance) * left_word
                load_tile(registers.left(i), left_buffer, at, (tile.rows, geometry.chunk, left_distance, left_word))
            for first in range(0, cols, registers.spare):
                columns = range(first, min(first + registers.spare, cols))
                for j in columns:
                    at = (right + j * TILE_WORDS) * right_word
                    load_tile(registers.right(j), right_buffer, at, (geometry.chunk, TILE_WORDS, right_distance, right_word))
                for i, j in itertools.product(range(rows), columns):
                    amx(self._multiply(), registers.sum(i, j), registers.left(i), registers.right(j))

        self._chunks(place, block, step)
        for i in range(rows):
            for j in range(cols):
                at = sums + (i * tile.rows * sum_distance + j * TILE_WORDS)
                extent = (tile.rows - 1) * sum_distance + TILE_WORDS
                amx("tilestored64", registers.sum(i, j), pointer(self._sums, at, extent, 2), tirx.const(sum_distance * WORD, "int64"))

    def _multiply(self) -> str:
        if self._conv.dtype == "bfloat16":
            return "tdpbf16ps"
        if self._conv.dtype == "int8":
            return "tdpbssd"
        return "tdpbsud" if self._tile.axis == "windows" else "tdpbusd"

    def _chunks(self, place: Expr, block: Expr, step: Callable[[Expr, Expr, int], None]) -> None:
        """Emits the loops over chunks of the sum; ``step(word of the copy, word of the filters, input rows' distance)`` emits one."""
        geometry, conv, pack = self._geometry, self._conv, self._tile.pack
        words, run, chunk = pack.words(conv), geometry.run, geometry.chunk
        across = self._tile.axis == "windows"
        taken = chunk // pack.chunk(conv) * pack.pitch(conv) * pack.block  # words of the filters for a chunk
        if geometry.expanded:
            distance = geometry.size[1]
            with T.serial(pack.steps(conv) // run) as u, T.serial(run // chunk) as q:
                at = place + (geometry.offset(0, u) * geometry.words + q * chunk) * distance
                step(at, block + (u * (run // chunk) + q) * taken, distance)
            return
        if geometry.over_columns:
            distance = geometry.offset(1, 1) if across else 1
            with T.serial(conv.kernel[0]) as u, T.serial(run // chunk) as q:
                at = place + (geometry.tap(u, 0, 0) + q * (chunk * distance))
                step(at, block + (u * (run // chunk) + q) * taken, distance)
            return
        distance = geometry.plane if across else 1
        with T.serial(conv.kernel[0]) as u, T.serial(conv.kernel[1]) as v, T.serial(words // chunk) as q:
            at = place + (geometry.tap(u, v, 0) + q * (chunk * distance))
            step(at, block + ((u * conv.kernel[1] + v) * (words // chunk) + q) * taken, distance)


class Registers:
    """AMX's tile registers: sums first, then rows of the left factor, then columns of the right one, one or as many as are left."""

    def __init__(self, rows: int, cols: int) -> None:
        self._rows, self._cols = rows, cols
        self.spare = min(TILES - rows * cols - rows, cols)  # columns of the right factor that are held at a time
        assert self.spare >= 1

    def sum(self, i: int, j: int) -> int:
        """The register of sums of a row and a column."""
        return i * self._cols + j

    def left(self, i: int) -> int:
        """The register of the left factor's row."""
        return self._rows * self._cols + i

    def right(self, j: int) -> int:
        """The register of the right factor's column."""
        return self._rows * (self._cols + 1) + j % self.spare

    @property
    def shapes(self) -> list[str]:
        """What each register holds: "sum", "left" or "right"."""
        return ["sum"] * (self._rows * self._cols) + ["left"] * self._rows + ["right"] * self.spare


def amx(name: str, register: int, *arguments: Any) -> None:
    """Emits an AMX instruction on a tile register and others, or memory."""
    given = [tirx.const(one, "int8") if isinstance(one, int) else one for one in (register, *arguments)]
    T.evaluate(tirx.call_llvm_intrin("void", f"llvm.x86.{name}", *given))


def load_tile(register: int, buffer: Any, at: Expr, shape: tuple[int, int, int, int]) -> None:
    """Emits the load of a tile from an element on; shape: (rows, words of a row, words from one row to the next, elements of a word)."""
    rows, words, distance, elements = shape
    amx("tileloadd64", register, pointer(buffer, at, ((rows - 1) * distance + words) * elements, 1), tirx.const(distance * WORD, "int64"))


def pointer(buffer: Any, at: Expr, extent: int, access: int) -> Expr:
    """The address of an element, from which an instruction reads (access 1) or writes (2) the next `extent` elements.

    TVM shrinks buffers to what it sees is accessed: of `T.address_of` it sees one element.
    """
    return T.tvm_access_ptr(T.type_annotation(buffer.dtype), buffer.data, at, extent, access)


def configure(geometry: Geometry) -> None:
    """Emits the configuration of the tile registers for a thread."""
    tile = geometry.tile
    settings = T.alloc_buffer((64,), "uint8", scope="local")
    store(settings, 0, splat(tirx.const(0, "uint8"), 64), 64)
    T.buffer_store(settings, tirx.const(1, "uint8"), [0])  # palette
    shapes = {"sum": (tile.rows, _ROW), "left": (tile.rows, geometry.chunk * WORD), "right": (geometry.chunk, _ROW)}
    for register, kind in enumerate(Registers(tile.cols, tile.vectors).shapes):
        rows, row_bytes = shapes[kind]
        T.buffer_store(settings, tirx.const(row_bytes, "uint8"), [16 + 2 * register])
        T.buffer_store(settings, tirx.const(rows, "uint8"), [48 + register])
    T.evaluate(tirx.call_llvm_intrin("void", "llvm.x86.ldtilecfg", T.address_of(settings[0])))


def release() -> None:
    """Emits the release of the tile registers."""
    T.evaluate(tirx.call_llvm_intrin("void", "llvm.x86.tilerelease"))


PERMISSION = """
@im2win_amx_permitted = internal global i64 0
declare i64 @syscall(i64, ...)
define void @im2win_amx() noinline nounwind {
  %known = load i64, ptr @im2win_amx_permitted
  %asked = icmp ne i64 %known, 0
  br i1 %asked, label %done, label %ask
ask:
  %answer = call i64 (i64, ...) @syscall(i64 158, i64 4131, i64 18)
  store i64 1, ptr @im2win_amx_permitted
  br label %done
done:
  ret void
}
"""
"""LLVM code that asks Linux once for the permission to use AMX, which a process must have: arch_prctl(ARCH_REQ_XCOMP_PERM, 18)."""

assert TILE_ROWS == TILE_WORDS
