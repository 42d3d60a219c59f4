"""Two kernels as TVM schedules them, the second reading what the first writes: Winograd's input transform and its batched product.

F(2x2, 3x3) in NCHW, one image: V[e, c, p] = (B^T d B)[e] of tile p, then M[e, k, p] = sum over c of V[e, c, p] * U[e, c, k], for the 16
positions e of a transformed tile. A warp of the product owns positions e, as in the document's sync-free design. On tensor cores c is the
last axis of V and p that before k in M, and all but M is float16.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tvm
from oracle import Array
from tvm import te, tirx
from tvm.s_tir import Schedule

from im2win.codegen.rewritten import functions
from im2win.device.gpu import H200
from im2win.reconstruct.parse.unit import Unit, read

T, M, R = 4, 2, 3  # a tile of the input, of the output, of the filter
B = np.array([[1, 0, 0, 0], [0, 1, -1, 1], [-1, 1, 1, 0], [0, 0, 0, -1]], np.float64)
NAME = "winograd"


@dataclass(frozen=True)
class Pair:
    """Sizes: channels, filters, input (square), tiles and filters of a block, channels of a step.

    private: whether a warp copies to shared memory what it reads itself, rather than all warps the whole. tensor_cores: the product is
    WMMA's 16x16x16 of float16; blocks and steps are of 16 then, and copies private.
    """

    channels: int = 8
    filters: int = 32
    size: int = 18
    block_p: int = 16
    block_k: int = 16
    step: int = 4
    private: bool = False
    tensor_cores: bool = False

    @property
    def dtype(self) -> str:
        """Of all tensors but the output."""
        return "float16" if self.tensor_cores else "float32"

    @property
    def across(self) -> int:
        """Tiles in a row."""
        return (self.size - R + 1) // M

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Shapes."""
        count = self.across**2
        output = (count, self.filters) if self.tensor_cores else (self.filters, count)
        return {"data": (self.channels, self.size, self.size), "filter": (T * T, self.channels, self.filters), "output": (T * T, *output)}


TENSOR_CORES = Pair(channels=32, tensor_cores=True)
STORED = Path(__file__).parent / "generated" / "winograd_tensor_cores.cu"


def _define(pair: Pair) -> Any:
    across, shapes, dtype = pair.across, pair.tensors, pair.dtype
    data, filters = (te.placeholder(shapes[name], dtype, name=name) for name in ("data", "filter"))

    def factor(row: Any, column: Any) -> Any:
        value = tirx.const(0, dtype)
        for i in range(T):
            for j in range(T):
                if B[i, j]:
                    value = tirx.Select(tirx.all(row == i, column == j), tirx.const(B[i, j], dtype), value)
        return value

    u, v, c = te.reduce_axis((0, T), "u"), te.reduce_axis((0, T), "v"), te.reduce_axis((0, pair.channels), "c")
    tiles = te.compute((pair.channels, across**2, T, T), lambda c, p, i, j: data[c, p // across * M + i, p % across * M + j], name="tile")

    def transform(e: Any, c: Any, p: Any) -> Any:
        return te.sum(tiles[c, p, u, v] * factor(u, e // T) * factor(v, e % T), axis=[u, v])

    if pair.tensor_cores:
        last = te.compute((T * T, across**2, pair.channels), lambda e, p, c: transform(e, c, p), name="V")
        output = te.compute(
            shapes["output"],
            lambda e, p, k: te.sum(last[e, p, c].astype("float32") * filters[e, c, k].astype("float32"), axis=c),
            name="output",
        )
    else:
        transformed = te.compute((T * T, pair.channels, across**2), transform, name="V")
        output = te.compute(shapes["output"], lambda e, k, p: te.sum(transformed[e, c, p] * filters[e, c, k], axis=c), name="output")
    return te.create_prim_func([data, filters, output])


def schedule(pair: Pair) -> tvm.IRModule:
    """The module, scheduled with TVM's own primitives: two launches, shared memory behind TVM's own barriers."""
    sch = Schedule(_define(pair))
    _schedule_transform(sch, pair)
    (_schedule_tensor_cores if pair.tensor_cores else _schedule_product)(sch, pair)
    transform = sch.get_sblock("V")
    sch.decompose_reduction(transform, sch.get_loops(transform)[-2])
    return tvm.IRModule({NAME: sch.mod["main"]})


def _schedule_product(sch: Any, pair: Pair) -> None:
    product = sch.get_sblock("output")
    e, k, p, c = sch.get_loops(product)
    (high, low), (ko, ki), (po, pi) = sch.split(e, [None, T]), sch.split(k, [None, pair.block_k]), sch.split(p, [None, pair.block_p])
    (kt, kr), (pt, pr), (co, ci) = sch.split(ki, [None, 4]), sch.split(pi, [None, 2]), sch.split(c, [None, pair.step])
    sch.reorder(po, ko, low, high, kt, pt, co, ci, kr, pr)
    lane = sch.fuse(kt, pt)
    for loop, thread in ((po, "blockIdx.x"), (ko, "blockIdx.y"), (low, "threadIdx.y"), (lane, "threadIdx.x")):
        sch.bind(loop, thread)
    sch.reverse_compute_at(sch.cache_write(product, 0, "local"), lane)
    for index in (0, 1):
        copy = sch.cache_read(product, index, "shared")
        sch.compute_at(copy, co)
        axes = sch.get_loops(copy)[-3:]
        if pair.private:
            sch.bind(axes[0], "threadIdx.y")
        _, inner = sch.split(sch.fuse(*(axes[1:] if pair.private else axes)), [None, 32])
        sch.bind(inner, "threadIdx.x")
    sch.decompose_reduction(product, co)


def _schedule_tensor_cores(sch: Any, pair: Pair) -> None:
    """The document's product: a warp loads what it multiplies, and multiplies at once."""
    import tvm.s_tir.tensor_intrin.cuda  # noqa: F401 - registers WMMA's operations, which takes half a minute

    product = sch.get_sblock("output")
    e, p, k, c = sch.get_loops(product)
    (high, low), (po, pi), (ko, ki), (co, ci) = (sch.split(loop, [None, part]) for loop, part in ((e, T), (p, 16), (k, 16), (c, 16)))
    sch.reorder(po, ko, low, high, co, pi, ki, ci)
    for loop, thread in ((po, "blockIdx.x"), (ko, "blockIdx.y"), (low, "threadIdx.y")):
        sch.bind(loop, thread)
    warp = sch.blockize(pi)
    sums = sch.cache_write(warp, 0, "wmma.accumulator")
    sch.reverse_compute_at(sums, high)
    copies = [sch.cache_read(warp, index, "shared") for index in (0, 1)]
    fragments = [sch.cache_read(warp, index, f"wmma.matrix_{name}") for index, name in enumerate("ab")]
    for block in (*fragments, *copies):
        sch.compute_at(block, co)
    for copy in copies:
        position, *rest = sch.get_loops(copy)[-3:]
        _, lane, four = sch.split(sch.fuse(*rest), [None, 32, 4])
        for loop, thread in ((position, "threadIdx.y"), (lane, "threadIdx.x")):
            sch.bind(loop, thread)
        sch.vectorize(four)
    for fragment, name in zip(fragments, "ab", strict=True):
        sch.tensorize(sch.get_loops(fragment)[-2], f"wmma_load_16x16x16_f16_{name}_shared")
    sch.tensorize(sch.decompose_reduction(warp, co), "wmma_fill_16x16x16_f32")
    sch.tensorize(warp, "wmma_sync_16x16x16_f16f16f32")
    sch.tensorize(sch.get_loops(sums)[-2], "wmma_store_16x16x16_f32_global")


def _schedule_transform(sch: Any, pair: Pair) -> None:
    sch.compute_inline(sch.get_sblock("tile"))
    block = sch.get_sblock("V")
    e, *both, u, v = sch.get_loops(block)
    p, c = both if pair.tensor_cores else reversed(both)
    (po, pi), (co, ci) = sch.split(p, [None, pair.block_p]), sch.split(c, [None, pair.channels])
    sch.reorder(po, co, ci, pi, e, u, v)
    sch.bind(po, "blockIdx.x")
    sch.bind(sch.fuse(ci, pi), "threadIdx.x")


def unit(pair: Pair) -> Unit:
    """The CUDA that TVM generates; for tensor cores, what it has generated: see `STORED`."""
    return read(STORED.read_text()) if pair == TENSOR_CORES else generated(pair)


def generated(pair: Pair) -> Unit:
    """The CUDA that TVM generates now."""
    return functions(schedule(pair), H200)[0].unit


def tensors(pair: Pair, seed: int = 0) -> dict[str, Array]:
    """Small integers, flat, and an output of NaN."""
    draw = np.random.default_rng(seed)
    made = {name: draw.integers(-3, 4, shape).astype(pair.dtype).ravel() for name, shape in pair.tensors.items()}
    made["output"] = np.full(made["output"].shape, np.nan, np.float32)
    return made


def expected(pair: Pair, made: dict[str, Array]) -> Array:
    """The output, in float64 from the formula."""
    data, filters = (made[name].reshape(pair.tensors[name]).astype(np.float64) for name in ("data", "filter"))
    windows = np.lib.stride_tricks.sliding_window_view(data, (T, T), axis=(1, 2))[:, ::M, ::M].reshape(pair.channels, -1, T, T)
    transformed = np.einsum("ia,cpij,jb->abcp", B, windows, B).reshape(T * T, pair.channels, -1)
    order = "ecp,eck->epk" if pair.tensor_cores else "ecp,eck->ekp"
    return np.einsum(order, transformed, filters).astype(np.float32).ravel()
