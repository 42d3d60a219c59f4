"""The steps of the GPU ladder of the im2win thesis (cuda_ladder.py) in TVM's scheduling language, each with its loops before and after.

Letters: F filters [m, k], W windows [k, n] of the im2win tensor, O outputs [m, n], S the sums of a thread. A and B are tiles of filters and
windows in shared memory, a and b a thread's operands in registers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tvm import te
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import LoopRV, SBlockRV

from im2win.compute import im2win, lowered
from im2win.schedules.cuda.scheduled.gemm import Gemm, Stage, gemm
from im2win.schedules.studies.cuda_ladder import CudaRung, Sizes, pack_of, sizes_of
from im2win.spec.conv2d import Conv2d

STAGE = Stage(im2win.IM2WIN, stored=True)
TRANSFORM_THREADS = 256  # of a block that stores the im2win tensor
VECTOR = 4  # elements of the widest load
SPARE = 4  # elements between rows of windows in shared memory, so that stores of columns have no bank conflict
LANES = 4, 8  # threads of a warp along channels and along windows
AXES = ("channels", "channel_strip", "row", "channel", "windows", "window_strip", "col", "window")  # of the tiled product
OUTPUTS = ("window_strip", "window", "channel_strip", "channel")  # the loops over a thread's outputs, outermost first


def define(conv: Conv2d, rung: CudaRung) -> list[te.Tensor]:
    """The definition that a rung schedules."""
    return im2win.define(conv, pack_of(conv, rung))


def schedule(conv: Conv2d, tensors: Sequence[te.Tensor], rung: CudaRung) -> Schedule:
    """Schedules the definition of compute/im2win.py, made by `define(conv, rung)`, by a rung of the thesis.

    Raises:
        ValueError: the rung is `production`, which schedules/cuda/ implements.
    """
    if rung.production:
        raise ValueError(f"the rung {rung.title!r} is scheduled by schedules/cuda/.")
    sizes = sizes_of(conv, rung)
    copied = rung.shared or rung.micro_kernel  # copies of a step's operands are padded with zeros
    steps = (sizes.block_n if rung.blocks else 1, sizes.block_k if copied else 1)
    form = gemm(conv, tensors, STAGE, (pack_of(conv, rung).block, *steps))
    _store(form.sch, form.stage)
    if not rung.blocks:
        _plain(form, sizes)
        return form.sch
    loops = _blocks(form, sizes, rung.vectorized)
    if rung.micro_kernel:
        _micro_kernel(form, loops, rung)
    else:
        _dot_products(form, loops)
    if not copied:
        _rest(form, loops)
    copies = _shared(form, loops, conv, sizes, rung) if rung.shared else _from_global(form)
    if rung.vectorized:
        _vector_stores(form, loops, conv)
    form.sch.reverse_compute_inline(form.out)
    form.sch.decompose_reduction(form.product, loops.step)
    if rung.prefetch:
        _prefetch(form, loops, rung, copies)
    return form.sch


def transform(tensors: Sequence[te.Tensor]) -> Any:
    """The function (data, im2win tensor) of the transform alone, to measure its time."""
    windows = next(tensor for tensor in _tensors(tensors[-1]) if tensor.op.name == im2win.IM2WIN)
    sch = Schedule(te.create_prim_func([tensors[0], windows]))
    _store(sch, sch.get_sblock(im2win.IM2WIN))
    return sch.mod["main"]


@dataclass
class Loops:
    """The blocks and loops of a tiled rung.

    operands: the blocks that give the product a term of windows, and one of filters.
    step, term: loops of the product over K_B terms at a time, and inside a step.
    outputs, stores: loops over a thread's outputs in the order of `OUTPUTS`, of the product and of the block that writes the output.
    """

    operands: tuple[SBlockRV, SBlockRV]
    step: LoopRV
    term: LoopRV
    outputs: tuple[LoopRV, ...]
    stores: tuple[LoopRV, ...]


@dataclass(frozen=True)
class Split:
    """Where one axis of outputs lies in a tile: count = blocks x strips x threads x width.

    A thread has `strips` runs of `width` neighbours. Between its runs lie those of the other threads.
    """

    strips: int
    threads: int
    width: int

    @property
    def block(self) -> int:
        """Outputs of a thread block."""
        return self.strips * self.threads * self.width

    def __call__(self, at: Any) -> tuple[Any, Any, Any, Any]:
        """(block, strip, thread, neighbour) of an index."""
        return at // self.block, at // (self.threads * self.width) % self.strips, at // self.width % self.threads, at % self.width

    def inside(self, at: Any) -> tuple[Any, Any, Any]:
        """(strip, thread, neighbour) of an index inside a block."""
        return self(at)[1:]


def _splits(sizes: Sizes, vectorized: bool) -> tuple[Split, Split]:
    """Those of channels and of windows."""
    width = VECTOR if vectorized else 1
    wide = (math.gcd(count, width) for count in (sizes.thread_m, sizes.thread_n))
    strips = zip((sizes.thread_m, sizes.thread_n), sizes.lanes, wide, strict=True)
    m, n = (Split(count // run, threads, run) for count, threads, run in strips)
    return m, n


def _tensors(out: te.Tensor) -> list[te.Tensor]:
    """A tensor and those that it is computed from."""
    found = [out]
    for tensor in found:
        found += [one for one in tensor.op.input_tensors if one not in found]
    return found


def _store(sch: Schedule, block: SBlockRV) -> None:
    """The transform of every rung: neighbouring threads store neighbouring elements of the im2win tensor.

    before                                          after
        for n, c, m, i:                                 for n*c*m*i / 256 in thread blocks, 256 in threads:
            W[n, c, m, i] = I[n, c, m*s + u, k]             W[n, c, m, i] = I[n, c, m*s + u, k]
    """
    blocks, threads = sch.split(sch.fuse(*sch.get_loops(block)), [None, TRANSFORM_THREADS])
    sch.bind(blocks, "blockIdx.x")
    sch.bind(threads, "threadIdx.x")


def _plain(form: Gemm, sizes: Sizes) -> None:
    """Alg. 8: an output a thread, whose operands are read from global memory.

    before (Alg. 7)                    after (Alg. 8)
        for m in M, n in N:                for N / 32, M / 32 in thread blocks, 32 windows n, 32 channels m in threads:
            for k in K:                        for k in K:
                O[m, n] += F[m, k] * W[k, n]       S += F[m, k] * W[k, n]
                                               O[m, n] = act(S)
    """
    sch = form.sch
    sch.compute_inline(form.windows)
    sch.compute_inline(form.filters)
    channel, _, window = sch.get_loops(form.out)
    channels, channel = sch.split(channel, [None, sizes.block_m])
    windows, window = sch.split(window, [None, sizes.block_n])
    sch.reorder(windows, channels, window, channel)
    sch.bind(sch.fuse(windows, channels), "blockIdx.x")
    thread = sch.fuse(window, channel)
    sch.bind(thread, "threadIdx.x")
    sch.compute_at(form.product, thread, preserve_unit_loops=True)
    sch.set_scope(form.product, 0, "local")
    sch.decompose_reduction(form.product, sch.get_loops(form.product)[-1])


def _blocks(form: Gemm, sizes: Sizes, vectorized: bool) -> Loops:
    """Tiling (section 4.3.1): a thread block has M_B x N_B outputs and takes K_B terms of their sums at a time, a thread M_T x N_T outputs.

    A warp is 4 x 8 threads, so that eight neighbours read and write neighbouring windows. A thread's outputs are `width` neighbours, and
    the same again behind those of the other threads. Each output is a dot product of its own.

    Channel blocks of the same windows are neighbours in the grid, so that they find them in cache.

    before (Alg. 8)                    after
        for thread blocks, threads:        for N / N_B, M / M_B in thread blocks, M_B / M_T * N_B / N_T in threads:
            for k in K:                        for kk in K / K_B:
                S += F[m, k] * W[k, n]             for m in M_T, n in N_T: for k in K_B: S[m, n] += F[m, k] * W[k, n]
            O[m, n] = act(S)                   for m in M_T, n in N_T: O[m, n] = act(S[m, n])
    """
    sch = form.sch
    m, n = _splits(sizes, vectorized)
    sch.transform_block_layout(form.product, lambda jo, ji, p, k: (jo, *m.inside(ji), *n(p), k))
    extents = [int(sch.get(loop).extent) for loop in sch.get_loops(form.product)]
    operands = sch.reindex(form.product, ("read", 0)), sch.reindex(form.product, ("read", 1))
    out = sch.reindex(form.product, ("write", 0))
    sch.set_scope(form.product, 0, "local")
    of = _named(sch, out, extents)
    row_warp, row = sch.split(of["row"], [None, LANES[0]])
    col_warp, col = sch.split(of["col"], [None, LANES[1]])
    sch.reorder(of["windows"], of["channels"], col_warp, row_warp, row, col, *(of[name] for name in OUTPUTS))
    sch.bind(sch.fuse(of["windows"], of["channels"]), "blockIdx.x")
    thread = sch.fuse(col_warp, row_warp, row, col)
    sch.bind(thread, "threadIdx.x")
    _unroll(sch, [of[name] for name in OUTPUTS])
    sch.compute_at(form.product, thread, preserve_unit_loops=True)
    *outputs, term = sch.get_loops(form.product)[2:]
    made = dict(zip((*AXES, "term"), (*outputs, term), strict=True))
    step, term = sch.split(term, [None, sizes.block_k])
    sch.reorder(*(made[name] for name in AXES if name not in OUTPUTS), step, *(made[name] for name in OUTPUTS), term)
    return Loops(operands, step, term, tuple(made[name] for name in OUTPUTS), tuple(of[name] for name in OUTPUTS))


def _named(sch: Schedule, out: SBlockRV, extents: Sequence[int]) -> dict[str, LoopRV]:
    """The loops of a block that has those of the tiled product whose extent is not 1; the others are added."""
    loops = iter(sch.get_loops(out))
    there = [next(loops) if extent > 1 else None for extent in extents[: len(AXES)]]
    return {name: loop or sch.add_unit_loop(out) for name, loop in zip(AXES, there, strict=True)}


def _shared(form: Gemm, loops: Loops, conv: Conv2d, sizes: Sizes, rung: CudaRung) -> list[SBlockRV]:
    """Shared memory (section 4.3.2): all threads of a block copy a step's operands, and all read them.

    Neighbouring threads copy K_B neighbouring terms of a window, which are contiguous in the im2win tensor. Returns the copies, in order.

    before                             after
        for kk in K / K_B:                 for kk in K / K_B:
                                               for n in N_B, k in K_B in threads: B[k, n] = W[k, n]
                                               for k in K_B, m in M_B in threads: A[k, m] = F[m, k]
            ...: S += F[m, k] * W[k, n]        ...: S += A[k, m] * B[k, n]

    With `vectorized`, filters are copied four at a time, and windows as many at a time as are aligned in the im2win tensor. With `prefetch`
    copies pass through registers, so that loads and stores can be steps apart:

                                               for n in N_B, k in K_B in threads: R[n, k] = W[k, n]
                                               for n in N_B, k in K_B in threads: B[k, n] = R[n, k]
    """
    sch, copies, across = form.sch, list[SBlockRV](), sizes.threads // sizes.block_k
    for block, wanted in ((form.windows, load_width(conv)), (form.filters, math.gcd(VECTOR, sizes.block_m // across))):
        unit = wanted if rung.vectorized else 1
        if rung.prefetch or (unit > 1 and block is form.windows):
            made = [block, sch.cache_read(*_read(sch, block), "shared")]
            sch.set_scope(block, 0, "local")
        else:
            made = [block]
            sch.set_scope(block, 0, "shared")
        for copy in reversed(made):
            sch.compute_at(copy, loops.step, preserve_unit_loops=True)
        for copy in made:
            axes = sch.get_loops(copy)[-2:]  # terms, then windows or channels
            lanes = sizes.block_k // unit if block is form.windows else across
            element = _share_out(sch, axes[::-1] if block is form.windows else axes, sizes.threads, lanes, unit)
            (sch.vectorize if unit > 1 and (copy is block or block is form.filters) else sch.unroll)(element)
        if block is form.windows:
            sch.storage_align(made[-1], 0, -2, 32, SPARE)
        copies += made
    return copies


def _share_out(sch: Schedule, axes: Sequence[LoopRV], threads: int, lanes: int, unit: int) -> LoopRV:
    """Shares two loops out among all threads, `lanes` along the second, each with `unit` neighbours. Returns the loop over those."""
    outer, row = sch.split(axes[0], [None, threads // lanes])
    inner, lane, element = sch.split(axes[1], [None, lanes, unit])
    sch.reorder(outer, inner, row, lane, element)
    sch.bind(sch.fuse(row, lane), "threadIdx.x")
    _unroll(sch, (outer, inner))
    return element


def _read(sch: Schedule, block: SBlockRV) -> tuple[SBlockRV, int]:
    """The block that reads what a block writes, and which of its reads that is."""
    [reader], buffer = sch.get_consumers(block), sch.get(block).writes[0].source
    return reader, next(place for place, region in enumerate(sch.get(reader).reads) if region.source.same_as(buffer))


def _rest(form: Gemm, loops: Loops) -> None:
    """Terms behind the last whole step become a step of their own, so that no other step tests whether a term exists.

    before                                                     after
        for kk in K / K_B, rounded up:                             for kk in K / K_B, rounded down:
            for m in M_T, n in N_T: for k in K_B:                      for m in M_T, n in N_T: for k in K_B:
                if kk * K_B + k < K: S[m, n] += F[m, k] * W[k, n]          S[m, n] += F[m, k] * W[k, n]
                                                                   for m in M_T, n in N_T: for k in K_B:
                                                                       if k < K % K_B: S[m, n] += F[m, k] * W[k, n]
    """
    form.sch.annotate(loops.step, "pragma_loop_partition_hint", True)


def _from_global(form: Gemm) -> list[SBlockRV]:
    """Operands are read from global memory where they are used. Returns no copies."""
    form.sch.compute_inline(form.windows)
    form.sch.compute_inline(form.filters)
    return []


def _dot_products(form: Gemm, loops: Loops) -> None:
    """Without a micro-kernel each output of a thread is a dot product of its own, of two loads a product.

    The loop over terms is not unrolled, or the compiler would make a micro-kernel.
    """
    for operands in loops.operands:
        form.sch.compute_inline(operands)
    _unroll(form.sch, loops.outputs)
    form.sch.annotate(loops.term, "disable_unroll", True)


def _micro_kernel(form: Gemm, loops: Loops, rung: CudaRung) -> None:
    """Micro-kernel (section 4.3.3): a thread loads M_T + N_T operands to registers for M_T * N_T products.

    before                                     after
        for m in M_T, n in N_T:                    for k in K_B unrolled:
            for k in K_B:                              for m in M_T: a[m] = A[k, m]
                                                       for n in N_T: b[n] = B[k, n]
                S[m, n] += A[k, m] * B[k, n]           for m in M_T, n in N_T: S[m, n] += a[m] * b[n]
    """
    sch = form.sch
    sch.reorder(loops.term, *loops.outputs)
    _unroll(sch, (loops.term, *loops.outputs))
    for operands, of_filters in zip(loops.operands, (False, True), strict=True):
        sch.set_scope(operands, 0, "local")
        sch.compute_at(operands, loops.term, preserve_unit_loops=True)
        *others, term = sch.get_loops(operands)[-len(sch.get(operands).iter_vars) :]
        sch.reorder(term, *others)
        _unroll(sch, (term, *others[:-1]))
        wide = rung.vectorized and (rung.shared or of_filters)
        (sch.vectorize if wide else sch.unroll)(others[-1])


def _vector_stores(form: Gemm, loops: Loops, conv: Conv2d) -> None:
    """Vectors (section 4.3.4): neighbouring outputs of a thread are stored at once, as many as lie in one image at aligned addresses.

    before                                     after
        for n' in 4: O[m, n + n'] = act(S[n'])     O[m, n : n + 4] = act(S[0 : 4])

    The same for its operands in `_micro_kernel`, and for copies in `_shared`.
    """
    run = math.gcd(VECTOR, math.prod(conv.output_size))
    strip, window, *channels = loops.stores
    window, lane = form.sch.split(window, [None, run])
    form.sch.reorder(strip, window, *channels, lane)
    form.sch.unroll(window)
    (form.sch.vectorize if run > 1 else form.sch.unroll)(lane)


def load_width(conv: Conv2d) -> int:
    """Neighbouring terms of a window that one load takes; every window and every channel begins at a multiple of their number."""
    s = lowered.strides(conv, "ncmku")
    run = math.prod(conv.kernel) if conv.dilation[1] == 1 else conv.kernel[0]  # contiguous terms
    return math.gcd(VECTOR, run, s.n, s.c, s.m, s.x, s.v if conv.dilation[1] > 1 else 0)


def _prefetch(form: Gemm, loops: Loops, rung: CudaRung, copies: Sequence[SBlockRV]) -> None:
    """Double buffers (section 4.3.5): the next step's operands are loaded before the products of this step, and stored behind them.

    before                                 after (Alg. 9)
        for kk in K / K_B:                     R = W[0]; B[0] = R
            R = W[kk]                          for kk in K / K_B - 1:
            B = R                                  R = W[kk + 1]
            for k in K_B:                          b[0] = B[kk % 2, 0]
                b = B[k]                           for k in K_B - 1: b[(k + 1) % 2] = B[kk % 2, k + 1]; S += a[k % 2] * b[k % 2]
                S += a * b                         S += a[1] * b[1]
                                                   B[(kk + 1) % 2] = R
                                               products of the last step

    TVM stores to the other buffer behind the products and waits before that; the reconstructor's rule `pipelines` takes that barrier away.
    The first operands of a step are loaded behind its barrier. Alg. 9 loads them before the last products of the step before: TVM would
    choose between their buffers by the number of the step, which registers cannot be.
    """
    sch = form.sch
    if rung.micro_kernel:
        sch.annotate(loops.term, "software_pipeline_stage", [0, 0, 1])
        sch.annotate(loops.term, "software_pipeline_order", [0, 1, 2])
    if copies:  # those of windows, then those of filters, each a load and a store
        products = 3 if rung.micro_kernel else 1  # a pipeline is three parts: its first operands, its loop, its last products
        for store in copies[1::2]:
            sch.annotate(store, "double_buffer_scope", 0)
        last = 2 + products
        sch.annotate(loops.step, "software_pipeline_stage", [0, 0, 0, 0] + [1] * products)
        sch.annotate(loops.step, "software_pipeline_order", [0, last, 1, last + 1, *range(2, last)])


def _unroll(sch: Schedule, loops: Sequence[LoopRV]) -> None:
    for loop in loops:
        sch.unroll(loop)
