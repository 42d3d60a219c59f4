"""Operators at run time: tensors of every kind without a copy, out=, bound filters and threads."""

from __future__ import annotations

import gc
import math
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import tvm_ffi
from ops import computing, default, run, supported
from oracle import Array, assert_equal, exact_tensors, integers, oracle

import im2win
from im2win import Conv2d
from im2win.packing.cpu_blocked import FilterPack
from im2win.runtime import tensors as views
from im2win.runtime.op import Op

CONV = Conv2d.parse("n2-c5x11x13-k16x3x3-p1")
FULL = Conv2d.parse("n2-c5x11x13-k16x3x3-p1-bias-add-relu")
POINTWISE = Conv2d.parse("n1-c8x6x8-k16x1x1")

# --- kinds of tensors


def test_numpy() -> None:
    x, w, expected = integers(CONV)
    before = x.copy(), w.copy()
    y = default(CONV)(x, w)
    assert type(y) is np.ndarray and y.flags.c_contiguous
    assert_equal(CONV, y, expected)
    assert (x == before[0]).all() and (w == before[1]).all()


def test_torch() -> None:
    torch = pytest.importorskip("torch")
    tensors = exact_tensors(FULL)
    y = run(default(FULL), {name: torch.from_numpy(value) for name, value in tensors.items()})
    assert isinstance(y, torch.Tensor) and y.dtype == torch.float32 and not y.requires_grad
    assert_equal(FULL, y.numpy(), oracle(FULL, **tensors))


def test_torch_parameters_and_inference_mode() -> None:
    """A layer's own parameters require grad; they are packed, so that is no obstacle."""
    torch = pytest.importorskip("torch")
    layer = torch.nn.Conv2d(5, 16, 3, padding=1)
    x = torch.from_numpy(exact_tensors(CONV)["data"])
    op = default(CONV.with_(bias=True))
    with torch.inference_mode():
        y = op(x, layer.weight, layer.bias)
        assert torch.allclose(y, layer(x), atol=1e-4)


class Foreign:
    """A tensor of some other library: nothing but the DLPack protocol."""

    def __init__(self, array: Array, device: int = 1) -> None:
        self.array, self.device = array, device

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device, 0


def test_any_dlpack_tensor() -> None:
    x, w, expected = integers(CONV)
    out = np.full(CONV.output_shape, np.nan, np.float32)
    target = Foreign(out)
    assert default(CONV)(Foreign(x), Foreign(w), out=target) is target
    assert_equal(CONV, out, expected)
    assert_equal(CONV, np.from_dlpack(default(CONV)(tvm_ffi.from_dlpack(x), w)), expected)
    assert_equal(CONV, default(CONV)(Foreign(x), w), expected)


def test_dlpack_tensor_of_another_device() -> None:
    """Device type 2 is CUDA's."""
    x, w, _ = integers(CONV)
    with pytest.raises(ValueError, match=r"`x` is on DLPack device type 2; this kernel runs on the CPU \(type 1\)"):
        default(CONV)(Foreign(x, device=2), w)
    with pytest.raises(ValueError, match=r"`w` .*(device|CPU)"):
        default(CONV)(x, Foreign(w, device=2))


def test_dlpack_tensor_that_is_not_contiguous() -> None:
    x, w, _ = integers(CONV)
    with pytest.raises(ValueError, match="`x` is not contiguous"):
        default(CONV)(Foreign(np.asfortranarray(x)), w)


def test_kinds_may_be_mixed() -> None:
    torch = pytest.importorskip("torch")
    x, w, expected = integers(CONV)
    y = default(CONV)(x, torch.from_numpy(w))
    assert type(y) is np.ndarray
    assert_equal(CONV, y, expected)
    assert isinstance(default(CONV)(torch.from_numpy(x), w), torch.Tensor)


# --- memory


def test_large_tensors_are_not_copied() -> None:
    """A call allocates its output and little else, as Python sees it; 16 MB of input would show."""
    import tracemalloc

    conv = Conv2d(1, 64, 256, 256, 4, 1)
    op, x, out = default(conv), np.ones(conv.input_shape, np.float32), np.empty(conv.output_shape, np.float32)
    layer = op.bind(np.ones(conv.filter_shape, np.float32))
    layer(x, out=out)
    tracemalloc.start()
    layer(x, out=out)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < x.nbytes / 100
    assert (out == 64).all()


def test_out() -> None:
    x, w, expected = integers(CONV)
    out = np.full(CONV.output_shape, np.nan, np.float32)
    assert default(CONV)(x, w, out=out) is out
    assert_equal(CONV, out, expected)


def test_out_of_torch() -> None:
    torch = pytest.importorskip("torch")
    x, w, expected = integers(CONV)
    out = torch.full(CONV.output_shape, torch.nan)
    assert default(CONV)(torch.from_numpy(x), w, out=out) is out
    assert_equal(CONV, out.numpy(), expected)
    assert_equal(CONV, default(CONV)(x, w, out=torch.empty(CONV.output_shape)).numpy(), expected)


def test_out_may_be_part_of_a_larger_tensor() -> None:
    """Writing into a concatenation, as DenseNet-like networks do."""
    conv = CONV.with_(batch=1)
    x, w, expected = integers(conv)
    whole = np.zeros((1, 40, 11, 13), np.float32)
    default(conv)(x, w, out=whole[:, 8:24])
    assert_equal(conv, np.ascontiguousarray(whole[:, 8:24]), expected)
    assert not whole[:, :8].any() and not whole[:, 24:].any()


@pytest.mark.parametrize("name", ["data", "residual"])
def test_out_may_touch_an_input_but_not_overlap_it(name: str) -> None:
    """An output that begins before the input and ends in it, too."""
    conv = POINTWISE.with_(residual=name == "residual")
    tensors = exact_tensors(conv)
    layer, size, length = default(conv).bind(tensors["filter"]), math.prod(conv.output_shape), tensors[name].size
    memory = np.zeros(2 * size + length, np.float32)
    given = memory[size : size + length].reshape(tensors[name].shape)
    given[...] = tensors[name]
    arguments = [given if one == name else tensors[one] for one in ("data", "residual") if one in tensors]
    for first in (0, size + length):
        out = memory[first : first + size].reshape(conv.output_shape)
        assert_equal(conv, layer(*arguments, out=out), oracle(conv, **tensors))
    for first in (1, size // 2, size, size + length - 1):
        with pytest.raises(ValueError, match="`out` must not overlap x or residual"):
            layer(*arguments, out=memory[first : first + size].reshape(conv.output_shape))


def test_strides_of_axes_of_one_element_say_nothing() -> None:
    assert views._compact((1, 8, 1, 4), (7, 4, 9, 1)) and views._compact((2, 3), (3, 1)) and views._compact((), ())
    assert not views._compact((2, 8, 1, 4), (7, 4, 9, 1)) and not views._compact((3, 2), (1, 3)) and not views._compact((4,), (2,))


def test_read_only_input() -> None:
    tensors = exact_tensors(FULL)
    expected = oracle(FULL, **tensors)
    for array in tensors.values():
        array.flags.writeable = False
    assert_equal(FULL, run(default(FULL), tensors), expected)
    frozen = np.frombuffer(tensors["data"].tobytes(), np.float32).reshape(FULL.input_shape)  # memory of a bytes object
    assert_equal(FULL, run(default(FULL), {**tensors, "data": frozen}), expected)


@computing(FULL)
def test_misaligned_memory(algorithm: str) -> None:
    """Every tensor one element past a cache line: aligned vector loads would crash or read the neighbours."""

    def misaligned(array: Array) -> Array:
        buffer = np.full(array.size + 32, np.nan, np.float32)
        start = (-buffer.ctypes.data // 4) % 16 + 1
        view = buffer[start : start + array.size].reshape(array.shape)
        view[...] = array
        assert view.ctypes.data % 64 == 4
        return view

    tensors = exact_tensors(FULL)
    out = misaligned(np.empty(FULL.output_shape, np.float32))
    run(default(FULL, algorithm), {name: misaligned(value) for name, value in tensors.items()}, out)
    assert_equal(FULL, out, oracle(FULL, **tensors))


def test_outputs_start_at_cache_lines() -> None:
    """As PyTorch's do; numpy's own large arrays start 16 bytes behind one."""
    x, w, _ = integers(CONV)
    layer = default(CONV).bind(w)
    outputs = [layer(x) for _ in range(8)]  # all alive, so that they lie at different addresses
    assert {y.ctypes.data % 64 for y in outputs} == {0}


def test_an_input_may_die_after_the_call() -> None:
    """A layer keeps its packed filters, whatever becomes of the tensors they were made from and of its operator's name."""
    x, w, expected = integers(POINTWISE)
    layer = im2win.build(POINTWISE, algorithm="direct/tiled").bind(w.copy())
    gc.collect()
    assert_equal(POINTWISE, layer(x), expected)


def test_dropping_an_operator_is_silent() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        op = im2win.build(POINTWISE, algorithm="direct/tiled")
        assert "n1-c8x6x8-k16x1x1 direct/tiled default tile" in repr(op)
        del op
        gc.collect()


# --- filters


def test_bind_packs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = []
    pack = FilterPack.filter
    monkeypatch.setattr(FilterPack, "filter", lambda *arguments: packed.append(1) or pack(*arguments))
    x, w, expected = integers(CONV)
    layer = default(CONV).bind(w)
    for _ in range(3):
        assert_equal(CONV, layer(x), expected)
    assert len(packed) == 1


def test_later_changes_to_filters_are_not_seen() -> None:
    x, w, expected = integers(CONV)
    layer = default(CONV).bind(w)
    w[...] = np.nan
    assert_equal(CONV, layer(x), expected)


def test_filters_of_any_memory_order() -> None:
    x, w, expected = integers(CONV)
    for same in (np.asfortranarray(w), np.ascontiguousarray(w.transpose(2, 3, 1, 0)).transpose(3, 2, 0, 1), w[::-1].copy()[::-1]):
        assert_equal(CONV, default(CONV)(x, same), expected)


@pytest.mark.parametrize("order", ["cuv", "cvu", "uvc"])
@pytest.mark.parametrize("key", ["n1-c6x9x11-k10x3x2", "n1-c6x9x11-k15x3x2-g3"])
def test_packed_filters_by_the_formula(key: str, order: Any) -> None:
    conv, pack = Conv2d.parse(key), FilterPack(4, order)
    w, bias = exact_tensors(conv)["filter"], np.arange(conv.out_channels, dtype=np.float32)
    packed, wide = pack.filter(conv, w), pack.bias(conv, bias)
    per_group = conv.out_channels // conv.groups
    seen = np.zeros(packed.shape, bool)
    for (j, c, u, v), value in np.ndenumerate(w):
        block = j // per_group * pack.blocks_per_group(conv) + j % per_group // 4
        step = {"cuv": (c * 3 + u) * 2 + v, "cvu": (c * 2 + v) * 3 + u, "uvc": (u * 2 + v) * w.shape[1] + c}[order]
        place = block, step, j % per_group % 4
        assert packed[place] == value and wide[block, j % per_group % 4] == bias[j]
        seen[place] = True
    assert not packed[~seen].any(), "what is not a filter is zero"


# --- threads


@computing(FULL)
def test_four_threads_on_one_operator(algorithm: str) -> None:
    op = default(FULL, algorithm)
    work = []
    for seed in range(4):
        tensors = exact_tensors(FULL, seed)
        work.append((tensors, oracle(FULL, **tensors)))

    def repeat(index: int) -> int:
        tensors, expected = work[index]
        layer = op.bind(tensors["filter"], tensors["bias"])
        return sum(bool((layer(tensors["data"], tensors["residual"]) == expected).all()) for _ in range(50))

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(repeat, range(4))) == [50] * 4


# --- what build chooses


def test_build_takes_keys_and_says_what_it_chose() -> None:
    op = im2win.build("n1-c8x6x8-k16x1x1")
    assert isinstance(op, Op) and op.conv == POINTWISE and op.method in supported(POINTWISE)
    x, w, expected = integers(POINTWISE)
    assert_equal(POINTWISE, op(x, w), expected)


def test_build_for_one_thread_computes_the_same() -> None:
    x, w, expected = integers(CONV)
    op = im2win.build(CONV, algorithm="im2win/fused", threads=1)
    assert op.manifest.threads == 1
    assert_equal(CONV, op(x, w), expected)
