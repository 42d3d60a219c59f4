"""The kernels of the GPU ladder written loop by loop, to compare the schedules of cuda_ladder.py with; a rung switches their parts."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from im2win.packing.cpu_blocked import FilterPack
from im2win.schedules.cuda.epilogue.store import Epilogue
from im2win.schedules.cuda.kernels import multistage as kernel
from im2win.schedules.cuda.mma.fma import Run
from im2win.schedules.cuda.primitives import Arena, Expr, barrier, local, padded
from im2win.schedules.cuda.windows import WindowSource
from im2win.schedules.studies.cuda_ladder import PLAIN, TILED, CudaRung, Sizes
from im2win.spec.conv2d import Conv2d

PLAN = WindowSource("ncmku")
VECTOR = 4  # elements of the widest load
SKEW = 4  # elements of padding behind a row of windows in shared memory, so that stores have no bank conflict


def sizes_of(rung: CudaRung) -> Sizes:
    """The tiles of a rung of the thesis."""
    return TILED if rung.blocks else PLAIN


def pack_of(rung: CudaRung) -> FilterPack:
    """The packing of filters for a rung of the thesis: in the order of a window, one by one or by block."""
    return FilterPack(sizes_of(rung).block_m if rung.blocks else 1, "cvu")


def ladder_kernel(conv: Conv2d, rung: CudaRung, name: str = "conv2d") -> Any:
    """The kernel of a rung over the tensors of `conv.arguments`; "data" is the im2win tensor. Filters are packed by `pack_of(rung)`."""
    sizes = sizes_of(rung)
    with IRBuilder() as builder, T.prim_func(s_tir=False):
        T.func_name(name)
        tensors = kernel.arguments(conv, pack_of(rung), PLAN.source(conv))
        blocks = conv.groups * -(-conv.out_channels // conv.groups // sizes.block_m)
        windows = -(-conv.batch * math.prod(conv.output_size) // sizes.block_n)
        with T.launch_thread("blockIdx.x", blocks * windows) as bx, T.launch_thread("threadIdx.x", sizes.threads) as tid:
            block = Block(conv, rung, tensors, bx % blocks, bx // blocks, tid)
            sums = Sums(block)
            operands = SharedOperands(block) if rung.shared else GlobalOperands(block)
            _add_up(block, operands, sums)
            Stores(block).write(sums)
    return builder.get()


def _add_up(block: Block, operands: GlobalOperands | SharedOperands, sums: Sums) -> None:
    """Emits the loop over steps of the sum.

    A micro-kernel that prefetches loads a term's operands before it uses those before it (Alg. 9).
    """
    rung, last = block.rung, block.sizes.block_k - 1  # odd: the next step's first operands are in the other buffer
    ahead = rung.micro_kernel and rung.prefetch
    operands.begin()
    if ahead:
        operands.load(sums, 0, 0, 0)
    with T.serial(block.steps) as step:
        operands.before(step)
        if not rung.micro_kernel:
            sums.add_dots(operands, step)
        for k in range(1 if ahead else 0, block.sizes.block_k if rung.micro_kernel else 0):
            operands.load(sums, step, k, k % 2 if ahead else 0)
            sums.add_outer((k - 1) % 2 if ahead else 0)
        operands.after(step)
        if ahead:
            block.if_more(step, lambda: operands.load(sums, step + 1, 0, 0))
            sums.add_outer(last % 2)


class Block:
    """The position of a thread block and its thread in M, N and K, and what the parts of its kernel share.

    Args:
        channels, windows: index of the block along M (all groups) and along N.
    """

    def __init__(self, conv: Conv2d, rung: CudaRung, tensors: dict[str, Any], channels: Expr, windows: Expr, tid: Expr) -> None:
        self.conv, self.rung, self.sizes, self.tensors, self.tid = conv, rung, sizes_of(rung), tensors, tid
        self.strides = PLAN.strides(conv)
        self.depth = math.prod(conv.filter_shape[1:])
        self.steps = -(-self.depth // self.sizes.block_k)
        self.windows = conv.batch * math.prod(conv.output_size)
        per_group = -(-conv.out_channels // conv.groups // self.sizes.block_m)
        self.channels, self.group = channels, channels // per_group
        self.first_channel, self.first_window = channels % per_group * self.sizes.block_m, windows * self.sizes.block_n
        self.width = VECTOR if rung.vectorized else 1  # neighbouring channels or windows of a thread
        across, down = self.sizes.lanes
        lane, warp = tid % 32, tid // 32
        # Alg. 8: the channel is threadIdx.x. With tiles, a warp is 4 x 8 threads; eight neighbours read and write neighbouring windows.
        self._a = warp % (across // 4) * 4 + lane // 8 if rung.blocks else tid % across
        self._b = warp // (across // 4) * 8 + lane % 8 if rung.blocks else tid // across
        self._across, self._down = across, down

    def channel(self, i: Expr) -> Expr:
        """Channel of the block of this thread's i-th."""
        return i // self.width * (self._across * self.width) + self._a * self.width + i % self.width

    def window(self, j: Expr) -> Expr:
        """Window of the block of this thread's j-th."""
        return j // self.width * (self._down * self.width) + self._b * self.width + j % self.width

    def output(self, window: Expr) -> tuple[Expr, Expr, Expr, list[Expr]]:
        """(n, m, x, conditions) of a window of the block: its output, and the conditions under which it exists."""
        out_h, out_w = self.conv.output_size
        p = self.first_window + window
        conditions = [p < self.windows] if self.windows % self.sizes.block_n else []
        return p // (out_h * out_w), p // out_w % out_h, p % out_w, conditions

    def start(self, window: Expr) -> Expr:
        """Address of a window's first element in the im2win tensor; windows behind the last read the last one's."""
        s = self.strides
        n, m, x, _ = self.output(T.min(self.first_window + window, self.windows - 1) - self.first_window)
        return n * s.n + m * s.m + x * s.x + self.group * (self.conv.in_channels // self.conv.groups) * s.c

    def offset(self, k: Expr) -> Expr:
        """Distance from a window's first element to term k of the sum: a window is one run, column by column (Alg. 7, lines 8 to 13)."""
        rows, cols = self.conv.kernel
        place = k % (rows * cols)
        return k // (rows * cols) * self.strides.c + place // rows * self.strides.v + place % rows * self.strides.u

    def filter(self, k: Expr, channel: Expr) -> Expr:
        """Address of a term of a packed filter."""
        if self.rung.blocks:
            return (self.channels * self.depth + k) * self.sizes.block_m + channel
        per_group = self.conv.out_channels // self.conv.groups
        return (self.group * per_group + T.min(self.first_channel + channel, per_group - 1)) * self.depth + k

    def whole(self, k: Expr, value: Expr) -> Expr:
        """A loaded value, or zero where the last step reaches beyond the sum."""
        return T.if_then_else(k < self.depth, value, tirx.const(0, "float32")) if self.depth % self.sizes.block_k else value

    def if_more(self, step: Expr, body: Callable[[], None]) -> None:
        """Emits `body` under the condition that another step follows."""
        if self.steps > 1:
            with T.If(step + 1 < self.steps), T.Then():
                body()


class Sums:
    """The accumulators of a thread [windows, channels] in registers, and a micro-kernel's operands in one or two buffers."""

    def __init__(self, block: Block) -> None:
        self._block, sizes = block, block.sizes
        self._sums = local("sums", (sizes.thread_n, sizes.thread_m), "float32")
        if block.rung.micro_kernel:
            buffers = 2 if block.rung.prefetch else 1
            self.filters = local("filter_registers", (buffers, sizes.thread_m), "float32")
            self.windows = local("window_registers", (buffers, sizes.thread_n), "float32")
        with T.unroll(sizes.thread_n) as j, T.unroll(sizes.thread_m) as i:
            T.buffer_store(self._sums, tirx.const(0, "float32"), [j, i])

    def add_outer(self, half: int) -> None:
        """The micro-kernel: adds the outer product of the operands in a buffer."""
        with T.unroll(self._block.sizes.thread_n) as j, T.unroll(self._block.sizes.thread_m) as i:
            T.buffer_store(self._sums, self._sums[j, i] + self.filters[half, i] * self.windows[half, j], [j, i])

    def add_dots(self, operands: GlobalOperands | SharedOperands, step: Expr) -> None:
        """Adds to every output its own dot product of a step.

        The loop over terms is not unrolled, or the compiler would make a micro-kernel.
        """
        block, sizes = self._block, self._block.sizes
        terms = T.min(sizes.block_k, block.depth - step * sizes.block_k) if block.depth % sizes.block_k else sizes.block_k
        with T.unroll(sizes.thread_n) as j, T.unroll(sizes.thread_m) as i, T.serial(terms, annotations={"disable_unroll": True}) as k:
            T.buffer_store(self._sums, self._sums[j, i] + operands.filter(step, k, i) * operands.window(step, k, j), [j, i])

    def each_window(self, body: Callable[[Expr, Callable[[Run], None]], None]) -> None:
        """Calls body(window, runs) for every run of windows that one store takes; runs(take) calls `take` for their accumulators."""
        run, sizes = store_width(self._block), self._block.sizes
        with T.unroll(sizes.thread_n // run) as q:

            def runs(take: Run) -> None:
                with T.unroll(sizes.thread_m) as i:
                    take(self._block.channel(i), [self._sums[q * run + e, i] for e in range(run)])

            body(self._block.window(q * run), runs)


class GlobalOperands:
    """Operands that are read from global memory where they are used."""

    def __init__(self, block: Block) -> None:
        self._block = block
        self._start = local("start", (block.sizes.thread_n,), "int32")
        with T.unroll(block.sizes.thread_n) as j:
            T.buffer_store(self._start, block.start(block.window(j)), [j])

    def begin(self) -> None:
        """Does nothing before the first step."""

    def before(self, step: Expr) -> None:
        """Does nothing before the products of a step."""

    def after(self, step: Expr) -> None:
        """Does nothing behind the products of a step."""

    def _term(self, step: Expr, k: Expr) -> Expr:
        return step * self._block.sizes.block_k + k

    def filter(self, step: Expr, k: Expr, i: Expr) -> Expr:
        """Term k of a step of this thread's i-th filter."""
        block = self._block
        return block.tensors["filter"][block.filter(self._term(step, k), block.channel(i))]

    def window(self, step: Expr, k: Expr, j: Expr) -> Expr:
        """Term k of a step of this thread's j-th window."""
        return self._block.tensors["data"][self._start[j] + self._block.offset(self._term(step, k))]

    def load(self, sums: Sums, step: Expr, k: int, half: int) -> None:
        """Loads term k of a step to registers."""
        block, term = self._block, self._term(step, k)
        with T.unroll(block.sizes.thread_m // block.width) as q, T.vectorized(block.width) as e:
            at = block.filter(term, block.channel(q * block.width) + e)
            T.buffer_store(sums.filters, block.whole(term, block.tensors["filter"][at]), [half, q * block.width + e])
        with T.unroll(block.sizes.thread_n) as j:
            T.buffer_store(sums.windows, block.whole(term, self.window(step, k, j)), [half, j])


class SharedOperands:
    """Operands of a step in shared memory, [K_B, M_B] and [K_B, N_B]: all threads load them through registers, and all read them.

    Neighbouring threads load K_B neighbouring terms of a window, which are contiguous in the im2win tensor.
    """

    def __init__(self, block: Block) -> None:
        self._block, sizes = block, block.sizes
        self._buffers = 2 if block.rung.prefetch else 1
        shapes = (self._buffers, sizes.block_k, sizes.block_m), (self._buffers, sizes.block_k, sizes.block_n + SKEW)
        arena = Arena(sum(padded(shape, "float32") for shape in shapes), "float32")
        self._filters, self._windows = (
            arena.take(name, shape, "float32") for name, shape in zip(("filters", "windows"), shapes, strict=True)
        )
        self._unit = load_width(block)
        lanes = sizes.block_k // self._unit
        self._k, self._row = block.tid % lanes * self._unit, block.tid // lanes
        self._rows = sizes.threads // lanes  # windows that all threads load at once
        count = sizes.block_n // self._rows
        self._fetched_windows = local("fetched_windows", (count, self._unit), "float32")
        self._fetched_filters = local("fetched_filters", (sizes.block_k * sizes.block_m // sizes.threads,), "float32")
        self._start, self._tap = local("start", (count,), "int32"), local("tap", (1,), "int32")
        with T.unroll(count) as i:  # addresses in units of loads, so that their alignment is evident
            T.buffer_store(self._start, block.start(self._row + i * self._rows) // self._unit, [i])

    def begin(self) -> None:
        """Before the first step: with two buffers, fills the first."""
        if self._buffers == 2:
            self._fetch(0)
            self._put(0)
            barrier()

    def before(self, step: Expr) -> None:
        """Before the products of a step: loads its operands, or with two buffers issues the loads of the next step's."""
        if self._buffers == 2:
            self._block.if_more(step, lambda: self._fetch(step + 1))
        else:
            self._fetch(step)
            self._put(0)
            barrier()

    def after(self, step: Expr) -> None:
        """Behind the products: waits until all have read this step's operands, and with two buffers stores the next step's in the other."""
        if self._buffers == 2:
            self._block.if_more(step, lambda: self._put((step + 1) % 2))
        barrier()

    def _fetch(self, step: Expr) -> None:
        """Loads this thread's part of a step to registers."""
        block, sizes, tensors = self._block, self._block.sizes, self._block.tensors
        term = step * sizes.block_k + self._k
        T.buffer_store(self._tap, block.offset(term) // self._unit, [0])
        with T.unroll(int(self._start.shape[0])) as i, T.vectorized(self._unit) as e:
            value = tensors["data"][(self._start[i] + self._tap[0]) * self._unit + e]
            T.buffer_store(self._fetched_windows, block.whole(term, value), [i, e])
        with T.unroll(int(self._fetched_filters.shape[0]) // block.width) as q, T.vectorized(block.width) as e:
            k, channel = self._filter_place(q)
            value = tensors["filter"][block.filter(step * sizes.block_k + k, channel + e)]
            T.buffer_store(self._fetched_filters, block.whole(step * sizes.block_k + k, value), [q * block.width + e])

    def _filter_place(self, q: Expr) -> tuple[Expr, Expr]:
        """(term, first channel) of this thread's q-th load of filters. Neighbouring threads load neighbours."""
        at = (q * self._block.sizes.threads + self._block.tid) * self._block.width
        return at // self._block.sizes.block_m, at % self._block.sizes.block_m

    def _put(self, slot: Expr) -> None:
        """Stores the loaded elements to shared memory."""
        with T.unroll(int(self._start.shape[0])) as i, T.unroll(self._unit) as e:
            T.buffer_store(self._windows, self._fetched_windows[i, e], [slot, self._k + e, self._row + i * self._rows])
        width = self._block.width
        with T.unroll(int(self._fetched_filters.shape[0]) // width) as q, T.vectorized(width) as e:
            k, channel = self._filter_place(q)
            T.buffer_store(self._filters, self._fetched_filters[q * width + e], [slot, k, channel + e])

    def filter(self, step: Expr, k: Expr, i: Expr) -> Expr:
        """Term k of a step of this thread's i-th filter."""
        return self._filters[step % self._buffers, k, self._block.channel(i)]

    def window(self, step: Expr, k: Expr, j: Expr) -> Expr:
        """Term k of a step of this thread's j-th window."""
        return self._windows[step % self._buffers, k, self._block.window(j)]

    def load(self, sums: Sums, step: Expr, k: int, half: int) -> None:
        """Loads term k of a step to registers."""
        block, sizes, width = self._block, self._block.sizes, self._block.width
        with T.unroll(sizes.thread_m // width) as q, T.vectorized(width) as e:
            value = self._filters[step % self._buffers, k, block.channel(q * width) + e]
            T.buffer_store(sums.filters, value, [half, q * width + e])
        with T.unroll(sizes.thread_n // width) as q, T.vectorized(width) as e:
            value = self._windows[step % self._buffers, k, block.window(q * width) + e]
            T.buffer_store(sums.windows, value, [half, q * width + e])


class Stores(Epilogue):
    """The epilogue of a rung: stores along windows, as wide as `store_width` says. The base class derives widths from a tile."""

    def __init__(self, block: Block) -> None:
        tile: Any = SimpleNamespace(block_m=block.sizes.block_m, sum_dtype="float32")  # what the base class reads of a tile
        self._conv, self._tile, self._tensors, self._operand = block.conv, tile, block.tensors, block
        self._first, self._group, self._run = block.first_channel, block.group, store_width(block)
        self._values = local("values", (self._run,), "float32")


def store_width(block: Block) -> int:
    """Neighbouring windows that one store takes: they lie in one image, at an address that is a multiple of their number."""
    return math.gcd(block.width, math.prod(block.conv.output_size))


def load_width(block: Block) -> int:
    """Neighbouring terms of a window that one load takes; every window and every channel begins at a multiple of their number."""
    conv, s = block.conv, block.strides
    run = math.prod(conv.kernel) if conv.dilation[1] == 1 else conv.kernel[0]  # contiguous terms
    return math.gcd(block.width, run, s.n, s.c, s.m, s.x, s.v if conv.dilation[1] > 1 else 0)
