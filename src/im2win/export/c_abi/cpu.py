"""Exports a CPU kernel as a C library: TVM's object code, functions that replace TVM's runtime, and a thread pool."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tvm

from im2win.codegen import pool
from im2win.codegen import toolchain as compilers
from im2win.codegen.llvm import ToolchainError, llvm_target
from im2win.device import arm
from im2win.device.cpu import Machine
from im2win.export.c_abi.checks import instructions
from im2win.export.c_abi.header import SOURCES, Interface
from im2win.export.c_abi.workspace import ALIGNMENT, Workspace
from im2win.numerics.winograd_matrices import floats, transform
from im2win.packing.cpu_blocked import FilterPack
from im2win.packing.cpu_channels import ChannelPack
from im2win.packing.cpu_dot import DotPack, added
from im2win.packing.winograd import AXES, WinogradPack
from im2win.registry import cpu_lowering
from im2win.registry.schedules import schedule_of
from im2win.schedules.cpu.loop_peeling import CONFIG
from im2win.schedules.cpu.registers import PIPELINE
from im2win.schedules.cpu_dot.instructions import INSTRUCTIONS
from im2win.schedules.cpu_dot.tile import DotTile
from im2win.spec.conv2d import Conv2d
from im2win.spec.dtypes import ELEMENT_TYPES
from im2win.spec.symbols import SYMBOL

FLAGS = (*pool.FLAGS, f"-I{pool.SOURCES}")
KERNEL_PREFIX = "__tvm_ffi_"  # prefix of a symbol in object code
# Symbols that the thread pool exports beside a layer's own functions: libraries of one program share the first one's pool.
SHARED = ("im2win_set_threads", "im2win_threads", "im2win_pool_1_run")


def export(conv: Conv2d, name: str, tile: Any, machine: Machine, folder: Path, called: str) -> tuple[Path, Interface]:
    """Writes CALLED.h, libCALLED.so and libCALLED.a. Returns the path of the shared library, and the contents of the header.

    Args:
        name, tile: the algorithm and its tile.
        machine: the CPU; its number of threads bounds the workspace.
        called: suffix of the names of functions and files.

    Raises:
        TileError: the tile is not legal.
        ToolchainError: there is no C compiler or objcopy for the machine, or the system is not Linux.
    """
    tools = tools_for(machine)
    symbol = f"im2win_conv_{called}_kernel"
    executable, demand = compiled(lowered(conv, name, tile, machine, symbol), machine)
    interface = _interface(conv, f"{name} for {machine.mcpu}", tile.pack, demand, machine.threads, called)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="im2win-c-") as place:
        work = Path(place)
        executable.mod.write_to_file(str(work / "kernel.o"))
        own = source(interface, tile.pack, demand, machine, f"{KERNEL_PREFIX}{symbol}", features(tile, machine))
        (work / "own.c").write_text(own)
        (work / "own.h").write_text(interface.header())
        _link(work, interface, tools)
        for made, kept in (("own.h", f"{called}.h"), ("layer.a", f"lib{called}.a"), ("layer.so", f"lib{called}.so")):
            placed(work / made, folder / kept)
    return folder / f"lib{called}.so", interface


def lowered(conv: Conv2d, name: str, tile: Any, machine: Machine, symbol: str) -> tvm.IRModule:
    """A kernel as a module with one function, `symbol`.

    Raises:
        TileError: the tile is not legal.
    """
    row = schedule_of(name)
    return tvm.IRModule({symbol: cpu_lowering.lower(conv, row, tile, machine)[SYMBOL].with_attr("global_symbol", symbol)})


def compiled(module: tvm.IRModule, machine: Machine) -> tuple[Any, Workspace]:
    """TVM's executable of a kernel, whose symbol has the prefix KERNEL_PREFIX, and the workspace that a call requests."""
    demand = Workspace()
    with tvm.transform.PassContext(config=CONFIG, instruments=[demand]):
        return tvm.compile(module, llvm_target(machine), tir_pipeline=PIPELINE), demand


def placed(made: Path, target: Path) -> None:
    """Copies a file to its destination atomically: a file that is in use is replaced, not overwritten."""
    partial = target.with_name(target.name + ".partial")
    shutil.copyfile(made, partial)
    os.replace(partial, target)


def _interface(conv: Conv2d, made: str, pack: Any, demand: Workspace, threads: int, called: str) -> Interface:
    return Interface(conv, called, made, math.prod(pack.shape(conv)), workspace_bytes(conv, pack, demand.bytes(threads)), threads)


def workspace_bytes(conv: Conv2d, pack: Any, demanded: int) -> int:
    """Bytes of a workspace at any address, of which the kernel itself requests `demanded`."""
    size = _bias_bytes(conv, pack) + demanded
    return size + ALIGNMENT - 1 if size else 0


def packed(conv: Conv2d, pack: Any) -> tuple[Conv2d, Any]:
    """(layer, packing) whose filters and bias are those of a layer and its packing: a depthwise kernel's are those of one group."""
    return (pack.single_group(conv), pack.filters(conv)) if isinstance(pack, ChannelPack) else (conv, pack)


def _padded(conv: Conv2d, pack: Any) -> int:
    """Output channels of a group, padded to whole blocks where biases are."""
    if isinstance(pack, DotPack):
        return conv.out_channels // conv.groups
    return int(pack.blocks_per_group(conv)) * int(pack.block)


def _bias_bytes(conv: Conv2d, pack: Any) -> int:
    """Bytes of the padded copy of a bias; 0 if the bias needs no padding."""
    conv, pack = packed(conv, pack)
    if not conv.bias or _padded(conv, pack) == conv.out_channels // conv.groups:
        return 0
    return -(-conv.groups * _padded(conv, pack) * conv.itemsize // ALIGNMENT) * ALIGNMENT


def source(
    interface: Interface, pack: Any, demand: Workspace, machine: Machine, kernel: str, needed: Sequence[str] = ()
) -> str:
    """The layer's own C file: its numbers, and its two functions. needed: features of the machine that the kernel uses."""
    conv = interface.conv
    call, packing = interface.prototypes()
    passed = ", ".join(interface.tensors)
    layouts: dict[Any, Any] = {WinogradPack: (_transformed, "1_transformed"), DotPack: (_dot, "2_dot")}
    layout, kind = layouts.get(type(pack), (_windows, "1_windows"))
    return "\n".join(
        [
            '#include "layer.h"', '#include "own.h"', '#include "pack.h"', "",
            instructions(machine, needed), "",
            *layer_source("layer", conv, pack, (demand.serial, demand.task), machine.threads, kernel), "",
            f"{call} {{", f"  const void *const tensors[] = {{{passed}}};",
            "  return im2win_layer_1_call(&layer, tensors, workspace);", "}", "",
            *layout(conv, pack), "", f"{packing} {{ return im2win_pack_{kind}(&filters, w, packed); }}", "",
        ]
    )  # fmt: skip


def features(tile: Any, machine: Machine) -> list[str]:
    """Those of a machine's features that a kernel uses, or that LLVM may use for its instruction."""
    used = {name for one in INSTRUCTIONS if isinstance(tile, DotTile) and one.name == tile.instruction for name in one.features}
    return [name for name in machine.features if name in used]


def layer_source(name: str, conv: Conv2d, pack: Any, demanded: tuple[int, int], threads: int, kernel: str) -> list[str]:
    """C code that declares a compiled kernel, and defines the numbers of its layer as the constant `name`.

    Args:
        demanded: bytes of workspace that the kernel requests for the whole call, and for each of at most `threads` tasks.
    """
    data, (conv, pack) = conv.input_shape, packed(conv, pack)
    bias = (conv.out_channels,) if isinstance(pack, DotPack) else (pack.blocks(conv), pack.block)
    shapes = {
        "data": data, "filter": pack.shape(conv), "bias": bias, "scale": (conv.scales,), "residual": conv.output_shape,
        "output": conv.output_shape,
    }  # fmt: skip
    elements = {name: math.prod(shape) for name, shape in shapes.items()} | {"bias": conv.out_channels}
    kinds = {name: ELEMENT_TYPES[dtype] for name, dtype in conv.dtypes.items()}
    each = ((shapes[name], elements[name], kinds[name]) for name in conv.arguments)
    tensors = ", ".join(
        f"{{{len(shape)}, {_braces(shape)}, {count}, {kind.dlpack}, {kind.itemsize * 8}}}" for shape, count, kind in each
    )
    numbers = (
        kernel, len(conv.arguments), conv.arguments.index("bias") if conv.bias else -1, conv.groups, conv.out_channels // conv.groups,
        _padded(conv, pack), threads, *demanded, f"{{{tensors}}}", "instructions",
    )  # fmt: skip
    return [
        f"int {kernel}(void *self, const im2win_any *arguments, int32_t count, im2win_any *result);", "",
        f"static const im2win_layer {name} = {_braces(numbers)};",
    ]  # fmt: skip


def _braces(values: Any) -> str:
    return f"{{{', '.join(map(str, values))}}}"


def _windows(conv: Conv2d, pack: FilterPack | ChannelPack) -> list[str]:
    conv, filters = packed(conv, pack)
    extents = dict(zip("cuv", conv.filter_shape[1:], strict=True))
    steps = [math.prod(extents[inner] for inner in filters.order[filters.order.index(axis) + 1 :]) for axis in "cuv"]
    sizes = conv.out_channels, *conv.filter_shape[1:], conv.groups, filters.block, math.prod(filters.shape(conv)), _braces(steps)
    return [f"static const im2win_windows filters = {_braces(sizes)};"]


def _dot(conv: Conv2d, pack: DotPack) -> list[str]:
    single = pack.single_group(conv)
    integers = conv.dtypes["filter"] == "int8"
    shift = conv.zero_point + added(pack.shift, conv.dtype)
    sizes = (
        single.out_channels, *single.filter_shape[1:], single.groups, pack.block, pack.group, pack.chunk(conv), pack.pitch(conv),
        int(pack.along == "columns"), int(integers), int(conv.dtypes["filter"] == "float16"), shift, math.prod(pack.shape(conv)),
    )  # fmt: skip
    return [f"static const im2win_dot filters = {_braces(sizes)};"]


def _transformed(conv: Conv2d, pack: WinogradPack) -> list[str]:
    shape = pack.shape(conv)
    strides = {axis: math.prod(shape[i + 1 :]) for i, axis in enumerate(pack.order)}
    matrices = [floats(transform(pack.outputs, taps).g) for taps in conv.kernel]
    sizes = conv.out_channels, conv.filter_shape[1], *conv.kernel, conv.groups, pack.block, *(len(matrix) for matrix in matrices)
    filters = *sizes, math.prod(shape), _braces(strides[axis] for axis in AXES), "down", "across"
    return [
        *(
            f"static const double {name}[] = {_braces(float(value).hex() for value in matrix.ravel())};"
            for name, matrix in zip(("down", "across"), matrices, strict=True)
        ),
        f"static const im2win_transformed filters = {_braces(filters)};",
    ]


# --- the compiler's part


@dataclass(frozen=True)
class Tools:
    """Commands: a C compiler, objcopy and ar."""

    compiler: str
    objcopy: str
    archiver: str


_MISSING = "a C library needs a C compiler and objcopy on PATH (gcc or clang, binutils); they were not found."


def compiler_on_path() -> str:
    """The C compiler.

    Raises:
        ToolchainError: there is none, or the system is not Linux.
    """
    if not sys.platform.startswith("linux"):
        raise ToolchainError(f"C libraries are made on Linux; this system is {sys.platform}.")
    found = compilers.compiler("CC")
    if not found:
        raise ToolchainError(_MISSING)
    return found


def tools_for(machine: Machine) -> Tools:
    """The tools that make libraries for a machine: those on PATH, or for an Arm one on another machine those of Debian's cross compiler.

    Raises:
        ToolchainError: one of them is missing, or the system is not Linux.
    """
    if not arm.is_foreign(machine):
        compiler, objcopy = compiler_on_path(), next(filter(None, map(shutil.which, ("objcopy", "llvm-objcopy"))), None)
        if not objcopy:
            raise ToolchainError(_MISSING)
        return Tools(compiler, objcopy, "ar")
    names = [f"{arm.TRIPLE}-{name}" for name in ("gcc", "objcopy", "ar")]
    missing = [name for name in names if not shutil.which(name)]
    if missing:
        raise ToolchainError(f"a C library for {machine.brand} needs {' and '.join(missing)} on PATH (package gcc-{arm.TRIPLE}).")
    return Tools(*names)


def run(work: Path, *command: str) -> None:
    """Runs a command in a folder.

    Raises:
        ToolchainError: it failed; with its output.
    """
    done = subprocess.run(command, cwd=work, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ToolchainError(f"{command[0]}: {done.stderr.strip()[:2000]}")


def _link(work: Path, interface: Interface, tools: Tools) -> None:
    """Links layer.so and layer.a from kernel.o and own.c. Only the layer's own functions and those of the pool are visible."""
    compiler = tools.compiler
    run(work, compiler, *FLAGS, f"-I{SOURCES}", "-c", "own.c", "-o", "glue.o")
    for name in ("layer", "pack"):
        run(work, compiler, *FLAGS, "-c", str(SOURCES / f"{name}.c"), "-o", f"{name}.o")
    run(work, compiler, *FLAGS, "-c", str(pool.SOURCES / "pool.c"), "-o", "im2win_pool_1.o")
    run(work, compiler, "-r", "-nostdlib", "-o", "all.o", "kernel.o", "glue.o", "layer.o", "pack.o")
    kept = [word for function in interface.functions for word in ("--keep-global-symbol", function)]
    own = f"{interface.function}.o"
    run(work, tools.objcopy, *kept, "all.o", own)
    run(work, tools.archiver, "rcs", "layer.a", own, "im2win_pool_1.o")
    visible = "; ".join((*interface.functions, *SHARED))
    (work / "symbols").write_text(f"{{ global: {visible}; local: *; }};\n")
    flags = ("-shared", "-pthread", "-Wl,--version-script=symbols", "-Wl,-z,noexecstack", f"-Wl,-soname,lib{interface.name}.so")
    run(work, compiler, *flags, "-o", "layer.so", own, "im2win_pool_1.o", "-lm")
