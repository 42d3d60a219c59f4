"""What kernels of a CPU allocate, as TVM's own pipeline and the package count it."""

from __future__ import annotations

from typing import Any

import tvm
from ops import host
from tvm.ir.instrument import pass_instrument

from im2win.codegen.llvm import llvm_target
from im2win.codegen.workspace import Allocations, buffer_bytes, children
from im2win.registry.cpu_lowering import lower
from im2win.registry.schedules import schedule_of
from im2win.schedules.cpu.loop_peeling import CONFIG
from im2win.schedules.cpu.registers import PIPELINE
from im2win.schedules.cpu.tile import Tile
from im2win.spec.conv2d import Conv2d


@pass_instrument
class Buffers:
    """Watches the compiler: bytes of each buffer as scheduled, by name (of a loop cut in two, the larger part's)."""

    def __init__(self) -> None:
        self.bytes: dict[str, int] = {}

    def run_after_pass(self, module: Any, info: Any) -> None:
        if info.name == "tirx.FlattenBuffer":
            [function] = module.functions.values()
            self._note(function.body)

    def _note(self, stmt: Any) -> None:
        if count := buffer_bytes(stmt):
            self.bytes[stmt.buffer.name] = max(count, self.bytes.get(stmt.buffer.name, 0))
        for child in children(stmt):
            self._note(child)


def allocated(conv: Conv2d, name: str, tile: Tile) -> tuple[dict[str, int], int]:
    """Bytes of a kernel's buffers by name, and what `Allocations` says that a call allocates: of one compilation."""
    watch, said = Buffers(), Allocations(host().threads)
    module = lower(conv, schedule_of(name), tile, host())
    with tvm.transform.PassContext(config=CONFIG, instruments=[watch, said]):
        tvm.compile(module, llvm_target(host()), tir_pipeline=PIPELINE)
    return watch.bytes, said.bytes
