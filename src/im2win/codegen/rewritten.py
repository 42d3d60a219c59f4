"""Converts reconstructed kernels back to a module that TVM compiles like any other.

TVM generates CUDA, and rules change kernels, their parameters and their launches. The result is an IRModule again. Its functions have the
same names and tensors, the new launches, and the new workspace tensors between them. Their kernels are empty in TVM; when TVM has generated
their source, the reconstructed source replaces it. TVM's host code, function table and export therefore work as for every other kernel,
with or without a GPU. Launches are compared argument by argument.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import tvm
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from im2win.codegen import cuda as cuda_codegen
from im2win.codegen.cuda_source import generate
from im2win.codegen.llvm import Compiled
from im2win.common.tvm_hooks import registered
from im2win.device.gpu import Gpu
from im2win.emulator import Launch
from im2win.reconstruct.parse.unit import Kernel, Unit
from im2win.reconstruct.rulesets import Applied, Settings, rewrite
from im2win.reconstruct.text_rules import ReconstructError
from im2win.schedules.cuda.passes import CONFIG, PIPELINE

log = logging.getLogger("im2win.reconstruct")
_POSTPROCESS, _COMPILE = "tvm_callback_cuda_postproc", "tvm_callback_cuda_compile"
ALIGNMENT = 128  # bytes; of every workspace in a tensor that holds them all
Tensor = tuple[str, tuple[int, ...], str]
"""(name, shape, type)"""


@dataclass(frozen=True)
class Function:
    """A function of a module: its name, its tensors, and the kernels that it launches."""

    name: str
    tensors: tuple[Tensor, ...]
    unit: Unit


@dataclass(frozen=True)
class Reconstructed:
    """The result of applying rules to a module.

    Attributes:
        module: the same functions with the new launches.
        source: source of all kernels, under the names that TVM gives them.
        applied: what the rules did, by function.
    """

    module: tvm.IRModule
    source: str
    applied: Mapping[str, Applied]

    @property
    def changed(self) -> bool:
        """Whether any rule changed anything."""
        return any(applied.matches for applied in self.applied.values())


def functions(module: tvm.IRModule, gpu: Gpu, pipeline: str | None = None) -> list[Function]:
    """The functions of a scheduled module, each with the CUDA that TVM generates for it.

    Args:
        pipeline: name of TVM's lowering pipeline; None for TVM's default pipeline, which inserts barriers itself.
    """
    config = CONFIG if pipeline else {}
    found = []
    for symbol, function in module.functions.items():
        name = str(symbol.name_hint)
        alone = tvm.IRModule({name: function.with_attr("global_symbol", name)})
        with cuda_codegen.reconstructed():
            made = generate(alone, cuda_codegen.cuda_target(gpu), config, pipeline)
        tensors = tuple((str(var.name), tuple(map(int, var.ty.shape)), str(var.ty.dtype)) for var in function.params)
        found.append(Function(name, tensors, Unit(made.source, made.launches, made.workspace)))
    return found


def reconstruct_module(
    module: tvm.IRModule, gpu: Gpu, rules: Sequence[str], settings: Settings | None = None, pipeline: str | None = None
) -> Reconstructed:
    """Applies rule sets to every function of a scheduled module.

    Args:
        rules: names of rule sets, see `reconstruct.rulesets`. A rule set that does not fit leaves a function unchanged; the log says why.
        settings: for the rules; if None, a block's shared memory is the GPU's.
        pipeline: see `functions`.

    Raises:
        ReconstructError: an unknown rule set, a function that passes numbers or parts of tensors to its kernels, or a result that TVM would
            launch differently.
    """
    settings = settings or Settings(shared=gpu.block_shared)
    applied, made = dict[str, Applied](), list[Function]()
    for function in functions(module, gpu, pipeline):
        applied[function.name] = rewrite(function.unit, rules, settings)
        made.append(replace(function, unit=applied[function.name].unit))
    return rebuilt(made, gpu, applied)


def rebuilt(made: Sequence[Function], gpu: Gpu, applied: Mapping[str, Applied], into: str = "") -> Reconstructed:
    """A module of functions whose kernels were rewritten.

    Args:
        into: name of a flat tensor argument that holds the functions' workspaces one behind the other; "" allocates them in every call.

    Raises:
        ReconstructError: see `reconstruct_module`, or the tensor is too small.
    """
    return Reconstructed(*_module(made, gpu, into), applied)


def compile_reconstructed(
    module: tvm.IRModule, gpu: Gpu, rules: Sequence[str], settings: Settings | None = None, pipeline: str | None = None
) -> tuple[Compiled, Reconstructed]:
    """Applies rule sets to a scheduled module and compiles it; see `reconstruct_module`.

    Raises:
        ToolchainError: there is no CUDA compiler.
        ReconstructError: see `reconstruct_module`.
    """
    cuda_codegen.compiler()
    made = reconstruct_module(module, gpu, rules, settings, pipeline)
    with registered(_POSTPROCESS, lambda before: lambda source, target: made.source):
        compiled = cuda_codegen.compile_source(made.module, gpu)
    return replace(compiled, allocated=workspace_bytes(made)), made


def workspace_bytes(made: Reconstructed) -> int:
    """Bytes that calls allocate beside their arguments."""
    spaces = [space for applied in made.applied.values() for space in applied.unit.workspace.values()]
    return sum(bytes_of(*space) for space in spaces)


def bytes_of(shape: Sequence[int], dtype: str) -> int:
    """Bytes of a tensor."""
    return math.prod(shape) * int(tvm.DataType(dtype).itemsize)


def placed_bytes(spaces: Iterable[tuple[Sequence[int], str]]) -> int:
    """Bytes of a tensor that holds all these, one behind the other, each from a multiple of `ALIGNMENT` on."""
    return sum(-(-bytes_of(*space) // ALIGNMENT) * ALIGNMENT for space in spaces)


# --- the module


def _module(made: Sequence[Function], gpu: Gpu, into: str) -> tuple[tvm.IRModule, str]:
    """A module of functions, and the source of its kernels under the names and with the parameters that TVM gives them."""
    module = tvm.IRModule({function.name: _function(function, into).with_attr("global_symbol", function.name) for function in made})
    launches = list(generate(module, cuda_codegen.cuda_target(gpu), CONFIG, PIPELINE).launches)
    heads, kernels = list[str](), list[str]()
    for function in made:
        own = [launches.pop(_next(launches, function.name)) for _ in function.unit.launches]
        heads.append(function.unit.head)
        places = _places(function, into)
        for wanted, given in zip(function.unit.launches, own, strict=True):
            kernels.append(_definition(function.unit.kernel(wanted.kernel), wanted, given, into, places))
    return module, _one_head(heads) + "\n" + "\n".join(kernels)


def _next(launches: Sequence[Launch], function: str) -> int:
    """The index of the first launch whose kernel TVM named after a function."""
    return next(i for i, launch in enumerate(launches) if re.fullmatch(rf"{function}_kernel(?:_\d+)?", launch.kernel))


def _one_head(heads: Sequence[str]) -> str:
    """The longest head; each of the others must consist of lines of it.

    Raises:
        ReconstructError: functions need different heads.
    """
    longest = max(heads, key=len)
    lines = set(longest.splitlines())
    for head in heads:
        if not set(head.splitlines()) <= lines:
            raise ReconstructError("two functions of a module need different declarations before their kernels; build them apart.")
    return longest


def _places(function: Function, into: str) -> dict[str, int]:
    """Byte offsets of each workspace in the tensor `into`; empty if the function has no such tensor.

    Raises:
        ReconstructError: the tensor is too small.
    """
    tensor = next((one for one in function.tensors if one[0] == into), None)
    if tensor is None:
        return {}
    places, end = dict[str, int](), 0
    for name, (shape, dtype) in function.unit.workspace.items():
        places[name] = end
        end += placed_bytes([(shape, dtype)])
    size = bytes_of(*tensor[1:])
    if end > size:
        raise ReconstructError(f"the tensors between the kernels of {function.name} take {end} bytes; {into} has {size}.")
    return places


def _function(function: Function, into: str) -> Any:
    """A TVM function with the launches and workspaces of a unit. Its kernels only mention their arguments.

    Raises:
        ReconstructError: a launch takes a number, or part of a tensor.
    """
    with IRBuilder() as builder, T.prim_func(s_tir=False):
        T.func_name(function.name)
        held: dict[str, Any] = {name: T.arg(name, T.buffer(shape, dtype)) for name, shape, dtype in function.tensors}
        places = _places(function, into)
        for name, (shape, dtype) in function.unit.workspace.items():
            if name in places:
                held[name] = held[into]
                continue
            held[name] = T.alloc_buffer(shape, dtype, scope="global")
            IRBuilder.name(name, held[name])
        for launch in function.unit.launches:
            other = [one for one in launch.arguments if one not in held]
            if other:
                what = f"kernel {launch.kernel} takes {other[0]!r}, which is no tensor of {function.name}"
                raise ReconstructError(f"{what}: numbers and parts of tensors do not go back into TVM.")
            names = [one for one in launch.arguments if isinstance(one, str)]
            _launch(launch, list({into if name in places else name: held[name] for name in names}.values()))
    return builder.get()


def _launch(launch: Launch, buffers: Sequence[Any]) -> None:
    """Emits a launch of an empty kernel that mentions these buffers."""
    axes = [*zip(("blockIdx.x", "blockIdx.y", "blockIdx.z"), launch.grid, strict=True),
            *zip(("threadIdx.x", "threadIdx.y", "threadIdx.z"), launch.block, strict=True)]  # fmt: skip
    frames = [T.launch_thread(axis, extent) for axis, extent in axes if extent > 1 or axis.endswith(".x")]
    for frame in frames:
        frame.__enter__()
    places = [T.address_of(buffer[(0,) * len(buffer.shape)]) for buffer in buffers]
    if launch.dynamic_bytes:
        shared = T.alloc_buffer((launch.dynamic_bytes,), "uint8", scope="shared.dyn")
        IRBuilder.name("shared", shared)
        places.append(T.address_of(shared[0]))
    T.evaluate(T.call_extern("void", "im2win_reconstructed", *places))
    for frame in reversed(frames):
        frame.__exit__(None, None, None)


def _definition(kernel: Kernel, wanted: Launch, given: Launch, into: str, places: Mapping[str, int]) -> str:
    """A kernel under TVM's name, with its parameters in TVM's order. Workspaces in the tensor `into` become pointers into it.

    Raises:
        ReconstructError: TVM would launch the kernel differently.
    """
    tensors = {into if name in places else name for name in wanted.arguments}
    same = (wanted.grid, wanted.block, wanted.dynamic_bytes, sorted(map(str, tensors))) == (
        given.grid, given.block, given.dynamic_bytes, sorted(map(str, given.arguments)),
    )  # fmt: skip
    if not same:
        raise ReconstructError(f"kernel {kernel.name} is to be launched as {wanted}; TVM launches {given}.")
    by_tensor = {str(name): one for name, one in zip(wanted.arguments, kernel.parameters, strict=True)}
    words = {name: f"{one.type} {'__restrict__ ' * one.restrict}{one.name}" for name, one in by_tensor.items()}
    rows = [f"unsigned char* {into}_ptr" if name == into and places else words[str(name)] for name in given.arguments]
    found = [f"  {words[name]} = ({one.type})({into}_ptr + {places[name]});\n" for name, one in by_tensor.items() if name in places]
    numbers = ", ".join(str(one) for one in (kernel.bounds, kernel.resident) if one is not None)
    bounds = f"__launch_bounds__({numbers}) " if numbers else ""
    body = "\n" + "".join(found) + kernel.body.lstrip("\n")
    return f'extern "C" __global__ void {bounds}{given.kernel}({", ".join(rows)}) {{{body}}}\n'
