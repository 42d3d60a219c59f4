"""Calls that are left to Python, though calls like them passed it by before: for whoever must see them, and where there is no library."""

from __future__ import annotations

import copy
import logging
import threading
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from networks import integers  # noqa: E402
from optimizing import X  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from ways import Ways, right  # noqa: E402

from im2win.codegen import toolchain as compilers  # noqa: E402
from im2win.frontends.torch import conv_op, native  # noqa: E402

pytestmark = pytest.mark.usefixtures("library")


class Seen(TorchDispatchMode):  # type: ignore[no-untyped-call,unused-ignore]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call,unused-ignore]
        self.functions: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.functions.append(func)
        return func(*args, **(kwargs or {}))


def test_modes_and_tracers_see_calls(warm: Any) -> None:
    module, fast = warm
    for context in (torch.inference_mode, torch.no_grad):
        with context(), Seen() as seen:
            assert torch.equal(fast(X), module(X))
        assert seen.functions.count(conv_op.conv2d) == 3
    with torch.no_grad():
        graph = torch.fx.experimental.proxy_tensor.make_fx(fast)(X).graph
        assert sum(node.target is conv_op.conv2d for node in graph.nodes) == 3


def test_transforms_autocast_and_training_are_pytorchs(warm: Any) -> None:
    module, fast = warm
    with torch.no_grad():
        assert torch.equal(torch.vmap(fast)(torch.stack([X, -X])), torch.stack([module(X), module(-X)]))
        with torch.autocast("cpu", torch.bfloat16):
            assert fast(X).dtype == torch.bfloat16 and torch.equal(fast(X), module(X))
        assert torch.equal(fast(X), module(X))
        alone = copy.deepcopy(module)
        for one in (fast.second_norm, alone.second_norm):
            one.eps = 1.0  # of 0 training refuses
            one.train()
        torch.testing.assert_close(fast(X), alone(X), atol=1e-4, rtol=1e-4)
        assert torch.equal(fast.second_norm.running_mean, alone.second_norm.running_mean)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # by PyTorch's own forward differentiation
def test_forward_differentiation_is_pytorchs(warm: Any) -> None:
    module, fast = warm
    tangent = integers(*X.shape, seed=1)
    with torch.no_grad(), torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(X, tangent)
        mine, wanted = (torch.autograd.forward_ad.unpack_dual(one(dual)).tangent for one in (fast, module))
        assert torch.equal(mine, wanted)


def test_gradients_compilers_and_exporters(warm: Any) -> None:
    module, fast = warm
    alone = copy.deepcopy(module)
    fast(X).sum().backward()
    alone(X).sum().backward()
    for mine, other in zip(fast.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad)
    with torch.inference_mode():
        compiled = torch.compile(fast, backend="aot_eager", fullgraph=True)
        program = torch.export.export(fast, (X,)).module()
        for _ in range(3):
            assert torch.equal(compiled(X), module(X)) and torch.equal(program(X), module(X))


# --- without the library


@pytest.mark.parametrize("compiler", ["/nowhere/c++", "false"])
def test_without_a_compiler_calls_pass_through_python(
    compiler: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, passes: list[str]
) -> None:
    native.unload()
    monkeypatch.setattr(native, "_module", None)
    monkeypatch.setattr(native, "_failed", False)
    with caplog.at_level(logging.INFO, "im2win.torch"), monkeypatch.context() as patch:
        patch.setenv("CXX", compiler)  # TVM, too, links with it
        assert not native.load()
    ways = Ways()
    with torch.inference_mode():
        for _ in range(3):
            for call in (ways.fast, ways.operator):
                right(ways, call)
    assert caplog.text.count("calls of operators pass through Python (") == 1
    assert compiler in caplog.text and passes.count("bound") >= 6 and not native.load()


def test_the_library_is_compiled_beside_other_work(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Once, though two ask for it; who loads it waits until it is there."""
    started, finish, ready = threading.Event(), threading.Event(), native._library(True)
    made: list[bool] = []

    def library(make: bool) -> Path:
        made.append(make)
        started.set()
        assert finish.wait(60)
        return ready

    for name, value in (("_module", None), ("_making", None), ("_library", library), ("site", native.in_python)):
        monkeypatch.setattr(native, name, value)
    native.begin()
    native.begin()
    assert started.wait(60) and made == [True]
    threading.Timer(0.2, finish.set).start()
    assert native.load() and made == [True, True] and finish.is_set() and native._making is None
    native.begin()
    assert native._making is None, "it is loaded"


def test_what_fails_beside_other_work_is_told_where_it_is_needed(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def library(make: bool) -> Path:
        raise OSError("no compiler")

    for name, value in (("_module", None), ("_making", None), ("_failed", False), ("_library", library), ("site", native.in_python)):
        monkeypatch.setattr(native, name, value)
    native.begin()
    with caplog.at_level(logging.INFO, "im2win.torch"):
        assert not native.load() and not native.load()
    assert caplog.text.count("(no compiler)") == 1
    native.begin()
    assert native._making is None


def test_only_who_asks_for_kernels_compiles(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A program that loads an operator takes the library where it has been compiled, and compiles nothing; `optimize` may, later."""
    monkeypatch.setattr(compilers, "default_folder", lambda: tmp_path)
    for name, value in (("_module", None), ("_failed", False), ("site", native.in_python)):
        monkeypatch.setattr(native, name, value)
    assert not native.load(make=False) and not list(tmp_path.iterdir()) and native.site is native.in_python
    assert not native._failed
