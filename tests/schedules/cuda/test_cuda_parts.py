"""MCFA on CUDA: how the output is cut into parts, what is launched for them, and who calls it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from cuda_module import Module
from cuda_regimes import REGIMES
from emulated import ROWS, SMALL_PARTS, Emulated, differences, expected, generated, typed
from oracle import exact_tensors

from im2win.device.gpu import H200
from im2win.registry.schedules import schedule_of
from im2win.runtime.cuda import Kernels
from im2win.schedules.cuda.families.multistage import OutputParts
from im2win.schedules.cuda.kernels.output_parts import WindowsInParts
from im2win.schedules.cuda.model.multistage import estimate
from im2win.schedules.cuda.tiles.multistage import MultistageTile
from im2win.spec.conv2d import Conv2d
from im2win.spec.suites import suite

SCHEDULE = schedule_of("mcfa/tiled").on_gpu
assert isinstance(SCHEDULE, OutputParts)
PLAN = SCHEDULE.windows
CONVS = [Conv2d.parse(key) for key, _ in REGIMES]
LARGE = [layer.conv for name in ("papers12", "resnet50") for batch in (1, 128) for layer in suite(name, batch)]


@pytest.mark.parametrize("plan", [PLAN, SMALL_PARTS], ids=["default", "small"])
@pytest.mark.parametrize("conv", [*CONVS, *LARGE], ids=str)
def test_parts_cover_the_output_and_keep_to_their_size(conv: Conv2d, plan: WindowsInParts) -> None:
    parts, (height, width) = plan.parts(conv), conv.output_size
    assert parts.images == 1 or parts.rows == height, "whole images, or rows of one"
    images, bands = parts.count // parts.bands, parts.bands
    assert images * parts.images >= conv.batch > (images - 1) * parts.images and bands * parts.rows >= height > (bands - 1) * parts.rows
    assert (parts.problem.batch, *parts.problem.output_size) == (parts.images, parts.rows, width)
    depth = conv.in_channels * math.prod(conv.kernel)
    assert plan.transform_bytes(conv) == parts.images * parts.rows * width * depth * conv.itemsize
    wanted = max(plan.wanted_bytes, plan.least_outputs // conv.out_channels * depth * conv.itemsize)
    row_bytes = width * depth * conv.itemsize
    assert plan.transform_bytes(conv) <= max(2 * wanted, row_bytes)
    assert plan.parts(parts.problem).count == 1, "a part is not cut again"


def test_parts_by_hand() -> None:
    """Of 128 images of 54 x 54 windows of 576 elements: 32 MiB hold 14563 windows, 2**21 outputs of 64 channels are 32768, 11.2 images."""
    parts = PLAN.parts(Conv2d(128, 64, 56, 56, 64, 3))
    assert (parts.images, parts.rows, parts.count) == (11, 54, 12)
    parts = PLAN.parts(Conv2d(1, 64, 512, 512, 64, 3, padding=1))  # 32768 windows are 64 rows
    assert (parts.images, parts.rows, parts.count) == (1, 64, 8) and str(parts.problem) == "n1-c64x66x512-k64x3x3-p0x1"


def test_small_parts_are_of_every_kind() -> None:
    """What the tests of kernels run: one part, rows of an image, some images, and last parts that are smaller."""
    found = [(conv, SMALL_PARTS.parts(conv)) for conv in CONVS]
    assert any(parts.count == 1 for _, parts in found)
    assert any(parts.bands > 1 and conv.output_size[0] % parts.rows == 0 for conv, parts in found)
    assert any(parts.bands > 1 and conv.output_size[0] % parts.rows for conv, parts in found)
    assert any(parts.bands > 1 and conv.batch > 1 for conv, parts in found)
    assert any(parts.images > 1 and conv.batch % parts.images for conv, parts in found)


def test_a_transform_and_a_product_in_turn() -> None:
    conv = Conv2d.parse("n2-c20x9x10-k24x3x3-p1")
    launches = generated(conv, "mcfa/tiled", MultistageTile("fma", 32, 64, 16, 32, 1, 2, "uvc")).launches
    both, alone = launches[:-10], launches[-10:]
    assert [launch.kernel for launch in both] == ["conv2d_kernel", "conv2d_kernel_1"] * SMALL_PARTS.parts(conv).count
    assert {launch.kernel for launch in alone} == {"transform_parts_kernel"}
    numbers = [tuple(one for one in launch.arguments if isinstance(one, int)) for launch in both]
    assert numbers[::2] == numbers[1::2] and len(set(numbers)) == 10


def test_loads_of_a_part_are_wide() -> None:
    """Where input and output are alike, launches share products of a part's number; a kernel must still see what they are multiples of."""
    conv = Conv2d(2, 64, 12, 16, 64, 3, padding=1, dtype="float16", layout="NHWC")
    source = generated(conv, "mcfa/tiled", MultistageTile("f16", 64, 64, 32, 32, 1, 2, "uvc")).source
    assert "= *(uint4*)(input_ptr + " in source and "make_uint4(input_ptr" not in source


# rows of a part, windows of the image and of the part that neighbours share: stores are as wide as both allow
@pytest.mark.sampled
@pytest.mark.parametrize(("rows", "run"), [(1, 2), (2, 4), (3, 2), (8, 4)])
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_stores_of_parts_of_any_height(rows: int, run: int, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    conv = Conv2d.parse("n2-c8x8x6-k24x3x3-p1-bias-add").with_(layout=layout)
    name = f"mcfa, {rows} rows"
    plan = WindowsInParts("ncuvmx", wanted_bytes=rows * 6 * 72 * 4, least_outputs=1)
    monkeypatch.setitem(ROWS, name, replace(ROWS["mcfa/tiled"], cuda=OutputParts(plan)))
    assert (plan.parts(conv).rows, plan.parts(conv).images) == (rows, 1)
    kernels = [(name, MultistageTile(product, 32, 64, 16, 32, 1, 2, "uvc")) for product in ("tf32", "fma")]
    tensors = typed(conv, exact_tensors(conv))
    assert not differences(conv, kernels, Emulated(conv, kernels)(tensors), expected(conv, tensors))
    source = generated(conv, *kernels[0]).source
    width = f"float{run}" if layout == "NCHW" else "float2"  # channels: pairs, as a warp has 16
    assert f"*({width}*)(output_ptr" in source


def test_the_model_prices_launches_and_empty_places() -> None:
    """More parts cost more time, and less memory."""
    conv, tile = Conv2d(128, 64, 56, 56, 64, 3), MultistageTile("tf32x3", 64, 128, 32, 64, 1, 3, "uvc")
    plans = [replace(PLAN, wanted_bytes=32 << shift, least_outputs=1) for shift in (16, 18, 20, 23)]
    seconds = [estimate(conv, tile, H200, plan).seconds for plan in plans]
    assert seconds == sorted(seconds, reverse=True) and seconds[0] > 3 * seconds[-1]
    bytes_ = [plan.transform_bytes(conv) for plan in plans]
    assert bytes_ == sorted(bytes_)


@pytest.mark.parametrize(
    ("names", "made", "calls", "measured"),
    [
        (("conv2d",), None, [("conv2d", "x", "w", "y")], None),
        (("conv2d", "transform"), "m", [("transform", "x", "m"), ("conv2d", "m", "w", "y")], "transform"),
        (("conv2d", "transform_parts"), "m", [("conv2d", "x", "m", "w", "y")], "transform_parts"),
    ],
)
def test_libraries_are_called_as_they_are_made(names: tuple[str, ...], made: Any, calls: list[Any], measured: str | None) -> None:
    module = Module(*names)
    kernels = Kernels(module, made is not None)
    kernels("x", made, "w", "y")
    assert module.calls == calls and kernels.in_parts == (measured == "transform_parts")
    if kernels.transform is not None:
        kernels.transform("x", made)
    assert module.calls[len(calls) :] == ([(measured, "x", "m")] if measured else [])
