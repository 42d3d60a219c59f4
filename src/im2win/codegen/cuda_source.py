"""Generates CUDA source and launches from a scheduled module, without a GPU and without a CUDA compiler."""

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
from im2win.schedules.cuda.launch_overlap import overlapped

_POSTPROCESS = "tvm_callback_cuda_postproc"
_DYNAMIC = "tirx.use_dyn_shared_memory"
_MAP = "runtime.cuTensorMapEncodeTiled"
_CLUSTER = re.compile(r"__cluster_dims__\((\d+), 1, 1\) (?:__launch_bounds__\([\d, ]+\) )?(\w+)\(")
_SWIZZLES = {0: 0, 2: 64, 3: 128}  # bytes of the swizzle, by CUtensorMapSwizzle


@dataclass(frozen=True)
class Generated:
    """TVM's output for a module: CUDA source, launches in order, and the workspace tensors that it allocates between them.

    Attributes:
        workspace: (shape, dtype) of each tensor by name.
    """

    source: str
    launches: tuple[Launch, ...]
    workspace: dict[str, tuple[tuple[int, ...], str]]


@pass_instrument
class Launches:
    """A pass instrument that reads the launches from the host code after TVM has split it from the device code."""

    def __init__(self) -> None:
        self.found: list[Launch] = []
        self.workspace: dict[str, tuple[tuple[int, ...], str]] = {}
        self._maps: dict[str, TensorMap] = {}

    def run_after_pass(self, module: tvm.IRModule, info: Any) -> None:
        if info.name == "tirx.SplitHostDevice":
            for function in module.functions.values():
                if not function.attrs.get("tirx.is_global_func"):  # marks device functions
                    self._read(function.body, {})

    def generated(self, source: str) -> Generated:
        """The launches together with the source that goes to the compiler."""
        clusters = {name: int(size) for size, name in _CLUSTER.findall(source)}
        waiting = overlapped(source)
        launches = (replace(one, cluster=clusters.get(one.kernel, 1), overlap=one.kernel in waiting) for one in self.found)
        return Generated(source, tuple(launches), self.workspace)

    def _read(self, stmt: Any, values: dict[Any, int]) -> None:
        """Walks the host code and unrolls its loops; `values` holds the known values of its variables."""
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
    """The value of an expression if it is a known integer under the variables' values, else None."""
    if not str(expression.ty).startswith("int"):
        return None
    analyzer = sym.Analyzer()
    for variable, value in values.items():
        analyzer.bind(variable, value)
    found = analyzer.simplify(expression)
    return int(found) if isinstance(found, tirx.IntImm) else None


def _tensor_map(call: Any) -> tuple[str, TensorMap] | None:
    """The variable and the description of a call that creates a TMA tensor map; None for other calls."""
    if not isinstance(call, tvm.ir.Call) or not call.args or getattr(call.args[0], "value", None) != _MAP:
        return None
    _, variable, dtype, rank, source, *values = call.args
    rank, numbers = int(rank), [int(one) for one in values]
    ends = [0, rank, 2 * rank - 1, 3 * rank - 1, 4 * rank - 1]
    sizes, strides, box, steps = (tuple(numbers[start:end]) for start, end in itertools.pairwise(ends))
    swizzle, itemsize = _SWIZZLES[numbers[-3]], np.dtype(str(dtype.value)).itemsize
    return str(variable), TensorMap(str(source).removesuffix(".data"), sizes, (itemsize, *strides), box, steps, swizzle)


def _launch(call: Any, host: dict[Any, int], maps: dict[str, TensorMap]) -> Launch:
    """The launch that a kernel call describes."""
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
    """Captures the source when TVM offers it for post-processing, after other registered callbacks, and aborts the compilation."""

    def after(before: Any) -> Any:
        def take(source: str, target: Any) -> str:
            sources.append(str(before(source, target)) if before else source)
            raise RuntimeError("generated: nothing more is wanted")

        return take

    with registered(_POSTPROCESS, after):
        try:
            yield
        except RuntimeError:  # TVM converts our exception to a plain RuntimeError
            if not sources:
                raise


def generate(module: tvm.IRModule, target: Any, config: dict[str, Any] | None = None, pipeline: str | None = None) -> Generated:
    """Lowers a scheduled module for a CUDA target. Returns its source and launches.

    Args:
        config: configuration of TVM's passes.
        pipeline: name of TVM's lowering pipeline; None for the target's own.
    """
    watch, sources = Launches(), list[str]()
    with _stop_at_source(sources), tvm.transform.PassContext(config=config or {}, instruments=[watch]):
        tvm.compile(module, target, tir_pipeline=pipeline)
    return watch.generated("\n".join(sources))
