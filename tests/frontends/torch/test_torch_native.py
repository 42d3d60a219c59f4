"""Calls that pass Python by: which do, what they see of changes, and what kernels are given."""

from __future__ import annotations

import copy
import ctypes
import gc
import math
import threading
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import tvm_ffi  # noqa: E402
from networks import integers  # noqa: E402
from optimizing import X  # noqa: E402
from torch import nn  # noqa: E402
from ways import Ways, right  # noqa: E402

import im2win.torch  # noqa: E402
from im2win.frontends.torch import native  # noqa: E402
from im2win.runtime.op import Launch  # noqa: E402

pytestmark = pytest.mark.usefixtures("library")


# --- what passes Python by


@pytest.mark.parametrize("context", [torch.inference_mode, torch.no_grad], ids=lambda one: one.__name__)
@pytest.mark.parametrize("plain", [False, True], ids=["fused", "alone"])
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_calls_pass_python_by_from_the_second_on(layout: str, plain: bool, context: Any, passes: list[str]) -> None:
    ways = Ways(layout, plain=plain)
    for call in (ways.fast, ways.operator):
        with context():
            right(ways, call)
            passes.clear()
            for x in (ways.x, -ways.x, ways.x * 1):
                right(ways, call, x)
        assert not passes


def test_calls_with_gradients_enabled_that_need_none(passes: list[str]) -> None:
    ways = Ways()
    ways.module.requires_grad_(False)
    for call in (ways.fast, ways.operator):
        right(ways, call)
        passes.clear()
        right(ways, call)
        assert not passes
        x = ways.x.clone().requires_grad_()
        y = call(x)
        assert y.requires_grad and torch.equal(y, ways.module(x))
        with torch.no_grad():
            passes.clear()
            assert torch.equal(call(x), y) and not call(x).requires_grad and not passes


def test_inputs_in_another_order_are_copied(passes: list[str]) -> None:
    ways = Ways()
    wide = integers(2, 5, 12, 28)
    for x in (wide[..., ::2], wide[..., 1::2], wide[..., 14:]):
        for call in (ways.fast, ways.operator):
            with torch.inference_mode():
                right(ways, call, x)
                passes.clear()
                right(ways, call, x)
            assert not passes


# --- changes of parameters


def change_in_place(module: Any) -> None:
    with torch.no_grad():
        module.conv.weight.neg_()


def change_statistics(module: Any) -> None:
    module.norm.running_mean.add_(2)


def load(module: Any) -> None:
    module.load_state_dict({name: one + 2 if "bias" in name else one for name, one in module.state_dict().items()})


def assign(module: Any) -> None:
    module.load_state_dict({name: one.clone() for name, one in module.state_dict().items()}, assign=True)
    module.norm.bias = nn.Parameter(module.norm.bias.detach() + 4)


def train(module: Any) -> None:
    with torch.no_grad():
        optimizer = torch.optim.SGD([module.norm.weight], lr=1.0)
        module.norm.weight.grad = torch.full((5,), 2.0)
        optimizer.step()


@pytest.mark.parametrize("change", [change_in_place, change_statistics, load, assign, train], ids=lambda one: one.__name__)
@pytest.mark.parametrize("way", ["fast", "operator"])
def test_changes_of_parameters_are_seen(way: str, change: Any, passes: list[str]) -> None:
    ways = Ways()
    call = getattr(ways, way)
    with torch.no_grad():
        for _ in range(2):
            right(ways, call)
        for _ in range(2):
            before = call(ways.x)
            change(ways.module)
            passes.clear()
            right(ways, call)
            assert passes and not torch.equal(call(ways.x), before)
            call(ways.x)
            passes.clear()
            right(ways, call)
            assert not passes


def test_other_types_and_memory_formats(passes: list[str]) -> None:
    """PyTorch computes what was not built, and again ours what was."""
    ways = Ways()
    with torch.inference_mode():
        for x in (ways.x, ways.x[:1], ways.x.double(), ways.x.contiguous(memory_format=torch.channels_last)) * 2:
            ways.fast.to(x.dtype)
            for _ in range(3):
                right(ways, ways.fast, x)
        passes.clear()
        right(ways, ways.fast, ways.x[:1])
        assert passes == ["site"]


def test_parameters_made_under_inference_mode(passes: list[str]) -> None:
    """They have no versions: assigning others is seen, and `repack` packs what was written into them."""
    with torch.inference_mode():
        ways = Ways()
        for _ in range(2):
            right(ways, ways.fast)
        passes.clear()
        right(ways, ways.fast)
        assert not passes
        ways.module.norm.bias = nn.Parameter(ways.module.norm.bias + 1)
        for _ in range(3):
            right(ways, ways.fast)
        ways.module.norm.bias.add_(1)
        im2win.torch.repack(ways.fast)
        for _ in range(3):
            right(ways, ways.fast)


def test_what_pytorch_does_not_count_is_packed_on_demand() -> None:
    ways = Ways()
    with torch.inference_mode():
        for call in (ways.fast, ways.operator):
            for _ in range(2):
                right(ways, call)
        ways.module.conv.weight.data.neg_()
        im2win.torch.repack(ways.fast)
        for call in (ways.fast, ways.operator):
            for _ in range(2):
                right(ways, call)


# --- threads, copies, memory


def test_threads_and_changes_at_once() -> None:
    """Each call writes its own output. Modules with other filters do not meet in the table."""
    several = [Ways(layout) for layout in ("NCHW", "NHWC", "NCHW")]
    for ways in several:
        change_statistics(ways.module) if ways is several[2] else None
    wrong: list[int] = []

    def call(number: int) -> None:
        ways = several[number % 3]
        x = integers(*X.shape, seed=number).contiguous(memory_format=torch.channels_last if number % 3 == 1 else torch.contiguous_format)
        with torch.inference_mode():
            expected = ways.module(x)
            wrong.extend(1 for _ in range(200) for one in (ways.fast, ways.operator) if not torch.equal(one(x), expected))

    callers = [threading.Thread(target=call, args=(number,)) for number in range(6)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong


def test_copies_have_places_of_their_own(warm: Any) -> None:
    module, fast = warm
    twin, other = copy.deepcopy(fast), copy.deepcopy(module)
    with torch.no_grad():
        for one in (twin, other):
            one.first.weight.neg_()
        for _ in range(3):
            assert torch.equal(twin(X), other(X)) and torch.equal(fast(X), module(X))


def test_nothing_is_kept_of_what_is_gone() -> None:
    gc.collect()
    before = native._module.remembered()
    ways = Ways()
    with torch.inference_mode():
        for _ in range(2):
            ways.fast(ways.x)
            ways.operator(ways.x)
        assert native._module.remembered() == before + 2
        storage = torch.zeros(1100 + ways.x.numel())
        for gap in range(1030):  # as many layouts; a place remembers 1024
            ways.operator(storage.as_strided(ways.x.shape, (5 * 12 * 14 + gap, 12 * 14, 14, 1)))
    assert native._module.remembered() < before + 1024
    del ways
    gc.collect()
    assert native._module.remembered() == before


# --- what a kernel is given


@pytest.mark.parametrize("kind", ["product", "parts", "transform"])
@pytest.mark.parametrize("residual", [True, False], ids=["added", "alone"])
def test_kernels_with_scratch(residual: bool, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a GPU's have, in the order of `runtime.cuda.Kernels`; inputs begin where wide copies may."""
    ways, ran = Ways(plain=not residual), []

    def shapes(*tensors: Any) -> list[tuple[int, ...]]:
        ran.append([tuple(one.shape) for one in tensors])
        assert not any(one.data_ptr() % 64 for one in tensors if tuple(one.shape) == X.shape and one is not tensors[-1])
        count = math.prod(tensors[-1].shape)
        (ctypes.c_float * count).from_address(tensors[-1].data_ptr())[:] = [7] * count

    product, transform = tvm_ffi.convert(shapes), tvm_ffi.convert(shapes) if kind == "transform" else None
    place = native.place

    def with_scratch(launch: Launch, *others: Any) -> Any:
        return place(launch._replace(product=product, transform=transform, made=0 if kind == "product" else 11), *others)

    monkeypatch.setattr(native, "place", with_scratch)
    monkeypatch.setattr(native, "alignment", lambda tensor: 64)
    storage = torch.empty(X.numel() + 1)
    x = storage[1:].view(X.shape).copy_(X)
    with torch.inference_mode():
        right(ways, ways.fast, x)
        del ran[:]
        y = ways.fast(x)
    assert bool((y == 7).all()) and y.shape == X.shape
    (bound, *_) = ways.site._routes.values()
    packed, whole = [tuple(one.shape) for one in bound._layer.launch.packed], tuple(X.shape)
    rest = [*packed, whole, whole] if residual else [*packed, whole]
    expected = {"product": [[whole, *rest]], "parts": [[whole, (11,), *rest]], "transform": [[whole, (11,)], [(11,), *rest]]}
    assert ran == expected[kind]


def test_what_kernels_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*tensors: Any) -> None:
        raise ValueError("no such launch")

    place, failing = native.place, tvm_ffi.convert(fail)
    monkeypatch.setattr(native, "place", lambda launch, *others: place(launch._replace(product=failing), *others))
    ways = Ways()
    with torch.inference_mode():
        for call in (ways.fast, ways.operator):
            right(ways, call)
            with pytest.raises(RuntimeError, match="no such launch"):
                call(ways.x)
