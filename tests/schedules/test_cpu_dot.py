"""int8, uint8, bfloat16 and float16 on the CPU: exactly, for every instruction, layout and epilogue; what is emitted, what is refused."""

from __future__ import annotations

import dataclasses
import itertools
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ops import host
from oracle import Array, Tensors, oracle
from sampling import every_second_ordinary
from schedules_dot import dot_tensors

import im2win
from im2win.builder.build import build, build_tile
from im2win.codegen.llvm import TileError, compile_module
from im2win.device.cpu import Machine
from im2win.registry.cpu_lowering import lower
from im2win.registry.ranking import default_tile, ranked_tiles
from im2win.registry.schedules import schedule_of
from im2win.runtime.op import Op
from im2win.runtime.tensors import ArgumentError
from im2win.schedules.cpu_dot.geometry import Geometry
from im2win.schedules.cpu_dot.instructions import INSTRUCTIONS, instruction
from im2win.schedules.cpu_dot.legality import violations
from im2win.schedules.cpu_dot.space import space
from im2win.schedules.cpu_dot.tile import DotTile, axis_of
from im2win.spec.conv2d import Conv2d, ConvError
from im2win.spec.dtypes import ELEMENT_TYPES

NAME = "direct/dot_product"
ROW = schedule_of(NAME)
SERVER = Machine(
    "Some CPU", "sapphirerapids", "avx512f", 2, 16, 32, 48 << 10, 2 << 20, 32 << 20,
    ("avx512vnni", "avxvnni", "avx512bf16", "amx-int8", "amx-bf16"),
)  # fmt: skip
DESKTOP = Machine("Some CPU", "alderlake", "avx2", 2, 8, 16, 32 << 10, 1 << 20, 32 << 20, ("avxvnni",))
OLD = Machine("Some CPU", "haswell", "avx2", 2, 8, 16, 32 << 10, 256 << 10, 8 << 20)
RANDOM = 300  # problems; `make fuzz` draws thousands
CHUNK = 50  # of these in a test


def called(op: Op, tensors: Tensors) -> Array:
    """The output of a call, with tensors named as in `conv.arguments`."""
    y = op(tensors["data"], tensors["filter"], tensors.get("bias"), tensors.get("residual"), None, tensors.get("scale"))
    assert isinstance(y, np.ndarray) and y.dtype == op.conv.out_dtype and y.shape == op.conv.output_shape
    return y


def check(conv: Conv2d, tile: DotTile) -> None:
    """A tile's kernel gives every output of the oracle, to the last bit."""
    tensors = dot_tensors(conv)
    y, expected = called(build_tile(conv, NAME, tile, host()), tensors), oracle(conv, **tensors)
    if ELEMENT_TYPES[conv.dtype].narrow:
        expected = expected.astype(np.float32).astype(conv.dtype).astype(np.float64)
    wrong = ~(y.astype(np.float64) == expected)
    assert not wrong.any(), f"{conv} {tile}: {wrong.sum()} of {y.size} differ, the first at {np.argwhere(wrong)[0]}"


def one_tile(conv: Conv2d, name: str, draw: random.Random, machine: Machine) -> DotTile | None:
    """A legal tile of an instruction; None if none is found."""
    one = instruction(name, conv.dtype)
    assert one is not None
    out_h = conv.output_size[0]
    for _ in range(200):
        lanes = draw.choice(one.lanes)
        rows = draw.choice([1, 2, 7, 16]) if one.tiles else 1
        sizes = (draw.randint(1, 3), draw.choice([1, 2]), rows) if one.tiles else (draw.randint(1, 4), draw.choice([1, 2, 3, 4, 6, 8]), 1)
        block = draw.choice([rows for rows in (1, 2, 3, 4, 7, out_h) if rows <= out_h])
        tile = DotTile(one.name, one.group, axis_of(conv), lanes, *sizes, block, 1)
        single = tile.pack.single_group(conv)
        if tile.block > single.out_channels // single.groups:
            continue
        blocks = tile.pack.blocks(conv)
        tile = dataclasses.replace(tile, pass_blocks=draw.choice([1, tile.pack.blocks_per_group(conv), blocks]))
        if not violations(conv, tile, machine):
            return tile
    return None


def able(dtype: str, machine: Machine) -> list[str]:
    """Names of the instructions that a machine has for a type."""
    known = [one for one in INSTRUCTIONS if dtype in one.dtypes and min(one.lanes) <= machine.lanes]
    return [one.name for one in known if not one.missing(machine, max(lanes for lanes in one.lanes if lanes <= machine.lanes))]


PROBLEMS = [
    ("n1-c8x9x11-k16x3x3-p1", "plain"),
    ("n2-c5x7x9-k17x3x3-s2-p1.0.2.1-bias", "channels that fill no word, stride 2, four sides"),
    ("n1-c6x8x10-k20x1x1-s2-bias-relu", "1x1 with a stride"),
    ("n1-c3x19x21-k24x7x7-s2-p3-relu", "a stem of three channels"),
    ("n1-c16x6x6-k18x3x2-d2x1-g2-bias-add", "groups, dilation, a residual"),
    ("n1-c16x9x8-k16x3x3-s2-p1-g16-bias", "depthwise"),
    ("n1-c6x9x8-k12x3x3-p1-g6", "two filters a channel"),
    ("n1-c7x5x5-k19x5x5-s3x2-p4", "windows of zeros"),
]  # fmt: skip
KINDS = [
    ("int8", {}), ("uint8", {"zero_point": 131, "activation": "relu"}), ("bfloat16", {}), ("float16", {}),
    ("int8", {"out_dtype": "int8", "zero_point": -7, "out_zero_point": 5}),
    ("uint8", {"out_dtype": "uint8", "zero_point": 128, "out_zero_point": 3}), ("int8", {"out_dtype": "float16"}),
    ("uint8", {"out_dtype": "uint8", "zero_point": 3, "out_zero_point": 4, "residual": True, "own_steps": True, "activation": "relu"}),
    ("int8", {"out_dtype": "int8", "residual": True, "own_steps": True, "activation": "none"}),
    ("int8", {"out_dtype": "bfloat16"}), ("uint8", {"out_dtype": "float32"}),
]  # fmt: skip


WAYS = [(kind, name) for kind in KINDS for name in (*able(kind[0], host()), "default")]


@pytest.mark.sampled(24)
@pytest.mark.pairwise
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize(("kind", "name"), WAYS, ids=lambda value: value if isinstance(value, str) else value[0])
@pytest.mark.parametrize("key", [row[0] for row in PROBLEMS], ids=[row[1] for row in PROBLEMS])
def test_exact(key: str, kind: tuple[str, dict[str, Any]], name: str, layout: str) -> None:
    """Every instruction of this machine, and the default tile, to the last bit."""
    dtype, changes = kind
    conv = Conv2d.parse(key).with_(dtype=dtype, layout=layout, **changes)
    tile = None if name == "default" else one_tile(conv, name, random.Random(f"{conv} {name}"), host())
    check(conv, tile or default_tile(conv, NAME, host())[1])


@pytest.mark.slow
@pytest.mark.parametrize("first", every_second_ordinary(range(0, RANDOM, CHUNK)))
def test_random_problems(first: int) -> None:
    """Random problems, each with a random tile of an instruction of this machine; `RANDOM` says how many in all."""
    for seed in range(first, first + CHUNK):
        draw = random.Random(seed)
        conv = random_problem(draw)
        tile = one_tile(conv, draw.choice(able(conv.dtype, host())), draw, host()) or default_tile(conv, NAME, host())[1]
        check(conv, tile)


def random_problem(draw: random.Random) -> Conv2d:
    """A small problem of these types with any epilogue."""

    def sides(most: int) -> tuple[int, int]:
        return draw.randint(1, most), draw.randint(1, most)

    while True:
        groups = draw.choice([1, 1, 1, 2, 3])
        channels, filters = (draw.choice([1, 2, 3, 4, 5, 8, 16, 33, 64]) * groups for _ in range(2))
        if draw.random() < 0.15:
            groups = channels = draw.choice([3, 8, 16, 24, 33])
            filters = channels * draw.choice([1, 1, 2])
        dtype = draw.choice(["int8", "uint8", "bfloat16", "float16"])
        out = None if ELEMENT_TYPES[dtype].narrow else draw.choice([None, "int8", "uint8", "float16", "bfloat16", "float32"])
        narrow, kernel = out in ("int8", "uint8"), sides(7) if draw.random() < 0.5 else (draw.choice([1, 3]),) * 2

        def zero(kind: str | None) -> int:
            return draw.randint(0, 255) if kind == "uint8" else draw.randint(-128, 127)

        with_zeros = ELEMENT_TYPES[dtype].integer and draw.random() < 0.5
        residual = draw.random() < 0.3
        try:
            return Conv2d(
                draw.choice([1, 2]), channels, draw.randint(1, 20), draw.randint(1, 40), filters, kernel, stride=sides(3),
                padding=[draw.randint(0, kernel[side % 2]) for side in range(4)] if draw.random() < 0.6 else 0, dilation=sides(2),
                groups=groups, dtype=dtype, layout=draw.choice(["NCHW", "NHWC"]), bias=draw.random() < 0.5, residual=residual,
                own_steps=residual and narrow and draw.random() < 0.5,
                activation=draw.choice(["none", "relu"] if narrow else ["none", "relu", "relu6"]), out_dtype=out,
                zero_point=zero(dtype) if with_zeros else 0, out_zero_point=zero(out) if narrow and draw.random() < 0.5 else 0,
            )  # fmt: skip
        except ConvError:
            continue


@pytest.mark.sampled(4)
@pytest.mark.parametrize("activation", ["silu", "leaky_relu0.1", "sigmoid", "tanh", "hardsigmoid", "hardswish", "gelu", "gelu_tanh"])
@pytest.mark.parametrize(("dtype", "out_dtype"), [("bfloat16", None), ("float16", None), ("int8", "float32"), ("uint8", "float16")])
def test_activations_that_round(activation: str, dtype: str, out_dtype: str | None) -> None:
    conv = Conv2d.parse("n1-c8x6x7-k16x3x3-p1-NHWC-bias-add").with_(dtype=dtype, out_dtype=out_dtype, activation=activation)
    tensors = dot_tensors(conv)
    y, expected = called(build_tile(conv, *default_tile(conv, NAME, host()), host()), tensors), oracle(conv, **tensors)
    step = {"bfloat16": 2.0**-8, "float16": 2.0**-10, "float32": 2.0**-20}[conv.out_dtype]
    np.testing.assert_allclose(y.astype(np.float64), expected, rtol=step, atol=1e-6 * max(np.abs(expected).max(), 1))


def test_saturation_and_halves() -> None:
    """Sums that scales turn into halves round to even, and what lies beyond the range stays at its end."""
    conv = Conv2d(1, 1, 1, 33, 4, 1, dtype="int8", layout="NHWC", out_dtype="int8")
    x, w = np.arange(-16, 17, dtype=np.int8).reshape(conv.input_shape), np.array([1, 3, 100, -100], np.int8).reshape(conv.filter_shape)
    scale = np.float32([0.5, 0.5, 1, 1])
    op = build_tile(conv, *default_tile(conv, NAME, host()), host())
    y = op.bind(w, scale=scale)(x)
    assert np.array_equal(y.reshape(33, 4), np.clip(np.rint(np.arange(-16, 17)[:, None] * w.reshape(1, 4) * scale), -128, 127))


@pytest.mark.parametrize(("dtype", "half", "large"), [("bfloat16", 2.0**-8, 2.0**100), ("float16", 2.0**-11, 65504.0)])
def test_narrow_floats_round_to_even_and_keep_what_is_no_number(dtype: str, half: float, large: float) -> None:
    """Halves of the last place, infinity, NaN; the largest number; a sum beyond it; numbers below the normal ones."""
    conv = Conv2d(1, 1, 1, 10, 4, 1, dtype=dtype, layout="NHWC", bias=True)
    op = build_tile(conv, *default_tile(conv, NAME, host()), host())
    x = np.array([1, 3, np.nan, np.inf, -np.inf, large, 0, -1, 2.0**-24, -3 * 2.0**-24], np.float32).astype(dtype).reshape(conv.input_shape)
    for bias in (half, 0.0, large):
        w, added = np.ones(conv.filter_shape).astype(dtype), np.full(4, bias).astype(dtype)
        y = op.bind(w, added)(x).astype(np.float32).reshape(10, 4)
        with np.errstate(over="ignore"):
            exact = (x.astype(np.float32).reshape(10, 1) + np.float32(bias)).astype(dtype).astype(np.float32)
        np.testing.assert_array_equal(y, np.broadcast_to(exact, (10, 4)))


def test_float16_is_converted_a_vector_at_a_time() -> None:
    """Inputs, biases, residuals and outputs, in both layouts: no element by a library call, one instruction for a vector."""
    for key in ("n1-c64x16x16-k64x3x3-p1-float16-bias-add-relu", "n1-c64x14x14-k64x3x3-p1-float16-NHWC-bias-add-relu"):
        conv = Conv2d.parse(key)
        for machine, register in ((SERVER, "zmm"), (OLD, "ymm")):
            tile = DotTile("fma", 1, axis_of(conv), machine.lanes, 2, 4, 1, 2, 1)
            assert violations(conv, tile, machine) == []
            code = assembly(conv, tile, machine)
            assert re.search(rf"vcvtph2psx?\s.*%{register}", code) and re.search(rf"vcvtps2phx?\s.*%{register}", code)
            assert "hfsf2" not in code and "sfhf2" not in code and "vpextrw" not in code


def test_float16_without_instructions_for_it() -> None:
    """A CPU that converts no vectors of float16 calls functions for it, which the library has or gets from the compiler."""
    old = Machine("Some CPU", "nehalem", "sse2", 1, 4, 16, 32 << 10, 256 << 10, 8 << 20)
    conv = Conv2d.parse("n1-c5x7x9-k17x3x3-s2-p1-float16-bias-add")
    tensors = dot_tensors(conv)
    y = called(build_tile(conv, *default_tile(conv, NAME, old), old), tensors)
    assert np.array_equal(y.astype(np.float64), oracle(conv, **tensors))


# --- what is emitted


def assembly(conv: Conv2d, tile: DotTile, machine: Machine) -> str:
    """The assembly of a kernel's parallel loop."""
    text = str(compile_module(lower(conv, ROW, tile, machine), machine).executable.mod.inspect_source("asm"))
    start = text.index(".L__tvm_parallel_lambda:")
    return text[start : text.index(".Lfunc_end", start)]


def inner_loop(code: str, instruction: str) -> list[str]:
    """The instructions of the innermost loop around an instruction: between the label before its first occurrence and its jump back."""
    stripped = (line.strip().removeprefix("{vex}").strip() for line in code.splitlines())
    lines = [line for line in stripped if line and not line.startswith((".p2align", "#"))]
    first = next(i for i, line in enumerate(lines) if line.startswith(instruction))
    start = max(i for i in range(first) if lines[i].endswith(":"))
    label = lines[start][:-1]
    end = next(i for i in range(first, len(lines)) if re.fullmatch(rf"j\w+\s+{re.escape(label)}", lines[i]))
    return lines[start : end + 1]


EMITTED = [
    ("n1-c64x14x14-k64x3x3-p1-int8-NHWC", SERVER, ("vnni", 16, 4, 6), "vpdpbusd", "zmm"),
    ("n1-c64x14x14-k64x3x3-p1-uint8", SERVER, ("vnni", 16, 3, 8), "vpdpbusd", "zmm"),
    ("n1-c64x14x14-k64x3x3-p1-int8-NHWC", DESKTOP, ("vnni", 8, 2, 6), "vpdpbusd", "ymm"),
    ("n1-c64x14x14-k64x3x3-p1-int8-NHWC", OLD, ("madd", 8, 2, 4), "vpmaddwd", "ymm"),
    ("n1-c64x14x14-k64x3x3-p1-bfloat16-NHWC", SERVER, ("dpbf16", 16, 4, 6), "vdpbf16ps", "zmm"),
    ("n1-c64x14x14-k64x3x3-p1-bfloat16", OLD, ("fma", 8, 2, 4), "vfmadd", "ymm"),
    ("n1-c64x14x14-k64x3x3-p1-float16-NHWC", SERVER, ("fma", 16, 4, 6), "vfmadd", "zmm"),
    ("n1-c64x14x14-k64x3x3-p1-float16", OLD, ("fma", 8, 2, 4), "vfmadd", "ymm"),
]  # fmt: skip


@pytest.mark.parametrize(("key", "machine", "sizes", "wanted", "registers"), EMITTED, ids=lambda value: "")
def test_the_micro_kernel_keeps_its_sums_in_registers(
    key: str, machine: Machine, sizes: tuple[str, int, int, int], wanted: str, registers: str
) -> None:
    """The innermost loop multiplies in registers of the right size, and neither stores a vector nor loads one from the stack."""
    conv, (name, lanes, vectors, cols) = Conv2d.parse(key), sizes
    one = instruction(name, conv.dtype)
    assert one is not None
    tile = DotTile(name, one.group, axis_of(conv), lanes, vectors, cols, 1, 7, 1)
    assert violations(conv, tile, machine) == []
    loop = inner_loop(assembly(conv, tile, machine), wanted)
    products = [line for line in loop if line.startswith(wanted)]
    assert len(products) % (vectors * cols) == 0 and all(registers in line for line in products)
    stores = [line for line in loop if re.match(r"v?mov\S*\s+%[xyz]mm\d+, ", line) and line.endswith(")")]
    spills = [line for line in loop if "(%rsp" in line and re.search(r"%[xyz]mm", line)]
    assert not stores and not spills, (stores, spills)


@pytest.mark.parametrize(
    ("key", "wanted"),
    [
        ("n1-c64x14x14-k64x3x3-p1-int8-NHWC", "tdpbssd"), ("n1-c64x14x14-k64x3x3-p1-uint8-NHWC", "tdpbusd"),
        ("n1-c64x14x14-k64x3x3-p1-uint8", "tdpbsud"), ("n1-c64x14x14-k64x3x3-p1-bfloat16", "tdpbf16ps"),
    ],
)  # fmt: skip
def test_amx_tiles(key: str, wanted: str) -> None:
    """A chunk loads two tiles of each factor and multiplies four pairs; every thread configures its tiles and releases them."""
    conv = Conv2d.parse(key)
    one = instruction("amx", conv.dtype)
    assert one is not None
    code = assembly(conv, DotTile("amx", one.group, axis_of(conv), 16, 2, 2, 16, 14, 1), SERVER)
    loop = inner_loop(code, wanted)
    products, loads = (sum(line.startswith(word) for line in loop) for word in (wanted, "tileloadd"))
    assert products == loads and products % 4 == 0
    assert code.count("ldtilecfg") == code.count("tilerelease") == 1


# --- what is refused, packed, chosen


def test_a_machine_without_features_has_tiles() -> None:
    """Every machine computes every type; AMX and VNNI need their features."""
    plain = Machine("Some CPU", "cortex-a76", "asimd", 4, 4, 32, 64 << 10, 512 << 10, 4 << 20)
    for dtype in ("int8", "uint8", "bfloat16", "float16"):
        conv = Conv2d.parse("n1-c16x14x14-k32x3x3-p1").with_(dtype=dtype)
        known = ((plain, {"mul", "fma"}), (OLD, {"madd", "mul", "fma"}), (SERVER, {"amx", "vnni", "dpbf16", "mul", "fma"}))
        for machine, names in known:
            found = {tile.instruction for _, tile in ranked_tiles(conv, ROW, machine)}
            assert found and found <= names, (dtype, machine.mcpu)
            assert machine is not SERVER or dtype == "float16" or "amx" in found


REFUSED = [
    ({"instruction": "dpbf16"}, "`instruction` (=dpbf16) must be one of amx, vnni, sdot, madd, mul for int8"),
    ({"vectors": 0}, "`vectors` (=0) must be at least 1"),
    ({"axis": "windows"}, "`axis` (=windows) must be channels, which the layout NHWC has side by side"),
    ({"lanes": 2}, "`lanes` (=2) must be one of 16, 8, 4 for vnni"),
    ({"group": 2}, "`group` (=2) must be 4"),
    ({"rows": 2}, "`rows` (=2) must be 1 for vnni"),
    ({"cols": 14, "vectors": 3}, "sums and operands (=46) must fit the 32 registers"),
    ({"row_block": 15}, "`row_block` (=15) must be at most the output's rows (=14)"),
    ({"vectors": 5, "cols": 1}, "the block (=80) must be at most a group's channels (=64)"),
    ({"along": "columns"}, "`along` (=columns) must be channels, or columns for words of several elements, axis windows"),
    ({"pass_blocks": 3}, "`pass_blocks` (=3) must divide a group's channel blocks (=2)"),
]


@pytest.mark.parametrize(("changes", "reason"), REFUSED, ids=[str(next(iter(row[0]))) for row in REFUSED])
def test_refused_tiles(changes: dict[str, Any], reason: str) -> None:
    conv = Conv2d.parse("n1-c64x14x14-k64x3x3-p1-int8-NHWC")
    tile = DotTile("vnni", 4, "channels", 16, 2, 6, 1, 7, 1)
    assert violations(conv, tile, SERVER) == []
    assert reason in "; ".join(violations(conv, dataclasses.replace(tile, **changes), SERVER))
    with pytest.raises(TileError, match=re.escape(reason)):
        lower(conv, ROW, dataclasses.replace(tile, **changes), SERVER)


def test_refused_machines_and_problems() -> None:
    conv = Conv2d.parse("n1-c64x14x14-k64x3x3-p1-int8-NHWC")
    vnni = DotTile("vnni", 4, "channels", 8, 2, 6, 1, 7, 1)
    assert violations(conv, vnni, OLD) == ["`instruction` (=vnni) needs avx512vnni or avxvnni, which the machine lacks"]
    assert violations(conv, dataclasses.replace(vnni, lanes=16, cols=2), DESKTOP)[0].endswith("needs avx512vnni, which the machine lacks")
    assert ROW.supports(conv) is None and ROW.supports(conv.with_(dtype="float32")) is not None
    assert ROW.supports(conv, "cuda") == "no CUDA schedule"
    assert schedule_of("direct/tiled").supports(conv.with_(dtype="uint8"), "cuda") == "CUDA schedules have no uint8"
    assert schedule_of("direct/tiled").supports(conv.with_(zero_point=3), "cuda") == "CUDA schedules have no zero points"
    assert ROW.supports(conv.with_(activation="silu")) == "int8 sums are integers, which have no silu"
    stepped = conv.with_(out_dtype="int8", residual=True, own_steps=True)
    assert schedule_of("direct/tiled").supports(stepped, "cuda") == "CUDA schedules add residuals in the steps of the output"


def test_residuals_in_steps_of_their_own() -> None:
    """The key, the number of scales, and which problems have such residuals."""
    key = "n1-c8x5x5-k6x1x1-uint8-out.int8-addsteps-relu"
    conv = Conv2d.parse(key)
    assert (str(conv), conv.residual, conv.own_steps, conv.scales) == (key, True, True, 11)
    assert conv.with_(own_steps=False) == Conv2d.parse(key.replace("addsteps", "add")) and conv.with_(own_steps=False).scales == 6
    assert not conv.with_(out_dtype="float32").own_steps and not conv.with_(residual=False).own_steps
    for changes in ({"residual": False}, {"out_dtype": "float32"}, {"out_dtype": "int32"}, {"dtype": "float32", "out_dtype": "float32"}):
        with pytest.raises(ConvError, match=r"`own_steps` \(=True\) must be False unless `residual` is True and outputs are requantised"):
            conv.with_(**{**changes, "own_steps": True})
    with pytest.raises(ConvError, match="names `residual` twice"):
        Conv2d.parse(key.replace("addsteps", "add-addsteps"))
    with pytest.raises(ConvError, match="True or False"):
        conv.with_(own_steps=1)
    op = build_tile(conv, *default_tile(conv, NAME, host()), host())
    tensors = dot_tensors(conv)
    with pytest.raises(ArgumentError, match="scale"):
        op.bind(tensors["filter"], scale=tensors["scale"][:6])


EXPANDED = [
    ("n2-c3x19x71-k24x7x7-s2-p3-bias", "a stem with padding"), ("n1-c3x30x144-k32x11x11-s4", "a stem without"),
    ("n1-c4x12x50-k17x3x3-p1.0.2.1", "four sides, stride 1"), ("n1-c6x14x105-k64x5x5-g2-s1x3-p2", "groups"),
    ("n1-c2x35x540-k16x3x16-s16-p1", "windows far from each other"), ("n1-c4x12x40-k16x3x3-d2x1-p1", "rows with dilation"),
]  # fmt: skip


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", ["int8", "uint8", "bfloat16"])
@pytest.mark.parametrize("key", [row[0] for row in EXPANDED], ids=[row[1] for row in EXPANDED])
def test_words_along_kernel_columns(key: str, dtype: str) -> None:
    """Exactly, with what stands for zero around inputs and behind the kernel's last column."""
    changes = {"int8": {"out_dtype": "int8", "zero_point": -7, "out_zero_point": 5}, "uint8": {"zero_point": 131}}.get(dtype, {})
    conv = Conv2d.parse(key).with_(dtype=dtype, **changes)
    known = (one for one in INSTRUCTIONS if dtype in one.dtypes and one.name in able(dtype, host()))
    several = [one for one in known if one.group > 1]
    if not several:
        pytest.skip(f"no instruction for words of {dtype} here")
    for one in several:
        sizes = (2, 2, 8) if one.tiles else (2, 4, 1)
        lanes = max(lanes for lanes in one.lanes if lanes <= host().lanes)
        tile = DotTile(one.name, one.group, "windows", lanes, *sizes, 3, 1, "columns")
        assert violations(conv, tile, host()) == []
        check(conv, tile)


SHUFFLED = [
    ("n2-c20x19x71-k20x3x3-p1-g20-bias", "rows of several vectors, the last of which overlap"), ("n1-c9x40x90-k9x3x3-s2-p1-g9", "stride 2"),
    ("n1-c12x14x14-k12x5x5-p2-g12-bias", "rows shorter than a vector are one line"),
    ("n1-c7x15x13-k7x3x5-s2-p1.2.0.1-g7", "short rows, stride 2"),
    ("n1-c6x7x7-k12x3x3-p1-g6-bias", "two filters of a channel"), ("n1-c3x30x130-k20x7x7-s2-p3-bias", "three channels"),
    ("n1-c8x9x40-k8x3x7-s1x4-p1-g8-d2x1", "stride 4, rows with dilation"), ("n1-c5x4x3-k5x3x3-p1-g5", "fewer windows than a vector"),
]  # fmt: skip


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
@pytest.mark.parametrize("key", [pytest.param(key, id=what) for key, what in SHUFFLED])
def test_words_shuffled_out_of_rows(key: str, dtype: str) -> None:
    """Exactly, in every tile of one vector and of as many as a line takes, of each instruction that multiplies words."""
    changes = {"int8": {"out_dtype": "int8", "zero_point": -7, "out_zero_point": 5}, "uint8": {"zero_point": 131}}[dtype]
    conv = Conv2d.parse(key).with_(dtype=dtype, **changes)
    for name in able(dtype, host()):
        one = instruction(name, dtype)
        if one is None or one.tiles or one.group < max(2, conv.stride[1]):
            continue
        lanes = max(lanes for lanes in one.lanes if lanes <= host().lanes)
        channels = conv.out_channels // conv.groups
        passes = DotTile(name, one.group, "windows", lanes, 1, 1, 1, 1, 1, "columns").pack.blocks(conv)
        tiles = [
            DotTile(name, one.group, "windows", lanes, vectors, cols, 1, min(3, conv.output_size[0]), passes // cols, "columns", "shuffled")
            for vectors in (1, 4)
            for cols in {1, channels}
        ]
        legal = [tile for tile in tiles if not violations(conv, tile, host())]
        assert legal
        for tile in legal:
            check(conv, tile)


TAPS = [
    ("n2-c40x9x11-k40x3x3-p1-bias", "rows of one vector"), ("n1-c36x7x7-k33x3x3-bias", "several rows in a vector"),
    ("n1-c26x21x39-k48x5x3-s2-p2.1-bias", "stride 2, rows of two vectors"), ("n1-c70x12x12-k32x3x3-p2-d2-g2", "groups, dilation"),
]  # fmt: skip


@pytest.mark.parametrize("dtype", ["int8", "uint8", "bfloat16"])
@pytest.mark.parametrize("key", [pytest.param(key, id=what) for key, what in TAPS])
def test_inputs_copied_for_each_tap(key: str, dtype: str) -> None:
    """Exactly, for all rows at once and for some of them, with lines that register tiles fill and do not fill."""
    changes = {"int8": {"out_dtype": "int8", "zero_point": -7, "out_zero_point": 5}, "uint8": {"zero_point": 131}}.get(dtype, {})
    conv = Conv2d.parse(key).with_(dtype=dtype, **changes)
    known = [one for one in INSTRUCTIONS if dtype in one.dtypes and one.name in able(dtype, host()) and one.group > 1]
    if not known:
        pytest.skip(f"no instruction for words of {dtype} here")
    for one, rows in itertools.product(known, (3, conv.output_size[0])):
        lanes = max(lanes for lanes in one.lanes if lanes <= host().lanes)
        vectors = 2 if rows * conv.output_size[1] > lanes else 1
        base = DotTile(one.name, one.group, "windows", lanes, vectors, 1, 16 if one.tiles else 1, rows, 1, "taps")
        tile = replace(base, pass_blocks=base.pack.blocks(conv))
        assert violations(conv, tile, host()) == []
        check(conv, tile)


def test_defaults_of_small_maps() -> None:
    """AMX takes fewer tiles where rows follow one another without gaps."""
    for dtype in ("uint8", "bfloat16"):
        assert default_tile(Conv2d.parse(f"n1-c512x7x7-k512x3x3-{dtype}"), NAME, SERVER)[1].along == "taps"
        assert all(tile.along == "channels" for tile in space(Conv2d.parse(f"n1-c64x56x56-k64x3x3-{dtype}"), SERVER))
    one = DotTile("amx", 4, "windows", 16, 1, 1, 16, 1, 1, "taps")
    assert any("`along`" in text for text in violations(Conv2d.parse("n1-c64x14x14-k64x1x1-uint8"), one, SERVER))


def test_legality_of_shuffled_words() -> None:
    conv = Conv2d.parse("n1-c8x9x40-k8x3x3-p1-g8-uint8")
    tile = DotTile("vnni", 4, "windows", 16, 1, 1, 1, 1, 1, "columns", "shuffled")
    assert violations(conv, tile, SERVER) == []
    for other, changes in ((conv.with_(stride=(1, 5)), {}), (conv, {"along": "channels"}), (conv, {"words": "packed"})):
        assert any("`words`" in text for text in violations(other, replace(tile, **changes), SERVER))
    floats = DotTile("dpbf16", 2, "windows", 16, 1, 1, 1, 1, 1, "columns", "shuffled")
    assert any("integers" in text for text in violations(conv.with_(dtype="bfloat16"), floats, SERVER))


def test_defaults_of_depthwise_layers_channels_first() -> None:
    """Words are shuffled where one instruction does it, and else stored, or of one channel each."""
    conv = Conv2d.parse("n1-c144x56x56-k144x3x3-p1-g144-uint8").with_(out_dtype="uint8")
    assert default_tile(conv, NAME, SERVER)[1].words == "shuffled"
    older = replace(SERVER, mcpu="cascadelake", features=("avx512vnni",))
    assert {tile.words for tile in space(conv, older)} == {"stored"}


def test_what_no_word_of_columns_has_is_not_multiplied() -> None:
    """An infinite input beside a window does not reach its output, although the window's last word has one element more than it."""
    conv = Conv2d(1, 1, 1, 40, 16, (1, 3), dtype="bfloat16")
    name = next((name for name in ("amx", "dpbf16") if name in able("bfloat16", host())), None)
    if name is None:
        pytest.skip("no instruction for two bfloat16 here")
    one = instruction(name, "bfloat16")
    assert one is not None
    x, w = np.ones(conv.input_shape, np.float32), np.ones(conv.filter_shape, np.float32)
    x[..., 20] = np.inf
    op = build_tile(conv, NAME, DotTile(name, 2, "windows", 16, 1, 1, 16 if one.tiles else 1, 1, 1, "columns"), host())
    y = op(x.astype("bfloat16"), w.astype("bfloat16")).astype(np.float32)
    assert np.array_equal(np.isinf(y[0, 0, 0]), np.isin(np.arange(38), [18, 19, 20])) and (y[np.isfinite(y)] == 3).all()


def test_outputs_of_avx512_are_rounded_and_packed_in_few_instructions() -> None:
    """One instruction rounds a vector; bytes of four vectors are packed and stored at once where a row has so many windows."""
    for key, size, wanted in (
        ("n1-c64x14x80-k64x1x1-uint8", (4, 1), "vpackuswb"), ("n1-c64x14x80-k64x3x3-uint8", (2, 2), "vpackuswb"),
        ("n1-c64x14x80-k64x1x1-bfloat16-NHWC", (2, 2), "vcvtneps2bf16"),
    ):  # fmt: skip
        conv = Conv2d.parse(key)
        conv = conv.with_(out_dtype="uint8") if conv.dtype == "uint8" else conv
        one = instruction("amx", conv.dtype)
        assert one is not None
        code = assembly(conv, DotTile("amx", one.group, axis_of(conv), 16, *size, 16, 1, 1), SERVER)
        assert wanted in code and "vrndscaleps" not in code and "vcmp" not in code


def test_shorter_vectors_pack_no_bytes_of_avx512() -> None:
    """Tiles of eight lanes, the widest of a CPU with AVX2, have the same outputs, also in rows of more than 64 windows."""
    conv = Conv2d.parse("n1-c8x14x80-k12x1x1-uint8-bias").with_(out_dtype="int8")
    for name in able("uint8", host()):
        one = instruction(name, "uint8")
        if one is not None and not one.tiles and 8 in one.lanes:
            check(conv, DotTile(name, one.group, "windows", 8, 4, 1, 1, 9, 4))


def test_defaults_of_stems() -> None:
    """Layers of three channels first are multiplied in AMX tiles of words of kernel columns."""
    for dtype in ("uint8", "bfloat16"):
        for key in ("n1-c3x227x227-k96x11x11-s4", "n1-c3x224x224-k64x7x7-s2-p3", "n1-c3x224x224-k64x3x3"):
            tile = default_tile(Conv2d.parse(key).with_(dtype=dtype), NAME, SERVER)[1]
            assert (tile.instruction, tile.along) == ("amx", "columns")


def test_calls_name_what_is_wrong() -> None:
    conv = Conv2d(1, 4, 5, 5, 8, 3, dtype="uint8", layout="NHWC", bias=True, out_dtype="uint8")
    op, tensors = build(conv), dot_tensors(conv)
    x, w, bias, scale = (tensors[name] for name in ("data", "filter", "bias", "scale"))
    with pytest.raises(ArgumentError, match="`w` has dtype uint8; it must be int8"):
        op.bind(w.view(np.uint8), bias, scale)
    with pytest.raises(ArgumentError, match="`scale` must be given"):
        op.bind(w, bias)
    with pytest.raises(ArgumentError, match="`bias` has dtype float32; it must be int32"):
        op.bind(w, bias.astype(np.float32), scale)
    with pytest.raises(ArgumentError, match=r"`scale` \(=inf at 2\) must be finite"):
        op.bind(w, bias, np.where(np.arange(8) == 2, np.inf, scale).astype(np.float32))
    with pytest.raises(ArgumentError, match="`x` has dtype int8; it must be uint8"):
        op.bind(w, bias, scale)(x.view(np.int8))
    layer, out = op.bind(w, bias, scale), np.empty(conv.output_shape, np.uint8)
    assert layer(x, out=out) is out and np.array_equal(out, oracle(conv, **tensors))
    layer.rebind(-w, bias, scale)
    assert np.array_equal(layer(x), oracle(conv, **{**tensors, "filter": -w}))


def test_a_record_of_float16_is_found_and_says_nothing_about_bfloat16(tmp_path: Path) -> None:
    """On CPUs the types are multiplied by different instructions."""
    conv = Conv2d.parse("n1-c8x6x6-k16x1x1-float16")
    im2win.tune(conv, trials=2, logs=tmp_path)
    assert build(conv, logs=tmp_path).tuned and not build(conv.with_(dtype="bfloat16"), logs=tmp_path).tuned


def test_geometry_of_strides() -> None:
    """Windows of a strided layer read neighbouring words of their phase; a 1x1 copies only what it reads."""
    conv = Conv2d.parse("n1-c8x17x19-k16x3x3-s2-p1-int8")
    geometry = Geometry(conv, DotTile("mul", 1, "windows", 4, 1, 4, 1, 3, 1))
    assert geometry.phases == (2, 2) and geometry.size == (4, 11) and geometry.line == 2 * 11 + 10
    one = Geometry(conv.with_(kernel=1, padding=0, layout="NHWC"), DotTile("mul", 1, "channels", 4, 1, 4, 1, 3, 1))
    assert one.steps == (2, 2) and one.strides == (1, 1) and one.flat and one.size == (3, 10)
