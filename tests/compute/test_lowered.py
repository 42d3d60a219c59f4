"""Tensors of windows: their strides address the elements of the formula, and the CPU's algorithms define the same tensors."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import tvm
from im2win_tensor import numbered, padded
from im2win_tensor import transformed as im2win_transformed
from ops import host
from oracle import Array
from regimes import REGIMES
from tvm import te

from im2win.codegen.llvm import llvm_target
from im2win.compute import im2col, lowered, mec
from im2win.compute.lowered import Strides
from im2win.packing.cpu_blocked import FilterPack
from im2win.registry.schedules import schedule_of
from im2win.schedules.cuda.families.multistage import Multistage
from im2win.spec.conv2d import LAYOUTS, Conv2d

AXES = ("ncyk", "ncmku", "ncuvmx", "ncxyv")
CONVS = [
    REGIMES[key]
    for key in (
        "n2-c5x11x13-k17x3x3-p1",  # primes
        "n1-c3x10x13-k8x2x2-s3",  # gaps between windows
        "n1-c4x13x17-k16x3x5-p1x2",  # a wide kernel
        "n1-c4x9x11-k16x4x4-s2-p1.0.2.3",  # four sides, all different
        "n1-c3x17x16-k8x3x2-s2-p1-d3x2",  # dilation with stride, both unequal down and across
        "n1-c5x9x11-k15x3x3-p1-g5",  # groups
    )
]
both_layouts = pytest.mark.parametrize("conv", [conv.with_(layout=layout) for conv in CONVS for layout in LAYOUTS], ids=str)


def windows(conv: Conv2d, x: Array) -> Array:
    """Element [n, c, m, x, u, v] of every window, from the padded input."""
    field = padded(conv, x)
    found = np.empty((conv.batch, conv.in_channels, *conv.output_size, *conv.kernel), x.dtype)
    for (m, col, u, v), _ in np.ndenumerate(found[0, 0]):
        row, column = m * conv.stride[0] + u * conv.dilation[0], col * conv.stride[1] + v * conv.dilation[1]
        found[:, :, m, col, u, v] = field[:, :, row, column]
    return found


def defined(conv: Conv2d, axes: str, x: Array) -> Array:
    """The tensor with these axes, from the meaning of their letters."""
    field = padded(conv, x)
    made = np.empty(lowered.shape(conv, axes), x.dtype)
    for indices, _ in np.ndenumerate(made):
        i = dict(zip(axes, indices, strict=True))
        y = i["y"] if "y" in i else i["m"] * conv.stride[0] + i["u"] * conv.dilation[0]
        k = i["k"] if "k" in i else i["x"] * conv.stride[1] + i["v"] * conv.dilation[1]
        made[indices] = field[i["n"], i["c"], y, k]
    return made


def addresses(conv: Conv2d, strides: Strides) -> Array:
    """Address of element [n, c, m, x, u, v] of every window."""
    shape = (conv.batch, conv.in_channels, *conv.output_size, *conv.kernel)
    steps = (strides.n, strides.c, strides.m, strides.x, strides.u, strides.v)
    return strides.origin + sum(index * step for index, step in zip(np.indices(shape), steps, strict=True))


def compiled(tensors: list[te.Tensor], x: Array) -> Array:
    """What TVM computes for the last of two tensors, data and result."""
    run = tvm.compile(te.create_prim_func(tensors), llvm_target(host()))
    y = tvm.runtime.tensor(np.full([int(extent) for extent in tensors[-1].shape], np.nan, np.float32))
    run(tvm.runtime.tensor(x), y)
    return np.asarray(y.numpy())


def transformed(conv: Conv2d, axes: str, x: Array) -> Array:
    data = te.placeholder(conv.input_shape, "float32", name="data")
    return compiled([data, lowered.transform(conv, axes, data)], x)


def _named(tensor: te.Tensor, name: str) -> list[te.Tensor]:
    """The tensors of that name that a definition computes on its way to this one."""
    found = [tensor] if tensor.op.name == name else []
    return found + [one for source in tensor.op.input_tensors for one in _named(source, name)]


@both_layouts
@pytest.mark.parametrize("axes", AXES)
def test_strides_address_every_element_of_every_window(axes: str, conv: Conv2d) -> None:
    x, order = numbered(conv), lowered.oriented(axes, conv.layout)
    strides = lowered.strides(conv, order)
    assert np.array_equal(defined(conv, order, x).ravel()[addresses(conv, strides)], windows(conv, x))
    assert strides.origin == 0 and not strides.padded


@both_layouts
def test_strides_of_the_input_itself(conv: Conv2d) -> None:
    """Taps inside the input lie where they say, and the padding is said to lie outside."""
    x = numbered(conv)
    strides, right = lowered.input_strides(conv), windows(conv, x)
    place = addresses(conv, strides)
    inside = right != 0  # no element of the input is zero
    assert np.array_equal(x.ravel()[place[inside]], right[inside])
    assert strides.padded == (not inside.all())


@pytest.mark.sampled(16)
@pytest.mark.parametrize("axes", AXES)
@both_layouts
def test_transform(conv: Conv2d, axes: str) -> None:
    x, order = numbered(conv), lowered.oriented(axes, conv.layout)
    y = transformed(conv, order, x)
    assert np.array_equal(y, defined(conv, order, x))
    assert y.nbytes == lowered.transform_bytes(conv, order)


def _im2win(conv: Conv2d, x: Array) -> Array:
    return im2win_transformed(conv, x)


def _im2col(conv: Conv2d, x: Array) -> Array:
    data = te.placeholder(conv.input_shape, "float32", name="data")
    return compiled([data, im2col.transform(conv, FilterPack(8, "cuv"), data)], x)


def _mec(conv: Conv2d, x: Array) -> Array:
    data, *_, out = mec.define(conv, FilterPack(8, "cuv"))
    [tensor] = _named(out, mec.LOWERED)
    return compiled([data, tensor], x)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("conv", CONVS, ids=str)
@pytest.mark.parametrize(("name", "by_definition"), [("im2win/stored", _im2win), ("im2col/tiled", _im2col), ("mec/tiled", _mec)])
def test_the_same_tensors_as_on_the_cpu(name: str, by_definition: Callable[[Conv2d, Array], Array], conv: Conv2d) -> None:
    """In NCHW, element by element in memory; and their sizes are those of the papers' formulas."""
    row, x = schedule_of(name), numbered(conv)
    schedule = row.on_gpu
    assert isinstance(schedule, Multistage)
    y = transformed(conv, schedule.windows.axes, x)
    assert np.array_equal(y.ravel(), by_definition(conv, x).ravel())
    assert schedule.transform_bytes(conv) == row.transform_bytes(conv) == y.nbytes


@pytest.mark.parametrize(("axes", "last"), [("ncyk", "nykc"), ("ncmku", "nmkuc"), ("ncuvmx", "nuvmxc"), ("ncxyv", "nxyvc")])
def test_channels_last(axes: str, last: str) -> None:
    assert lowered.oriented(axes, "NCHW") == axes and lowered.oriented(axes, "NHWC") == last
