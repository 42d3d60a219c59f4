"""Partial kernel fusion through the last-level cache (PKF-LLC): one launch of two kernels, with the tensor between them in global memory.

A producer block signals its completion with a fence and an atomic counter. A consumer block waits for the counters of what it reads. The
PKF paper (see `im2win.reconstruct`) separates the two parts by a barrier, which orders only the threads of one block.

A grid-wide barrier needs all blocks resident, which CUDA guarantees only for cooperative launches. Here the order in which blocks start
decides their work (`block_order`). So no block waits for one that has not started, and the grid may have any size.
"""

from __future__ import annotations

import math
from dataclasses import replace

from im2win.emulator import Launch
from im2win.reconstruct.fusion.block_order import flags, order
from im2win.reconstruct.fusion.pairs import ALIGNMENT, STATIC_LIMIT, fused_block, merged_parameters, pair, rebased, replaced
from im2win.reconstruct.fusion.splice import as_part, indented, linear_thread
from im2win.reconstruct.fusion.tiles import NotFused
from im2win.reconstruct.fusion.uniform import few
from im2win.reconstruct.parse.unit import Unit
from im2win.reconstruct.text_rules import Match

RULE = "pkf-llc"

SIGNALS = """
// Between blocks: what a block wrote before it signals, a block that waited for the signal reads. The fence of one thread covers what the
// others of its block wrote before their common barrier.
namespace im2win {
__device__ __forceinline__ int ticket(unsigned* flags) { return static_cast<int>(atomicAdd(flags, 1u)); }
__device__ __forceinline__ void signal_done(unsigned* flag) {
  __threadfence();
  atomicAdd(flag, 1u);
}
__device__ __forceinline__ void await_done(unsigned* flag, unsigned count) {
  while (*static_cast<volatile unsigned*>(flag) < count) {
#ifdef IM2WIN_EMULATOR
    emulator::pause(__LINE__);
#else
    __nanosleep(64);
#endif
  }
  __threadfence();
}
}  // namespace im2win

"""


def fuse(unit: Unit, limit: int, wave: int = 0, producer: str | None = None, consumer: str | None = None) -> tuple[Unit, list[Match]]:
    """Fuses two kernels into one launch. A second kernel of one block clears the counters before it.

    Args:
        unit: with launches and workspaces.
        limit: bytes of shared memory that a block may take.
        wave: consumer blocks in a wave, along the axis that both kernels share; 0 for a single wave. The cache should hold the tensor's
            part of two waves.
        producer, consumer: names of the kernels; None for those of the first pair.

    Returns:
        The new unit and the change.

    Raises:
        NotFused: there is no such pair, or its blocks or sizes do not permit fusion.
    """
    found = pair(unit, producer, consumer)
    block, merged = fused_block(found), merged_parameters(found, set())
    tiles = few(found).tiling()
    grids = found.producer.launch.grid, found.consumer.launch.grid
    dynamic = max(found.producer.launch.dynamic_bytes, found.consumer.launch.dynamic_bytes)
    static = found.producer.static_bytes + found.consumer.static_bytes + 4
    if static > STATIC_LIMIT or static + dynamic > limit:
        raise NotFused(f"both kernels declare {static} bytes of shared memory, with dynamic {static + dynamic}; there are {limit}")
    name, counters = f"{found.consumer.name}_{RULE.replace('-', '_')}", f"{found.tensor}_flags"
    work = order(*grids, tiles, wave)
    signals = flags(work, grids[0], tiles, counters)
    names = {before: after for before, after in merged.producer.items() if before != after}
    made = as_part(found.producer, rebased(found.producer, found.producer.body, 0), "producer", block, names, work.producer)
    used = as_part(found.consumer, rebased(found.consumer, found.consumer.body, 0), "consumer", block, {}, work.consumer)
    body = (
        (f"extern __shared__ __align__({ALIGNMENT}) unsigned char fused_shared[];\n" if dynamic else "")
        + f"__shared__ alignas(4) int fused_ticket[1];\nint thread = {linear_thread(block)};\n"
        + f"if (thread == 0) {{\n  fused_ticket[0] = im2win::ticket({counters});\n}}\n__syncthreads();\n"
        + "int ticket = fused_ticket[0];\n"
        + work.declarations
        + f"if ({work.makes}) {{\n{indented(made)}  __syncthreads();\n"
        + f"  if (thread == 0) {{\n    im2win::signal_done(({counters} + {signals.signal}));\n  }}\n}} else {{\n"
        + f"{indented(signals.waits)}  __syncthreads();\n{indented(used)}}}\n"
    )
    # The tensor between the parts is not __restrict__: one block reads what another has written.
    rows = [row.replace(" __restrict__", "") if tensor == found.tensor else row for tensor, row in merged.parameters]
    threads = min(1024, -(-signals.count // 32) * 32)
    parameters = ", ".join([*rows, f"unsigned int* {counters}"])
    head = f'extern "C" __global__ void __launch_bounds__({math.prod(block)}) {name}({parameters}) {{\n'
    text = _clear(f"{name}_clear", counters, signals.count, threads) + "\n" + head + indented(body) + "}\n"
    launches = [
        Launch(f"{name}_clear", (counters,), (1, 1, 1), (threads, 1, 1)),
        Launch(name, (*(tensor for tensor, _ in merged.parameters), counters), (work.blocks, 1, 1), block, dynamic),
    ]
    many = math.prod(tiles.counts)
    why = f"a block of {found.consumer.name} waits for the {many} block(s) of {found.producer.name} whose {found.tensor} it reads"
    result, matches = replaced(unit, found, {found.producer.name: [], found.consumer.name: launches}, text, RULE, why)
    if SIGNALS not in result.source:
        result = replace(result, source=result.head + SIGNALS + result.source[len(result.head) :])
    return replace(result, workspace={**unit.workspace, counters: ((signals.count,), "uint32")}), matches


def _clear(name: str, counters: str, count: int, threads: int) -> str:
    index = f"((round * {threads}) + ((int)threadIdx.x))"
    return (
        f'extern "C" __global__ void __launch_bounds__({threads}) {name}(unsigned int* __restrict__ {counters}) {{\n'
        f"  for (int round = 0; round < {-(-count // threads)}; ++round) {{\n    if ({index} < {count}) {{\n"
        f"      {counters}[{index}] = 0;\n    }}\n  }}\n}}\n"
    )
