"""Copies the input rows of a block of output rows into words of neighbouring channels, with zeros around them (see `geometry`).

What stands for zero is the layer's zero point. Instructions that multiply unsigned bytes get int8 inputs plus 128, and those that multiply
signed ones get uint8 inputs minus 128; the offsets behind the packed filters take that off again. Elements are converted to the type that
the instruction multiplies.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from tvm import tirx
from tvm.tirx.script import builder as T

from im2win.compute.dot_product import bits_widened
from im2win.packing.cpu_dot import added
from im2win.schedules.cpu_dot import vectors
from im2win.schedules.cpu_dot.geometry import Geometry
from im2win.schedules.cpu_dot.instructions import Instruction
from im2win.schedules.cpu_dot.vectors import constant, load, splat, store, typed

Expr = Any

WIDTH = {"uint8": 64, "int16": 32, "uint16": 32, "int32": 16, "float32": 16}  # elements of the vectors that are copied
PIXELS = 16  # neighbouring pixels that are copied at a time from planes, or of few channels
MOST_SPREAD = 64  # neighbouring elements of a row out of which words of columns are taken at a time
MOST_EXPANDED = 4  # elements of such a pixel in the copy


class Copy:
    """Emits the copy of a row block of one group, or with axis "depthwise" of one channel block.

    Args:
        data: the kernel's input as a flat buffer. copy: the buffer for the copy, of `Geometry.copied` words.
    """

    def __init__(self, geometry: Geometry, one: Instruction, data: Any, copy: Any) -> None:
        self._geometry, self._data, self._copy = geometry, data, copy
        self._one, self._conv, self._group, self._staged = one, geometry.conv, one.group, one.staged
        self._shift = added(one.shift, self._conv.dtype)
        self._fill = self._conv.zero_point + self._shift

    def emit(self, n: Expr, first_row: Expr, first_channel: Expr) -> None:
        """Emits the copy for the output rows from `first_row` on; `first_channel` of the input is the first one that is copied."""
        if self._geometry.repeated:
            self._taps(n, first_row, first_channel)
            return
        if self._geometry.shuffled:
            self._rows(n, first_row, first_channel)
            return
        copy = self._columns if self._geometry.expanded else self._planes if self._geometry.tile.axis == "windows" else self._pixels
        copy(n, first_row, first_channel)

    # --- what all axes share

    def _given(self, at: Expr, lanes: int) -> Expr:
        """A vector of neighbouring elements of the input; of bfloat16 and float16 their bits."""
        return load(self._data, at, lanes)

    def _converted(self, value: Expr, lanes: int) -> Expr:
        """Elements of the input in the type that is staged."""
        dtype, staged = self._conv.dtype, self._staged
        if staged == "float32":
            return bits_widened(value, dtype, lanes)
        if dtype == "bfloat16":
            return value
        if staged != "uint8":
            return value.astype(typed(staged, lanes))
        bits = tirx.reinterpret(typed("uint8", lanes), value) if dtype == "int8" else value
        return bits ^ constant(128, "uint8", lanes) if self._shift else bits

    def _filled(self, lanes: int) -> Expr:
        return constant(self._fill % 256 if self._staged == "uint8" else self._fill, self._staged, lanes)

    def _fill_run(self, at: Expr, count: int, to: Any = None) -> None:
        """Fills `count` elements of the copy, or of another buffer, with what stands for zero."""
        to = self._copy if to is None else to
        if count > 0:
            vectors.sweep(count, WIDTH[self._staged], lambda first, width: store(to, at + first, self._filled(width), width))

    def _copy_run(self, at: Expr, source: Expr, count: int, to: Any = None) -> None:
        """Copies `count` neighbouring elements to the copy, or to another buffer."""
        to = self._copy if to is None else to
        vectors.sweep(
            count, WIDTH[self._staged],
            lambda first, width: store(to, at + first, self._converted(self._given(source + first, width), width), width),
        )  # fmt: skip

    def _valid(self, axis: int, cycle: int, phase: int, size: int) -> tuple[int, int]:
        """The copied columns (or rows of the whole image) of a phase, first and behind the last, that lie inside the input."""
        extent, before = (self._conv.height, self._conv.width)[axis], self._conv.padding[axis]
        step = self._geometry.steps[axis] * cycle
        shift = phase * self._geometry.steps[axis] - before  # of place 0 in the input
        first = min(max(-(shift // step), 0), size)
        last = min(max(-((shift - extent) // step), first), size)
        return first, last

    def _inside(self, row: Expr, emit: Any, otherwise: Any) -> None:
        """Emits one or the other, for whether a row of the input exists."""
        if not any(self._conv.padding[::2]) and self._rows_suffice():
            emit()
            return
        with T.If(tirx.all(row >= 0, row < self._conv.height)):
            with T.Then():
                emit()
            with T.Else():
                otherwise()

    def _rows_suffice(self) -> bool:
        """Whether every row that is copied exists, without padding: rows of a phase may be more than those that windows read."""
        geometry, conv = self._geometry, self._conv
        rows = (geometry.size[0] - 1) * geometry.cycles[0] + geometry.first(0, geometry.phases[0] - 1)
        last = (conv.output_size[0] - geometry.tile.row_block) * conv.stride[0] + rows * geometry.steps[0]
        return last < conv.height

    # --- channels side by side in memory

    def _pixels(self, n: Expr, first_row: Expr, first_channel: Expr) -> None:
        geometry, conv = self._geometry, self._conv
        rows, cols = geometry.size
        elements = geometry.words * self._group
        step = geometry.steps[1]
        first, last = self._valid(1, 1, 0, cols)
        with T.serial(rows) as r:
            row = T.bind(first_row * conv.stride[0] - conv.padding[0] + r * geometry.steps[0])
            at = T.bind(r * (cols * elements))

            def copied() -> None:
                self._fill_run(at, first * elements)
                source = ((n * conv.height + row) * conv.width + (first * step - conv.padding[1])) * conv.in_channels + first_channel
                self._copy_pixels(at + first * elements, T.bind(source), last - first, step * conv.in_channels)
                self._fill_run(at + last * elements, (cols - last) * elements)

            self._inside(row, copied, lambda: self._fill_run(at, cols * elements))

    def _copy_pixels(self, at: Expr, source: Expr, count: int, distance: int) -> None:
        """Copies `count` pixels of a row, `distance` elements apart in the input."""
        geometry, conv, group = self._geometry, self._conv, self._group
        if count <= 0:
            return
        channels, elements = conv.in_channels // conv.groups, geometry.words * group
        if geometry.tile.axis == "depthwise":
            with T.serial(count) as x:
                vectors.sweep(
                    geometry.words, geometry.tile.lanes,
                    lambda c, w: self._spread(at + x * elements + c * group, source + x * distance + c, w),
                )  # fmt: skip
        elif channels == elements == distance:
            self._copy_run(at, source, count * elements)
        elif elements <= MOST_EXPANDED and distance == channels and count >= PIXELS:
            vectors.sweep(count, PIXELS, lambda x, w: self._expand(at + x * elements, source + x * channels, channels, elements))
        else:
            with T.serial(count) as x:
                self._copy_run(at + x * elements, source + x * distance, channels)
                self._fill_run(at + x * elements + channels, elements - channels)

    def _expand(self, at: Expr, source: Expr, channels: int, elements: int) -> None:
        """Copies PIXELS neighbouring pixels of few channels, which do not fill their words' `elements`."""
        count = PIXELS * channels
        given = [self._given(source + first, width) for first, width in vectors.pieces(count, PIXELS)]
        whole = self._converted(tirx.Shuffle(given, list(range(count))) if len(given) > 1 else given[0], count)
        picks = [pixel * channels + e if e < channels else count for pixel in range(PIXELS) for e in range(elements)]
        store(self._copy, at, tirx.Shuffle([whole, self._filled(PIXELS * elements)], picks), PIXELS * elements)

    def _spread(self, at: Expr, source: Expr, lanes: int) -> None:
        """Copies neighbouring channels into words of their own."""
        value = self._converted(self._given(source, lanes), lanes)
        if self._group > 1:
            same = {"uint8": "uint8", "int16": "uint16", "uint16": "uint16"}[self._staged]
            value = tirx.reinterpret(typed(same, lanes), value) if same != self._staged else value
            value = tirx.reinterpret(typed(self._staged, lanes * self._group), value.astype(typed("uint32", lanes)))
        store(self._copy, at, value, lanes * self._group)

    # --- pixels side by side in memory

    def _planes(self, n: Expr, first_row: Expr, first_channel: Expr) -> None:
        geometry, conv, group = self._geometry, self._conv, self._group
        (rows, cols), (row_phases, col_phases) = geometry.size, geometry.phases
        channels = conv.in_channels // conv.groups
        whole = channels // group

        def words(first: Expr, count: int, given: int) -> None:
            """Emits the copy of `count` words from `first` on, of `given` channels each."""
            with T.serial(count) as w, T.serial(row_phases) as p, T.serial(rows) as r:
                place = r * geometry.cycles[0] + p * (geometry.cycles[0] // row_phases)
                row = T.bind(first_row * conv.stride[0] - conv.padding[0] + place * geometry.steps[0])
                channel = first_channel + (first + w) * group
                source = T.bind(((n * conv.in_channels + channel) * conv.height + row) * conv.width)
                for phase in range(col_phases):
                    plane = (p * col_phases + phase) * geometry.words + (first + w)
                    to = T.bind((plane * geometry.plane + r * cols) * group)
                    self._inside(row, partial(self._row, to, source, phase, given), partial(self._fill_run, to, cols * group))

        if whole:
            words(tirx.const(0, "int32"), whole, group)
        if channels % group:
            words(tirx.const(whole, "int32"), 1, channels % group)

    def _taps(self, n: Expr, first_row: Expr, first_channel: Expr) -> None:
        """Copies inputs once, and out of that for each tap.

        Rows are copied one after the other in whole vectors: what one writes beyond its end the next one overwrites.
        """
        geometry, conv = self._geometry, self._conv
        once, lanes = geometry.once, PIXELS * self._group
        words = T.alloc_buffer(((once.copied + PIXELS) * self._group,), self._staged)
        Copy(once, self._one, self._data, words).emit(n, first_row, first_channel)
        (down, across), out_w = conv.kernel, conv.output_size[1]
        with T.serial(down) as u, T.serial(across) as v, T.serial(once.words) as w, T.serial(geometry.tile.row_block) as r:
            to = T.bind((((u * across + v) * once.words + w) * geometry.size[1] + r * out_w) * self._group)
            source = T.bind((once.tap(u, v, w) + r * once.pitch) * self._group)
            for x in range(0, out_w * self._group, lanes):
                store(self._copy, to + x, load(words, source + x, lanes), lanes)

    def _rows(self, n: Expr, first_row: Expr, first_channel: Expr) -> None:
        """Copies padded rows, one channel after the other."""
        geometry, conv = self._geometry, self._conv
        (rows, cols), before = geometry.size, conv.padding[1]
        given = min(conv.width, cols - before)
        with T.serial(conv.in_channels // conv.groups) as c, T.serial(rows) as r:
            row = T.bind(first_row * conv.stride[0] - conv.padding[0] + r * geometry.steps[0])
            to = T.bind((c * rows + r) * cols)
            source = T.bind(((n * conv.in_channels + first_channel + c) * conv.height + row) * conv.width)

            def copied(to: Expr = to, source: Expr = source) -> None:
                self._fill_run(to, before)
                self._copy_run(to + before, source, given)
                self._fill_run(to + (before + given), cols - before - given)

            self._inside(row, copied, partial(self._fill_run, to, cols))

    def _columns(self, n: Expr, first_row: Expr, first_channel: Expr) -> None:
        """Copies words of the kernel's columns for every window of a row, by way of padded rows if the layer has padding of columns."""
        geometry, conv, group = self._geometry, self._conv, self._group
        rows, cols = geometry.size
        channels, out_w, kernel = conv.in_channels // conv.groups, conv.output_size[1], conv.kernel[1]
        words, read = -(-kernel // group), (out_w - 1) * conv.stride[1] + kernel  # of a channel's row; elements of it that windows read
        padded = T.alloc_buffer((channels * read,), self._staged) if conv.padding[1] or conv.padding[3] else None

        def each(emit: Callable[[Expr, Expr], None], row: Expr) -> None:
            """Emits for every channel, of which it is told where the row begins in the input."""
            with T.serial(channels) as c:
                emit(c, T.bind(((n * conv.in_channels + first_channel + c) * conv.height + row) * conv.width))

        def pad(c: Expr, source: Expr) -> None:
            given = min(conv.width, read - conv.padding[1])
            self._fill_run(c * read, conv.padding[1], padded)
            self._copy_run(c * read + conv.padding[1], source, given, padded)
            self._fill_run(c * read + (conv.padding[1] + given), read - conv.padding[1] - given, padded)

        with T.serial(rows) as r:
            row = T.bind(first_row * conv.stride[0] - conv.padding[0] + r * geometry.steps[0])

            def windows(c: Expr, source: Expr) -> None:
                first = source if padded is None else c * read
                for word in range(words):
                    to = T.bind(((r * channels + c) * words + word) * (cols * group))
                    start, elements = T.bind(first + word * group), min(group, kernel - word * group)
                    vectors.sweep(out_w, self._expanded_lanes, partial(self._expand_windows, to, start, elements, padded))

            def copied() -> None:
                if padded is not None:
                    each(pad, row)
                each(windows, row)

            def zeros() -> None:
                with T.serial(channels * words) as word:
                    self._fill_run((r * (channels * words) + word) * (cols * group), out_w * group)

            self._inside(row, copied, zeros)

    @property
    def _expanded_lanes(self) -> int:
        """Windows whose words of columns are taken out of vectors at a time."""
        return max(lanes for lanes in (1, 2, 4, 8, PIXELS) if (lanes - 1) * self._conv.stride[1] + self._group <= MOST_SPREAD)

    def _expand_windows(self, to: Expr, start: Expr, elements: int, padded: Any, x: Expr, lanes: int) -> None:
        """Copies the words of neighbouring windows: of each, `elements` neighbouring ones of a row, and zeros for the rest of a word."""
        group, stride = self._group, self._conv.stride[1]
        count = (lanes - 1) * stride + elements
        width = 1 << (count.bit_length() - 1)
        starts = [0] if width == count else [0, count - width]
        if padded is None:
            given = [self._converted(self._given(start + (x * stride + first), width), width) for first in starts]
        else:
            given = [load(padded, start + (x * stride + first), width) for first in starts]
        places = [lane * stride + e if e < elements else -1 for lane in range(lanes) for e in range(group)]
        # what the second vector has as well is taken from the first
        picks = [len(starts) * width if at < 0 else at if at < width else width + at - starts[-1] for at in places]
        same = len(given) == 1 and picks == list(range(width))
        words = given[0] if same else tirx.Shuffle([*given, self._filled(lanes * group)], picks)  # no wider than what it picks from
        store(self._copy, to + x * group, words, lanes * group)

    def _row(self, at: Expr, source: Expr, phase: int, given: int) -> None:
        """Copies a row of a phase from the planes of `given` channels."""
        geometry, conv, group = self._geometry, self._conv, self._group
        cols = geometry.size[1]
        place, cycle = geometry.first(1, phase), geometry.cycles[1]
        first, last = self._valid(1, cycle, place, cols)
        step = geometry.steps[1] * cycle
        start = source + (first * step + place * geometry.steps[1] - conv.padding[1])
        self._fill_run(at, first * group)
        if last > first:
            vectors.sweep(
                last - first, PIXELS, lambda x, w: self._interleave(at + (first + x) * group, start + x * step, w, step, given)
            )
        self._fill_run(at + last * group, (cols - last) * group)

    def _interleave(self, at: Expr, source: Expr, lanes: int, step: int, given: int) -> None:
        """Copies neighbouring pixels, `step` elements apart in the planes, into words."""
        conv, group = self._conv, self._group
        plane = conv.height * conv.width
        parts = [self._converted(self._strided(source + e * plane, lanes, step), lanes) for e in range(given)]
        if group == 1:
            store(self._copy, at, parts[0], lanes)
            return
        parts += [splat(self._filled(1), lanes)] * (group - given)
        store(self._copy, at, tirx.Shuffle(parts, [e * lanes + lane for lane in range(lanes) for e in range(group)]), lanes * group)

    def _strided(self, source: Expr, lanes: int, step: int) -> Expr:
        """Elements `step` apart: from contiguous vectors, of which the last begins so that it ends with the last element."""
        if step == 1 or lanes == 1:
            return self._given(source, lanes)
        if step == 2:
            low, high = self._given(source, lanes), self._given(source + (lanes - 1), lanes)
            picks = [2 * lane if 2 * lane < lanes else lanes + 2 * lane - (lanes - 1) for lane in range(lanes)]
            return tirx.Shuffle([low, high], picks)
        return tirx.BufferLoad(self._data, [tirx.Ramp(source, step, lanes)])
