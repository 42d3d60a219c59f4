"""Pairs of small kernels in the form that TVM generates, which differ in how the blocks and threads of one lie over those of the other.

V[e, p] = 2 * data[e, p] + e for 6 rows and 64 columns, then output[k, p] = (k + 1) * (sum over e of V[e, p]), for 8 rows.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from oracle import Array

from im2win.emulator import Launch
from im2win.reconstruct.parse.unit import Unit

ROWS, COLUMNS, OUTPUTS = 6, 64, 8
X, Y, TX = "((int)blockIdx.x)", "((int)blockIdx.y)", "((int)threadIdx.x)"


@dataclass(frozen=True)
class Kernel:
    """A kernel's body, grid and threads."""

    body: str
    grid: tuple[int, int, int]
    threads: int


def plain(columns: int, threads: int, halves: int = 1) -> Kernel:
    """A block makes some columns; `halves` 2: of half of the rows, along blockIdx.y."""
    rows = ROWS // halves
    steps = rows * columns // threads
    row = f"((({Y} * {rows}) + (((step * {threads}) + {TX}) / {columns})))"
    place = f"(((({row}) * {COLUMNS}) + ({X} * {columns})) + (((step * {threads}) + {TX}) % {columns}))"
    body = f"  for (int step = 0; step < {steps}; ++step) {{\n    V_ptr[{place}] = ((data_ptr[{place}] * 2.0f) + ((float){row}));\n  }}\n"
    return Kernel(body, (COLUMNS // columns, halves, 1), threads)


def staged(threads: int) -> Kernel:
    """Through shared memory, which a barrier of the block guards: 16 columns a block, each thread stores what another has loaded."""
    steps = ROWS * 16 // threads
    first = f"(((step * {threads}) + {TX}))"
    place = f"(((({first} / 16) * {COLUMNS}) + ({X} * 16)) + ({first} % 16))"
    other = first.replace(TX, f"({threads - 1} - {TX})")
    mirrored = place.replace(TX, f"({threads - 1} - {TX})")
    body = (
        f"  __shared__ alignas(64) float data_shared[{ROWS * 16}];\n"
        f"  for (int step = 0; step < {steps}; ++step) {{\n    data_shared[{first}] = data_ptr[{place}];\n  }}\n  __syncthreads();\n"
        f"  for (int step = 0; step < {steps}; ++step) {{\n"
        f"    V_ptr[{mirrored}] = ((data_shared[{other}] * 2.0f) + ((float)({other} / 16)));\n  }}\n"
    )
    return Kernel(body, (COLUMNS // 16, 1, 1), threads)


def sums(x: str, y: str, grid: tuple[int, int, int], barrier: bool = False, more: int = 0) -> Kernel:
    """16 columns by 4 outputs a block; `barrier`: sums pass through shared memory; `more`: also reads that many columns to the right, for
    nothing."""
    row, column = f"(({y} * 4) + ({TX} / 16))", f"(({x} * 16) + ({TX} % 16))"
    store = f"output_ptr[(({row} * {COLUMNS}) + {column})]"
    body = "  alignas(64) float sum[1];\n  sum[0] = 0.0f;\n"
    body += f"  for (int e = 0; e < {ROWS}; ++e) {{\n    sum[0] = (sum[0] + V_ptr[((e * {COLUMNS}) + {column})]);\n"
    if more:
        far = f"min(({column} + {more}), {COLUMNS - 1})"
        body += f"    sum[0] = (sum[0] + (V_ptr[((e * {COLUMNS}) + {far})] * 0.0f));\n"
    body += "  }\n"
    if barrier:
        mirrored = f"(63 - {TX})"
        body = f"  __shared__ alignas(64) float sums_shared[64];\n{body}  sums_shared[{mirrored}] = sum[0];\n  __syncthreads();\n"
        body += f"  {store} = (sums_shared[{mirrored}] * ((float)({row} + 1)));\n"
    else:
        body += f"  {store} = (sum[0] * ((float)({row} + 1)));\n"
    return Kernel(body, grid, 64)


def wide() -> Kernel:
    """Four columns a thread, read as float4."""
    place = f"((({X} * 16) + (({TX} & 3) * 4)))"
    row = f"(({Y} * 4) + ({TX} >> 2))"
    stores = [f"output_ptr[((({row} * {COLUMNS}) + {place}) + {i})]" for i in range(4)]
    lanes = "".join(f"    {store} = ({store} + (v.{lane} * ((float)({row} + 1))));\n" for store, lane in zip(stores, "xyzw", strict=True))
    clear = f"  for (int i = 0; i < 4; ++i) {{\n    output_ptr[((({row} * {COLUMNS}) + {place}) + i)] = 0.0f;\n  }}\n"
    body = f"{clear}  for (int e = 0; e < {ROWS}; ++e) {{\n    float4 v = *(float4*)(V_ptr + ((e * {COLUMNS}) + {place}));\n{lanes}  }}\n"
    return Kernel(body, (4, 2, 1), 16)


USUAL = sums(X, Y, (4, 2, 1))
PAIRS: dict[str, tuple[Kernel, Kernel]] = {
    "fewer threads": (plain(16, 32), USUAL),
    "more threads": (plain(16, 96), USUAL),
    "two blocks for one": (plain(8, 48), USUAL),
    "one block for two": (plain(32, 64), USUAL),
    "blocks along two axes": (plain(16, 48, halves=2), USUAL),
    "a barrier, fewer threads": (staged(32), USUAL),
    "a barrier, more threads": (staged(96), USUAL),
    "two barriers": (staged(96), sums(X, Y, (4, 2, 1), barrier=True)),
    "one axis, columns last": (plain(16, 32), sums(f"({X} % 4)", f"({X} / 4)", (8, 1, 1))),
    "one axis, columns first": (plain(16, 32), sums(f"({X} / 2)", f"({X} % 2)", (8, 1, 1))),
    "columns of the next block": (plain(16, 32), sums(X, Y, (4, 2, 1), more=2)),
    "four at a time": (plain(16, 32), wide()),
}


def unit(name: str) -> Unit:
    """One of the pairs."""
    return unit_of(*PAIRS[name])


def unit_of(made: Kernel, used: Kernel) -> Unit:
    """Two kernels as a source with its launches."""
    source = "".join(
        f'extern "C" __global__ void __launch_bounds__({kernel.threads}) {function}({parameters}) {{\n{kernel.body}}}\n\n'
        for function, kernel, parameters in (
            ("produce", made, "float* __restrict__ V_ptr, float* __restrict__ data_ptr"),
            ("consume", used, "float* __restrict__ V_ptr, float* __restrict__ output_ptr"),
        )
    )
    launches = (
        Launch("produce", ("V", "data"), made.grid, (made.threads, 1, 1)),
        Launch("consume", ("V", "output"), used.grid, (used.threads, 1, 1)),
    )
    return Unit("#include <cuda.h>\n" + source, launches, {"V": ((ROWS * COLUMNS,), "float32")})


def tensors() -> dict[str, Array]:
    """Small integers, and an output of NaN."""
    data = np.random.default_rng(0).integers(-4, 5, ROWS * COLUMNS).astype(np.float32)
    return {"data": data, "output": np.full(OUTPUTS * COLUMNS, np.nan, np.float32)}


def expected(data: Array) -> Array:
    """The output, from the formula."""
    made = 2 * data.reshape(ROWS, COLUMNS).astype(np.float64) + np.arange(ROWS)[:, None]
    return (np.arange(1, OUTPUTS + 1)[:, None] * made.sum(axis=0)).astype(np.float32).ravel()


def together(units: Sequence[Unit]) -> Unit:
    """One source with the kernels of all units, numbered as their tensors are."""
    head, bodies, launches, workspace = "", [], [], {}
    for i, part in enumerate(units):
        head = max(head, part.head, key=len)
        body = part.source[len(part.head) :]
        for name in part.kernels:
            body = re.sub(rf"\b{name}\b", f"{name}_{i}", body)
        bodies.append(body)
        for launch in part.launches:
            arguments = tuple(f"{name}_{i}" for name in launch.arguments)
            launches.append(replace(launch, kernel=f"{launch.kernel}_{i}", arguments=arguments))
        workspace |= {f"{name}_{i}": space for name, space in part.workspace.items()}
    return Unit(head + "".join(bodies), tuple(launches), workspace)
