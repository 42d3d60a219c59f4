"""The GPU ladder of the im2win thesis (Lu 2023, chapter 4; arXiv 2306.14316): one im2win convolution, one more scheduling step a rung.

Every rung schedules the definition in compute/im2win.py with the im2win tensor stored, so that rungs differ in nothing but these steps. The
seven loops are mapped as in Alg. 7: channels M = Co, windows N = No*Ho*Wo, terms K = Ci*Wf*Hf in the order of an im2win window.

    plain           Alg. 8: 32 x 32 threads, one output each, everything from global memory
    blocks          section 4.3.1: a thread block has a tile of M_B x N_B outputs and K_B terms, a thread M_T x N_T of the outputs
    shared          section 4.3.2: the tile's operands are staged in shared memory
    micro_kernel    section 4.3.3: outer products of operands in registers
    vectorized      section 4.3.4: loads and stores of four neighbours
    prefetch        section 4.3.5, Alg. 9: double buffers in shared memory and registers, one filled while the other is used
    production      the project's im2win schedules, with the tile recorded for the layer, or the cost model's

TVM inserts the barriers. Where it has made a pipeline, the reconstructor removes the barrier that double buffers need not have.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from tvm import te
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import LoopRV, SBlockRV

from im2win.compute import im2win, lowered
from im2win.packing.cpu_blocked import FilterPack
from im2win.schedules.cuda.scheduled.gemm import Gemm, Stage, gemm
from im2win.spec.conv2d import Conv2d

STAGE = Stage(im2win.IM2WIN, stored=True)
TRANSFORM_THREADS = 256  # of a block that stores the im2win tensor
ALIGNMENT = 128  # bytes, of a tensor between kernels
VECTOR = 4  # elements of the widest load
SPARE = 4  # elements between rows of windows in shared memory, so that stores of columns have no bank conflict
LANES = 4, 8  # threads of a warp along channels and along windows


@dataclass(frozen=True)
class CudaRung:
    """The scheduling steps that are on. Each can be switched by itself; it has no effect where there is nothing for it to work on.

    blocks, shared, micro_kernel, vectorized, prefetch: see the functions below.
    production: the schedule of the registry instead of all these steps.
    by_hand: a kernel that is written loop by loop (cuda_ladder_by_hand.py) instead of these steps.
    """

    title: str
    source: str
    blocks: bool = False
    shared: bool = False
    micro_kernel: bool = False
    vectorized: bool = False
    prefetch: bool = False
    production: bool = False
    by_hand: bool = False

    def __post_init__(self) -> None:
        for name, reason in (
            ("shared", "threads share the tile of their block"),
            ("micro_kernel", "the one output of a thread has no outer product"),
            ("vectorized", "the one output of a thread has no neighbours"),
        ):
            if getattr(self, name) and not self.blocks:
                raise ValueError(f"`{name}` (=True) needs `blocks`: {reason}.")
        if self.prefetch and not (self.shared or self.micro_kernel):
            raise ValueError("`prefetch` (=True) needs `shared` or `micro_kernel`: there is no buffer to double.")
        if self.production and self.blocks:
            raise ValueError("`production` (=True) stands alone: it is no kernel of the ladder.")

    @property
    def techniques(self) -> tuple[str, ...]:
        """Names of the techniques that are on, in the ladder's order."""
        return tuple(field.name for field in fields(self) if getattr(self, field.name) is True)

    @property
    def rules(self) -> tuple[str, ...]:
        """Rule sets by which the reconstructor rewrites what TVM generates."""
        return ("pipelines",) if self.prefetch and self.shared else ()


@dataclass(frozen=True)
class Sizes:
    """The tiles: M_B, N_B, K_B of a thread block, M_T, N_T of a thread (channels, windows, terms of the sum)."""

    block_m: int
    block_n: int
    block_k: int
    thread_m: int
    thread_n: int

    @property
    def lanes(self) -> tuple[int, int]:
        """(threads of a block along channels, threads along windows)."""
        return self.block_m // self.thread_m, self.block_n // self.thread_n

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.lanes[0] * self.lanes[1]


PLAIN = Sizes(32, 32, 1, 1, 1)
# 64 accumulators a thread leave registers for two sets of 16 operands and the 12 elements of the next step; four warps share a tile.
TILED = Sizes(64, 128, 8, 8, 8)
CHANNELS = (8, 12, 4, 2)  # of a thread, the first of these with which blocks divide the channels of a group

ALGORITHM_9 = CudaRung(
    "double buffers, prefetch", "thesis Alg. 9", blocks=True, shared=True, micro_kernel=True, vectorized=True, prefetch=True
)
RUNGS: dict[str, CudaRung] = {
    "plain": CudaRung("an output a thread", "thesis Alg. 8"),
    "blocks": CudaRung("block tiles", "thesis 4.3.1", blocks=True),
    "shared": CudaRung("shared memory", "thesis 4.3.2", blocks=True, shared=True),
    "micro_kernel": CudaRung("outer product in registers", "thesis 4.3.3", blocks=True, shared=True, micro_kernel=True),
    "vectorized": CudaRung("vector loads and stores", "thesis 4.3.4", blocks=True, shared=True, micro_kernel=True, vectorized=True),
    "prefetch": ALGORITHM_9,
    "production": CudaRung("the project's kernel", "schedules/cuda/", production=True),
}
WITHOUT: dict[str, CudaRung] = {
    f"without_{name}": replace(ALGORITHM_9, title=f"without {title}", source="thesis fig. 4-9", **{name: False})
    for name, title in (
        ("micro_kernel", "micro-kernel"),
        ("shared", "shared memory"),
        ("vectorized", "vector loads and stores"),
        ("prefetch", "prefetch"),
    )
}
BY_HAND: dict[str, CudaRung] = {
    f"by_hand_{name}": replace(rung, by_hand=True) for name, rung in {**RUNGS, **WITHOUT}.items() if not rung.production
}


def supports(conv: Conv2d) -> str | None:
    """Why the ladder cannot compute a problem; None if it can."""
    if conv.dtype != "float32":
        return f"the GPU's ladder computes float32, not {conv.dtype}"
    if conv.layout != "NCHW":
        return f"the GPU's ladder is written for NCHW, not {conv.layout}"
    channels = conv.out_channels // conv.groups
    least = min(CHANNELS) * TILED.lanes[0]
    if channels % least:
        return f"thread blocks of the GPU's ladder have a multiple of {least} channels of one group, which has {channels}"
    return None


def sizes_of(conv: Conv2d, rung: CudaRung) -> Sizes:
    """The tiles of a rung of the thesis for a problem that the ladder supports."""
    if not rung.blocks:
        return PLAIN
    channels, (across, _) = conv.out_channels // conv.groups, TILED.lanes
    own = next(count for count in CHANNELS if channels % (count * across) == 0)
    return replace(TILED, block_m=own * across, thread_m=own)


def pack_of(conv: Conv2d, rung: CudaRung) -> FilterPack:
    """The packing of filters for a rung of the thesis: in the order of a window, one by one or by block."""
    return FilterPack(sizes_of(conv, rung).block_m if rung.blocks else 1, "cvu")


def workspace_bytes(conv: Conv2d) -> int:
    """Bytes of the im2win tensor, rounded up to whole lines."""
    return -(-im2win.transform_bytes(conv) // ALIGNMENT) * ALIGNMENT


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
    steps = (sizes.block_n, sizes.block_k) if rung.blocks else (1, 1)
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

    out: the block that writes the output. operands: the blocks that give the product a term of windows, and of filters. thread: the loop of threads. step, term: of the product, over K_B terms at a time and inside a step. outputs: of the product,
    over a thread's outputs: strips of channels, neighbouring channels, strips of windows, neighbouring windows.
    """

    out: SBlockRV
    operands: tuple[SBlockRV, SBlockRV]
    thread: LoopRV
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
    return Loops(out, operands, thread, step, term, tuple(made[name] for name in OUTPUTS), tuple(of[name] for name in OUTPUTS))


AXES = ("channels", "channel_strip", "row", "channel", "windows", "window_strip", "col", "window")  # of the tiled product
OUTPUTS = ("window_strip", "window", "channel_strip", "channel")  # the loops over a thread's outputs, outermost first


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
    """Shares two loops out among all threads, `lanes` neighbours along the second with `unit` elements each. Returns the loop over those."""
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
