"""int8, uint8 and 16-bit float layers as C libraries and as exported operators: exactly, with filters packed by C as Python packs them."""

from __future__ import annotations

import ctypes
import math
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from ops import host
from oracle import oracle
from schedules_dot import dot_tensors

import im2win
from im2win.builder.build import Kernel, build_tile
from im2win.export import c_abi
from im2win.registry.ranking import ranked_tiles
from im2win.registry.schedules import schedule_of
from im2win.spec.conv2d import Conv2d

NAME = "direct/dot_product"
COMPILED = pytest.mark.skipif(
    not (sys.platform.startswith("linux") and shutil.which("gcc") and shutil.which("objcopy")), reason="needs Linux, gcc and objcopy"
)
LAYERS = [
    "n1-c5x9x11-k18x3x3-s2-p1-uint8-out.uint8-zero131-outzero4-NHWC-bias-add-relu", "n1-c6x9x11-k20x3x3-p1-g2-int8-out.int8-zerom3-bias",
    "n1-c16x7x9-k16x3x3-p1-g16-int8-NHWC-bias", "n1-c7x8x9-k17x3x2-p1-bfloat16-bias-add", "n1-c8x8x9-k16x1x1-bfloat16-NHWC",
    "n1-c7x8x9-k17x3x2-p1-float16-bias-add", "n1-c16x7x9-k16x3x3-p1-g16-float16-NHWC-bias",
]  # fmt: skip


def _kinds(conv: Conv2d) -> list[object]:
    """The model's first tile of every instruction that the machine has."""
    found = {}
    for _, tile in ranked_tiles(conv, schedule_of(NAME), host()):
        found.setdefault(tile.instruction, tile)
    return list(found.values())


def _pointer(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


@COMPILED
@pytest.mark.parametrize("key", LAYERS)
def test_c_libraries(key: str, tmp_path: Path) -> None:
    conv = Conv2d.parse(key)
    tensors = dot_tensors(conv)
    expected = oracle(conv, **tensors).astype(conv.out_dtype)
    for number, tile in enumerate(_kinds(conv)):
        path, interface = c_abi.export_kernel(Kernel(conv, NAME, tile, host()), tmp_path, f"layer{number}")
        library = ctypes.CDLL(str(path))
        call, pack = (library[name] for name in interface.functions)
        packed = np.full(math.prod(tile.pack.shape(conv)), 1, conv.dtypes["filter"])
        assert interface.packed == packed.size and pack(_pointer(tensors["filter"]), _pointer(packed)) == 0
        assert packed.tobytes() == tile.pack.filter(conv, tensors["filter"]).tobytes()
        y, workspace = np.full(conv.output_shape, 1, conv.out_dtype), np.empty(interface.workspace + 1, np.uint8)
        added = [_pointer(tensors[name]) for name in ("bias", "scale", "residual") if name in tensors]
        assert call(_pointer(tensors["data"]), _pointer(packed), *added, _pointer(y), _pointer(workspace[1:])) == 0
        assert np.array_equal(y.astype(np.float64), expected.astype(np.float64)), tile
    header = path.with_suffix(".h").with_name(f"layer{number}.h").read_text()
    kind = {"int8": "int8_t", "uint8": "uint8_t", "bfloat16": "uint16_t", "float16": "uint16_t"}[conv.dtype]
    assert re.search(rf"int im2win_conv_layer{number}\(const {kind} \*x, ", header)


@COMPILED
@pytest.mark.parametrize("key", LAYERS)
def test_exported_operators(key: str, tmp_path: Path) -> None:
    conv = Conv2d.parse(key)
    tensors = dot_tensors(conv)
    op = build_tile(conv, NAME, _kinds(conv)[0], host())
    loaded = im2win.load(op.export(tmp_path / "conv.so"))
    layer = loaded.bind(tensors["filter"], tensors.get("bias"), tensors.get("scale"))
    y = layer(tensors["data"], tensors.get("residual"))
    assert y.dtype == conv.out_dtype
    assert np.array_equal(y.astype(np.float64), oracle(conv, **tensors).astype(conv.out_dtype).astype(np.float64))
    lines = layer.export(tmp_path / "bound.so").with_name("bound.so.weights").read_bytes().split(b"data\n")[0].decode()
    assert f"packed filter {conv.dtypes['filter']} " in lines and f"tensor output {conv.out_dtype} " in lines


@COMPILED
def test_every_float16_is_packed_as_the_float32_that_it_is(tmp_path: Path) -> None:
    """All numbers: below the normal ones, infinite; those that are none stay none."""
    conv = Conv2d(1, 2048, 1, 1, 32, 1, dtype="float16")
    tile = _kinds(conv)[0]
    path, interface = c_abi.export_kernel(Kernel(conv, NAME, tile, host()), tmp_path, "numbers")
    pack = ctypes.CDLL(str(path))[interface.functions[1]]
    w = np.arange(1 << 16, dtype=np.uint16).view(np.float16).reshape(conv.filter_shape)
    packed = np.empty(math.prod(tile.pack.shape(conv)), np.float16)
    assert pack(_pointer(w), _pointer(packed)) == 0
    found, expected = (array.reshape(-1).view(np.float32) for array in (packed, tile.pack.filter(conv, w)))
    np.testing.assert_array_equal(found, expected)
