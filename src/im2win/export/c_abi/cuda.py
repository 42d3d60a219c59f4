"""Exports a CUDA kernel as source: TVM's generated code after the reconstructor, with its launches on the caller's stream."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import tvm

from im2win.codegen import cuda as cuda_codegen
from im2win.codegen.cuda import SOURCE
from im2win.codegen.cuda_source import Generated
from im2win.device.gpu import Gpu
from im2win.emulator import Launch, TensorMap
from im2win.export.c_abi.header import SOURCES, Interface
from im2win.numerics.winograd_int8 import LARGEST, SCALES, STEP
from im2win.numerics.winograd_matrices import floats, transform
from im2win.numerics.winograd_tiling import row_problem, tiles_of
from im2win.packing.cpu_blocked import FilterPack
from im2win.packing.mma_fragments import CudaPack, row
from im2win.packing.split_k import SplitPack, parts_problem
from im2win.packing.wgmma_smem import ChunkPack
from im2win.packing.window_rows import WindowRowPack, pixel_elements, window_row_problem
from im2win.packing.winograd import WinogradPack
from im2win.packing.winograd_int8 import QuantisedPack
from im2win.registry import cuda_lowering
from im2win.registry.schedules import schedule_of
from im2win.spec.conv2d import Conv2d
from im2win.spec.dtypes import ELEMENT_TYPES
from im2win.spec.symbols import SYMBOL, TRANSFORM, TRANSFORM_PARTS

ALIGNMENT = 256  # bytes; alignment of the workspace

_KERNEL = re.compile(rf"\b({SYMBOL}|{TRANSFORM})_kernel(?=_\d|\b)")
_SHARED = re.compile(r"^(?:__host__ )?__device__ (?!__forceinline__)", re.MULTILINE)  # functions that TVM emits before its kernels
_NUMBERS = {"bfloat16": "Bfloat16"}  # by element type: what pack.hpp calls elements that it computes with, where it is not their C type
_MADE = ("data", "tiles", "products", "lowered")  # names of the workspace tensors of a call with a transform


def export(conv: Conv2d, name: str, tile: Any, gpu: Gpu, folder: Path, called: str) -> tuple[Path, Interface]:
    """Writes CALLED.h and CALLED.cu.

    Returns the path of the source, and the contents of the header. Needs neither a GPU nor a CUDA compiler.

    Args:
        name, tile: the algorithm and its tile.
        called: suffix of the names of functions and files.

    Raises:
        TileError: the tile is not legal.
        ReconstructError: a rule of the tile does not match its kernels.
    """
    row = schedule_of(name)
    pack, made = row.on_gpu.pack(conv, tile), row.on_gpu.workspace_bytes(conv, tile)
    packed, workspace = math.prod(pack.shape(conv)), made + ALIGNMENT - 1 if made else 0
    interface = Interface(conv, called, f"{name} for {gpu.arch} ({gpu.brand})", packed, workspace)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{called}.h").write_text(interface.header())
    path = folder / f"{called}.cu"
    path.write_text(source(interface, _generated(cuda_lowering.lower(conv, row, tile, gpu), gpu), pack, gpu, bool(made)))
    return path, interface


def _generated(module: tvm.IRModule, gpu: Gpu) -> Generated:
    """The convolution's kernels, without those that only serve measurements. A module with finished source keeps it."""
    if (module.attrs or {}).get(SOURCE) is None:
        functions = {variable.name_hint: function for variable, function in module.functions.items()}
        module = cuda_codegen.kernel_module({name: function for name, function in functions.items() if name != TRANSFORM_PARTS})
    return cuda_codegen.generate_source(module, gpu)


def launches(generated: Generated) -> list[Launch]:
    """A call's launches in order, transforms first, without those that only serve measurements."""
    first = [launch for launch in generated.launches if launch.kernel.startswith(f"{TRANSFORM}_kernel")]
    return first + [launch for launch in generated.launches if launch.kernel.startswith(f"{SYMBOL}_kernel")]


def source(interface: Interface, generated: Generated, pack: Any, gpu: Gpu, made: bool) -> str:
    """The text of NAME.cu."""
    call, packing = interface.prototypes()
    return "\n".join(
        [
            f"// {interface.conv}: {interface.made}. Compile with",
            f"// nvcc -O3 -std=c++17 -gencode arch={gpu.arch.replace('sm', 'compute')},code={gpu.arch} -c {interface.name}.cu",
            "#ifdef __CUDACC__", "#pragma nv_diag_suppress 177  // names that a kernel does not use", "#endif", "",
            f'#include "{interface.name}.h"', "", "#include <cmath>", "",
            (SOURCES / "pack.hpp").read_text(), (SOURCES / "launch.hpp").read_text(), *_boxes(generated), *_overlap(generated),
            "// ---- kernels", "", _renamed(generated.source, interface), "", "// ---- functions", "",
            *_launching(interface, launches(generated), made, call), "", *_packing(interface, pack, packing), "",
        ]
    )  # fmt: skip


def _boxes(generated: Generated) -> list[str]:
    maps = any(isinstance(one, TensorMap) for launch in launches(generated) for one in launch.arguments)
    return [(SOURCES / "boxes.hpp").read_text()] if maps else []


def _overlap(generated: Generated) -> list[str]:
    return [(SOURCES / "overlap.hpp").read_text()] if any(launch.overlap for launch in launches(generated)) else []


def _renamed(text: str, interface: Interface) -> str:
    """The kernels renamed to the layer's own names.

    Kernels and device functions get internal linkage, since a program may contain several such files.
    """
    own = _KERNEL.sub(rf"{interface.function}_\1", text).replace('extern "C" __global__', "static __global__")
    return _SHARED.sub(r"static inline \g<0>", own)


# --- launches


def _launching(interface: Interface, todo: Sequence[Launch], made: bool, call: str) -> list[str]:
    """C++ code of the function that computes: a table of launches, and the arguments of each kernel."""
    kernels = list(dict.fromkeys((launch.kernel, _tensors(launch)) for launch in todo))
    rows = [_row(kernels.index((launch.kernel, _tensors(launch))), launch) for launch in todo]
    conv = interface.conv
    elements = {"x": math.prod(conv.input_shape), "packed_w": interface.packed, "bias": conv.out_channels, "scale": conv.out_channels}
    sizes = [f"{{{name}, {elements.get(name, math.prod(conv.output_shape))} * sizeof *{name}}}" for name in interface.tensors]
    numbers = max([1, *(len(_numbers(launch)) for launch in todo)])
    cases = [line for i, (kernel, names) in enumerate(kernels) for line in _case(i, kernel, names, interface, todo, made)]
    return [
        "// In order: the kernel's place among those below, grid, block, bytes of dynamic shared memory, numbers it is given.",
        f"static const struct {{ int kernel; dim3 grid, block; unsigned shared; int numbers[{numbers}]; }} launches[] = {{",
        *(f"  {row}," for row in rows), "};", "",
        f"{call} {{", "  using namespace im2win_launching;", f"  const Tensor tensors[] = {{{', '.join(sizes)}}};",
        f"  if (int status = check(tensors, {'true' if made else 'false'}, workspace)) return status;",
        "  void *made = aligned(workspace);", "  (void)made;",
        "  for (const auto &one : launches) {", "    cudaError_t error = cudaSuccess;", "    switch (one.kernel) {", *cases, "    }",
        "    if (error) return IM2WIN_CUDA_ERROR;", "  }", "  return IM2WIN_OK;", "}",
    ]  # fmt: skip


Argument = str | TensorMap


def _tensors(launch: Launch) -> tuple[Argument, ...]:
    """A launch's tensor arguments, with numbers left out."""
    return tuple("" if isinstance(one, int) else one for one in launch.arguments)


def _numbers(launch: Launch) -> list[int]:
    return [one for one in launch.arguments if isinstance(one, int)]


def _row(kernel: int, launch: Launch) -> str:
    grid, block = (f"{{{', '.join(map(str, extents))}}}" for extents in (launch.grid, launch.block))
    return f"{{{kernel}, {grid}, {block}, {launch.dynamic_bytes}, {{{', '.join(map(str, _numbers(launch)))}}}}}"


def _case(place: int, kernel: str, names: tuple[Argument, ...], interface: Interface, todo: Sequence[Launch], made: bool) -> list[str]:
    """C++ code that launches one kernel with the addresses of its arguments."""
    shared = max(launch.dynamic_bytes for launch in todo if (launch.kernel, _tensors(launch)) == (kernel, names))
    function = _KERNEL.sub(rf"{interface.function}_\1", kernel)
    first = kernel.startswith(f"{TRANSFORM}_kernel")
    launcher = "launch_with_overlap" if any(launch.overlap for launch in todo if launch.kernel == kernel) else "cudaLaunchKernel"
    given: list[str] = []
    maps: list[str] = []
    numbers = 0
    for name in names:
        if isinstance(name, TensorMap):
            given.append(f"&map{len(maps)}")
            maps.append(f"        CUtensorMap map{len(maps)};")
            maps.append(f"        if (!error) error = encode(&map{len(maps) // 2}, {_argument(name.tensor, made, first)}, {_shape(name)});")
            continue
        given.append(f"const_cast<int *>(&one.numbers[{numbers}])" if not name else f"&{_argument(name, made, first)}")
        numbers += not name
    # the arguments are pointers to const, which CUDA's interface does not accept
    arguments = ", ".join(one if one.startswith("const_cast") else f"(void *){one}" for one in given)
    return [
        f"      case {place}: {{",
        "        static std::atomic<unsigned long long> asked;",
        f"        error = prepare({function}, {shared}, asked);",
        *maps,
        f"        void *arguments[] = {{{arguments}}};",
        f"        if (!error) error = {launcher}({function}, one.grid, one.block, arguments, one.shared, stream);",
        "        break;",
        "      }",
    ]


def _shape(boxes: TensorMap) -> str:
    axes = (boxes.sizes, boxes.strides, boxes.box, boxes.steps)
    return f"Boxes{{{', '.join(_values(one) for one in axes)}, {boxes.swizzle}}}"


def _argument(name: str, made: bool, first: bool) -> str:
    """The C++ variable of a kernel's tensor: see `runtime.cuda.Kernels`."""
    if name == "input" or (name == "data" and (first or not made)):
        return "x"
    if name in _MADE and made:
        return "made"
    return {"filter": "packed_w", "output": "y"}.get(name, name)


# --- packing


def _packing(interface: Interface, pack: Any, prototype: str) -> list[str]:
    conv = interface.conv
    element = ELEMENT_TYPES[conv.dtype].c
    head = [
        f"{prototype} {{", "  using namespace im2win_packing;",
        f"  if (int status = check(w, {math.prod(conv.filter_shape)}, packed, {interface.packed})) return status;",
    ]  # fmt: skip
    if isinstance(pack, WinogradPack):
        tables, form = _form(conv, pack.outputs, _strides(pack.order, pack.shape(conv)), pack.block)
        body = [f"  std::memset(packed, 0, {interface.packed} * sizeof *packed);", f"  transform({form}, w, packed);"]
    elif isinstance(pack, QuantisedPack):
        tables, form = _quantised(conv, pack)
        body = [f"  std::memset(packed, 0, {interface.packed});", f"  quantise({form}, w, packed);"]
    elif isinstance(pack, CudaPack) and pack.outputs:
        problem, tables, form = _as_products(conv, pack)
        places, slabs = _slabs(problem, replace(pack, outputs=0))
        tables += places
        number = _NUMBERS.get(conv.dtype, element)
        filters, result = (name if number == element else f"reinterpret_cast<{kind} *>({name})" for name, kind in (
            ("w", f"const {number}"), ("packed", number),
        ))  # fmt: skip
        body = [
            f"  {number} *form = static_cast<{number} *>(std::malloc({math.prod(problem.filter_shape)} * sizeof *form));",
            "  if (!form) return IM2WIN_NO_MEMORY;", f"  transform({form}, {filters}, form);", f"  pack({slabs}, form, {result});",
            "  std::free(form);",
        ]  # fmt: skip
    elif isinstance(pack, SplitPack):  # for split-K, the filters of the groups are interleaved
        problem = parts_problem(conv, pack.split)
        depth = math.prod(problem.filter_shape[1:])
        tables, slabs = _slabs(problem, pack.inner, depth, pack.split * depth)
        body = [f"  pack({slabs}, w, packed);"]
    elif isinstance(pack, WindowRowPack):  # a channel is a channel of a tap in a kernel row
        depth, (_, columns) = math.prod(conv.filter_shape[1:]), conv.kernel
        tables, slabs = _slabs(window_row_problem(conv), pack.inner, conv.out_channels * depth, depth)
        body = [f"  pack({slabs[:-1]}, {pixel_elements(conv)}, {conv.in_channels}, {columns}}}, w, packed);"]
    else:
        tables, slabs = _slabs(conv, pack)
        body = [f"  pack({slabs}, w, packed);"]
    return [*tables, "", *head, *body, "  return IM2WIN_OK;", "}"]


def _values(values: Iterable[Any]) -> str:
    return f"{{{', '.join(map(str, values))}}}"


def _strides(order: str, shape: Sequence[int]) -> dict[str, int]:
    return {axis: math.prod(shape[i + 1 :]) for i, axis in enumerate(order)}


def _as_products(conv: Conv2d, pack: CudaPack) -> tuple[Conv2d, list[str], str]:
    """For Winograd filters: the problem that the transformed filters belong to, and the tables and expression that transform them."""
    if pack.order == "Cuvc":
        problem = row_problem(conv, pack.outputs)
        strides = _strides("kcij", problem.filter_shape)
    else:
        problem = tiles_of(conv, pack.outputs, 0).problem
        side = pack.outputs + conv.kernel[0] - 1
        strides = _strides("ijkc", (side, side, conv.out_channels, conv.filter_shape[1]))
    return problem, *_form(conv, pack.outputs, {"b": 0, **strides}, conv.out_channels, rows=pack.order != "Cuvc")


def _form(conv: Conv2d, outputs: int, strides: dict[str, int], block: int, rows: bool = True) -> tuple[list[str], str]:
    """Tables and an expression of type Form."""
    down, across = (floats(transform(outputs, taps).g) for taps in conv.kernel)
    tables = [
        f"static const double {name}[] = {_values(float(value).hex() for value in matrix.ravel())};"
        for name, matrix in (("down", down), ("across", across))
        if rows or name == "across"
    ]
    sizes = conv.out_channels, conv.filter_shape[1], *conv.kernel, 1 if block == conv.out_channels else conv.groups, block
    tile = len(down) if rows else conv.kernel[0], len(across)
    return tables, f"Form{_values((*sizes, *tile, _values(strides[axis] for axis in 'bkcij'), 'down' if rows else 'nullptr', 'across'))}"


def _quantised(conv: Conv2d, pack: QuantisedPack) -> tuple[list[str], str]:
    """Tables and an expression of type Quantised."""
    g = floats(transform(pack.outputs, conv.kernel[0]).g)
    sizes = conv.out_channels, conv.in_channels, pack.block, pack.depth(conv), *g.shape, SCALES.index(pack.scales), LARGEST, STEP
    return [f"static const double g[] = {_values(float(value).hex() for value in g.ravel())};"], f"Quantised{_values((*sizes, 'g'))}"


def _slabs(
    conv: Conv2d, pack: CudaPack | FilterPack | ChunkPack, per_group: int | None = None, per_filter: int | None = None
) -> tuple[list[str], str]:
    """Tables and an expression of type Slabs.

    Args:
        per_group, per_filter: strides in elements where filters are not stored one after the other.
    """
    _, slabs, inside = pack.shape(conv)
    order = "Cuvc" if isinstance(pack, ChunkPack) else pack.order
    if isinstance(pack, FilterPack):
        slab, step, part, places = 1, 1, 0, list(range(inside))
    elif isinstance(pack, ChunkPack):
        slab = step = pack.step(conv)
        part, places = 0, _chunk_places(pack, conv)
    else:
        slab, part, places = inside // pack.block // max(pack.parts, 1), pack.parts, _places(pack, conv.dtype)
        step = slab * pack.slabs
    together = pack.groups(conv) if isinstance(pack, ChunkPack) else 1  # groups of a block
    filters, channels = conv.out_channels // conv.groups, conv.filter_shape[1]
    sizes = conv.out_channels, together * channels, *conv.kernel, conv.groups if together == 1 else 1
    blocks = pack.block, slabs, slab, step, part, inside
    depth = math.prod(conv.filter_shape[1:])
    apart = per_group or filters * depth, per_filter or depth
    return [f"static const uint16_t places[] = {_values(places)};"], (
        f"Slabs{_values((*sizes, *blocks, order, 'places', *apart, together, filters, channels))}"
    )


def _chunk_places(pack: ChunkPack, conv: Conv2d) -> list[int]:
    """As `_places`, for filters stored as 16 bytes of every channel, then the next 16 bytes."""
    channels, order, unit = [row(place // 16, place % 16, pack.run) for place in range(pack.block)], pack.order(conv), 16 // conv.itemsize
    chunks = [order[first : first + unit] for first in range(0, len(order), unit)]
    return [channel * len(order) + element for chunk in chunks for channel in channels for element in chunk]


def _places(pack: CudaPack, dtype: str) -> list[int]:
    """The source of every element of a slab, found by packing numbered filters: channel * elements of a slab + element.

    32768 is added where the element is the rest of a split into parts. Numbers are packed digit by digit as 64 + digit, which every type
    holds exactly. For a split into two parts 2**-17 of the value is added, which the first part does not hold.
    """
    probe = Conv2d(1, pack.slabs * 64 // np.dtype(dtype).itemsize, 1, 1, pack.block, 1, dtype=dtype)
    slab = probe.in_channels // pack.slabs
    numbers = np.arange(pack.block)[:, None] * slab + np.arange(probe.in_channels)[None, :] % slab
    assert numbers.max() < 1 << 15
    found, rests = np.zeros(probe.filter_shape[0] * slab * max(pack.parts, 1), np.int64), np.zeros(1, bool)
    for shift in (10, 5, 0):
        digits = (64 + (numbers >> shift) % 32).astype(np.float64)
        w = (digits * (1 + 2.0**-17) if pack.parts == 2 else digits).astype(dtype).reshape(probe.filter_shape)
        packed = pack.filter(probe, w)[0, 0].astype(np.float64)
        rests = packed < 1
        found = found * 32 + (np.where(rests, packed * 2**17, packed) - 64).astype(np.int64)
    return [int(one) for one in found + 32768 * rests]
