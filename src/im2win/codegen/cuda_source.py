"""From a scheduled module to CUDA source and its launches, without a GPU and without a CUDA compiler."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import tvm
from tvm import sym, tirx
from tvm.ir.instrument import pass_instrument

from im2win.common.tvm_hooks import registered
from im2win.emulator import Launch, TensorMap

_POSTPROCESS = "tvm_callback_cuda_postproc"
_DYNAMIC = "tirx.use_dyn_shared_memory"
_MAP = "runtime.cuTensorMapEncodeTiled"
_CLUSTER = re.compile(r"__cluster_dims__\((\d+), 1, 1\) (?:__launch_bounds__\([\d, ]+\) )?(\w+)\(")
_SWIZZLES = {0: 0, 2: 64, 3: 128}  # bytes, by the driver's numbers


@dataclass(frozen=True)
class Generated:
    """What TVM generates for a module: CUDA source, its launches in order, and the tensors that it allocates between them."""

    source: str
    launches: tuple[Launch, ...]
    workspace: dict[str, tuple[tuple[int, ...], str]]


@pass_instrument
class Launches:
    """Reads the launches off the host's code once TVM has split it from the device's."""

    def __init__(self) -> None:
        self.found: list[Launch] = []
        self.workspace: dict[str, tuple[tuple[int, ...], str]] = {}
        self._maps: dict[str, TensorMap] = {}

    def run_after_pass(self, module: tvm.IRModule, info: Any) -> None:
        if info.name == "tirx.SplitHostDevice":
            for function in module.functions.values():
                if not function.attrs.get("tirx.is_global_func"):  # which is what runs on the device
                    self._read(function.body, {})

    def generated(self, source: str) -> Generated:
        """What was read, with the source that goes to the compiler."""
        clusters = {name: int(size) for size, name in _CLUSTER.findall(source)}
        launches = (replace(launch, cluster=clusters.get(launch.kernel, 1)) for launch in self.found)
        return Generated(source, tuple(launches), self.workspace)

    def _read(self, stmt: Any, values: dict[Any, int]) -> None:
        """Follows the host's code: its loops round by round, `values` of its variables as far as they are known."""
        if isinstance(stmt, tirx.Evaluate) and isinstance(stmt.value, tvm.ir.Call) and stmt.value.op.name == "tirx.call_ffi_kernel":
            self.found.append(_launch(stmt.value, values, self._maps))
        if isinstance(stmt, tirx.Evaluate) and (found := _tensor_map(stmt.value)) is not None:
            self._maps[found[0]] = found[1]
        if isinstance(stmt, tirx.AllocBuffer) and stmt.buffer.scope() == "global":
            self.workspace[stmt.buffer.name] = tuple(map(int, stmt.buffer.shape)), str(stmt.buffer.dtype)
        if isinstance(stmt, tirx.Bind) and (value := _value(stmt.value, values)) is not None:
            values[stmt.var] = value
        if isinstance(stmt, tirx.For):
            for step in range(int(stmt.extent)):
                self._read(stmt.body, {**values, stmt.loop_var: int(stmt.min) + step})
            return
        for child in [*getattr(stmt, "seq", ()), *([stmt.body] if hasattr(stmt, "body") else [])]:
            self._read(child, values)


def _value(expression: Any, values: dict[Any, int]) -> int | None:
    """An expression's value, if it is an integer that follows from those of its variables."""
    if not str(expression.ty).startswith("int"):
        return None
    analyzer = sym.Analyzer()
    for variable, value in values.items():
        analyzer.bind(variable, value)
    found = analyzer.simplify(expression)
    return int(found) if isinstance(found, tirx.IntImm) else None


def _tensor_map(call: Any) -> tuple[str, TensorMap] | None:
    """(name of the variable, what it holds) of a call that makes a tensor's map; None for others."""
    if not isinstance(call, tvm.ir.Call) or not call.args or getattr(call.args[0], "value", None) != _MAP:
        return None
    _, variable, dtype, rank, source, *values = call.args
    rank, numbers = int(rank), [int(one) for one in values]
    ends = [0, rank, 2 * rank - 1, 3 * rank - 1, 4 * rank - 1]
    sizes, strides, box, steps = (tuple(numbers[start:end]) for start, end in itertools.pairwise(ends))
    swizzle, itemsize = _SWIZZLES[numbers[-3]], np.dtype(str(dtype.value)).itemsize
    return str(variable), TensorMap(str(source).removesuffix(".data"), sizes, (itemsize, *strides), box, steps, swizzle)


def _launch(call: Any, host: dict[Any, int], maps: dict[str, TensorMap]) -> Launch:
    kernel, *values = call.args
    names = list(call.attrs.launch_params)
    arguments, numbers = values[: len(values) - len(names)], values[len(values) - len(names) :]
    extents = dict(zip(names, map(int, numbers), strict=True))
    grid, block = (tuple(extents.get(f"{what}Idx.{axis}", 1) for axis in "xyz") for what in ("block", "thread"))
    names_of = (str(one).removesuffix(".data") if (value := _value(one, host)) is None else value for one in arguments)
    given = tuple(maps.get(one, one) if isinstance(one, str) else one for one in names_of)
    return Launch(str(kernel.value), given, grid, block, extents.get(_DYNAMIC, 0))


@contextlib.contextmanager
def _stop_at_source(sources: list[str]) -> Iterator[None]:
    """Takes the source where TVM offers it for a last change, after whoever has registered for that, and goes no further."""

    def after(before: Any) -> Any:
        def take(source: str, target: Any) -> str:
            sources.append(str(before(source, target)) if before else source)
            raise RuntimeError("generated: nothing more is wanted")

        return take

    with registered(_POSTPROCESS, after):
        try:
            yield
        except RuntimeError:  # ours comes back as a plain one
            if not sources:
                raise


def generate(module: tvm.IRModule, target: Any, config: dict[str, Any] | None = None, pipeline: str | None = None) -> Generated:
    """Lowers a scheduled module for a CUDA target and returns its source and launches.

    Args:
        config: of TVM's passes.
        pipeline: the name of TVM's lowering pipeline; None for the target's own.
    """
    watch, sources = Launches(), list[str]()
    with _stop_at_source(sources), tvm.transform.PassContext(config=config or {}, instruments=[watch]):
        tvm.compile(module, target, tir_pipeline=pipeline)
    return watch.generated("\n".join(sources))
