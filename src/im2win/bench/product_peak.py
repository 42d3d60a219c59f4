"""A program that multiplies in one instruction of `schedules.cpu_dot.instructions`, between registers, as often as it can."""

from __future__ import annotations

from typing import Any

import tvm
from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from im2win.device.cpu import Machine
from im2win.schedules.cpu_dot.instructions import INSTRUCTIONS, TILE_ROWS, TILE_WORDS, Instruction, definitions, multiplied
from im2win.schedules.cpu_dot.product import PERMISSION, amx
from im2win.schedules.cpu_dot.vectors import load, splat, store, typed

CHAINS = 12  # independent sums of vectors; two units of latency five need ten
TILE_CHAINS = 6  # independent AMX tiles of sums; two registers are left for the factors
SUM_WORDS = TILE_CHAINS * TILE_ROWS * TILE_WORDS  # of a thread, as many as AMX needs
_ROW_BYTES = 4 * TILE_WORDS


def fastest(dtype: str, machine: Machine) -> Instruction | None:
    """The machine's fastest instruction for products in an element type; None where those are fused multiply-adds or whole products."""
    able = (one for one in INSTRUCTIONS if dtype in one.dtypes and one.group > 1 and lanes_of(one, machine))
    return next(able, None)


def lanes_of(one: Instruction, machine: Machine) -> int:
    """Words of the machine's longest vectors that an instruction takes; 0 if the machine has none."""
    return next((lanes for lanes in one.lanes if lanes <= machine.lanes and not one.missing(machine, lanes)), 0)


def operations(one: Instruction, machine: Machine) -> int:
    """Multiplications and additions in a step of a thread."""
    if one.tiles:
        return 2 * TILE_CHAINS * TILE_ROWS * TILE_WORDS * TILE_WORDS * one.group
    return 2 * CHAINS * lanes_of(one, machine) * one.group


def module(dtype: str, one: Instruction, machine: Machine, steps: int) -> tvm.IRModule:
    """A function of factors, uint8 [128], and sums, int32 or float32 [threads, SUM_WORDS], to which each thread adds its products.

    Args:
        dtype: element type of the products. steps: times that every sum of a thread is added to.
    """
    lanes = lanes_of(one, machine)
    with IRBuilder() as builder, T.prim_func(s_tir=False):
        T.func_name("main")
        T.func_attr({"global_symbol": "main", "tirx.noalias": True})
        factors = T.arg("factors", T.buffer((128,), "uint8"))
        sums = T.arg("sums", T.buffer((machine.threads * SUM_WORDS,), one.sums))
        if one.tiles:
            T.evaluate(tirx.call_extern("void", "im2win_amx"))
        with T.parallel(machine.threads) as thread:
            if one.tiles:
                _tiles(dtype, factors, sums, thread * SUM_WORDS, steps)
            else:
                _vectors(one, lanes, factors, sums, thread * SUM_WORDS, steps)
    function = builder.get()
    if code := definitions(one, lanes) + (PERMISSION if one.tiles else ""):
        function = function.with_body(tirx.AttrStmt(tirx.IntImm("int32", 0), "pragma_import_llvm", tvm.ir.StringImm(code), function.body))
    return tvm.IRModule({"main": function})


def _vectors(one: Instruction, lanes: int, factors: Any, sums: Any, first: Any, steps: int) -> None:
    held = [T.alloc_buffer((lanes,), one.sums, scope="local") for _ in range(CHAINS)]
    for i, buffer in enumerate(held):
        store(buffer, 0, load(sums, first + i * lanes, lanes), lanes)
    wanted = typed(one.staged, lanes * one.group)
    data, taps = (T.bind(tirx.reinterpret(wanted, load(factors, at, 4 * lanes))) for at in (0, 64))
    with T.serial(steps):
        for buffer in held:
            total = load(buffer, 0, lanes)  # is a factor where LLVM would otherwise multiply before the loop
            factor = tirx.reinterpret(wanted, total) if one.name == "madd" else data
            store(buffer, 0, multiplied(one, total, factor, taps, lanes), lanes)
    for i, buffer in enumerate(held):
        store(sums, first + i * lanes, load(buffer, 0, lanes), lanes)


def _tiles(dtype: str, factors: Any, sums: Any, first: Any, steps: int) -> None:
    settings = T.alloc_buffer((64,), "uint8", scope="local")
    store(settings, 0, splat(tirx.const(0, "uint8"), 64), 64)
    T.buffer_store(settings, tirx.const(1, "uint8"), [0])  # palette
    for register in range(TILE_CHAINS + 2):
        T.buffer_store(settings, tirx.const(_ROW_BYTES, "uint8"), [16 + 2 * register])
        T.buffer_store(settings, tirx.const(TILE_ROWS, "uint8"), [48 + register])
    T.evaluate(tirx.call_llvm_intrin("void", "llvm.x86.ldtilecfg", T.address_of(settings[0])))
    left, right = TILE_CHAINS, TILE_CHAINS + 1
    for register, at in ((left, 0), (right, 64)):  # every row is the same
        amx("tileloadd64", register, T.tvm_access_ptr(T.type_annotation("uint8"), factors.data, at, 64, 1), tirx.const(0, "int64"))
    for register in range(TILE_CHAINS):
        amx("tilezero", register)
    with T.serial(steps):
        for register in range(TILE_CHAINS):
            amx("tdpbf16ps" if dtype == "bfloat16" else "tdpbssd", register, left, right)
    for register in range(TILE_CHAINS):
        at = first + register * TILE_ROWS * TILE_WORDS
        place = T.tvm_access_ptr(T.type_annotation(str(sums.dtype)), sums.data, at, TILE_ROWS * TILE_WORDS, 2)
        amx("tilestored64", register, place, tirx.const(_ROW_BYTES, "int64"))
    T.evaluate(tirx.call_llvm_intrin("void", "llvm.x86.tilerelease"))
