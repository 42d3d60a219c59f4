"""`torch.ops.im2win.conv2d` in PyTorch's compilers: torch.compile, export and tracing."""

from __future__ import annotations

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from networks import Residual, integers, with_integers  # noqa: E402
from torch import nn  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

import im2win.torch  # noqa: E402
from im2win.frontends.torch import conv_op  # noqa: E402
from im2win.frontends.torch.plain import memory_format  # noqa: E402

pytestmark = pytest.mark.usefixtures("way")


@pytest.fixture
def module(direct: None) -> Any:
    return with_integers(Residual())


def test_compiled_modules(module: Any) -> None:
    """One graph without breaks, three operators in it, which name their places; parameters that change later are seen."""
    x = integers(2, 5, 12, 14)
    fast, seen = im2win.torch.optimize(module, x), []

    def backend(graph: Any, inputs: Any) -> Any:
        seen.append(sum(node.target is conv_op.at_site for node in graph.graph.nodes))
        assert [tuple(one.shape) for one in inputs] == [x.shape]  # no parameter is checked, or handed over, at every call
        return graph.forward

    compiled = torch.compile(fast, backend=backend, fullgraph=True)
    with torch.inference_mode():
        assert torch.equal(compiled(x), module(x))
        assert seen == [3]
    with torch.no_grad():
        module.first.weight.neg_()
        module.second_norm.running_mean += 1
    with torch.inference_mode():
        assert torch.equal(compiled(x), module(x)) and seen == [3]


def test_networks_of_other_classes_do_not_make_sizes_dynamic() -> None:
    """PyTorch's compiler takes a size as dynamic that differs between two calls of one function: each class has a `forward` of its own."""

    class First(nn.Sequential):
        pass

    class Second(nn.Sequential):
        pass

    def backend(graph: Any, inputs: Any) -> Any:
        seen.append([tuple(one.shape) if isinstance(one, torch.Tensor) else one for one in inputs])
        return graph.forward

    seen: list[Any] = []
    for kind, size in ((First, 12), (Second, 9)):
        x, module = integers(2, 5, size, 14), with_integers(kind(nn.Conv2d(5, 8, 3), nn.ReLU()))
        compiled: Any = torch.compile(im2win.torch.optimize(module, x), backend=backend, fullgraph=True)
        with torch.inference_mode():
            assert torch.equal(compiled(x), module(x))
    assert seen == [[(2, 5, 12, 14)], [(2, 5, 9, 14)]]


def test_compiled_modules_follow_what_happens_to_the_module(module: Any) -> None:
    """Copies have parameters of their own; normalisation that trains takes the batch's statistics; a module that is gone is an error."""
    x = integers(2, 5, 12, 14)
    fast = im2win.torch.optimize(module, x)
    other = copy.deepcopy(fast)
    ours, theirs = (torch.compile(one, backend="aot_eager", fullgraph=True) for one in (fast, other))
    with torch.no_grad():
        other.first.weight.neg_()
        expected = copy.deepcopy(module)
        expected.first.weight.neg_()
        assert torch.equal(ours(x), module(x)) and torch.equal(theirs(x), expected(x))
        expected.second_norm.train()
        other.second_norm.train()
        torch.testing.assert_close(theirs(x), expected(x))
        assert torch.equal(other.second_norm.running_mean, expected.second_norm.running_mean)
    with pytest.raises(RuntimeError, match="a module that is there no more"):
        conv_op.at_site(x, None, conv_op.Place(-1, (8, 5, 3, 3), False, (1, 1), (1, 1, 1, 1), (1, 1)).text)


def test_compiled_programs_check_nothing_of_places(module: Any) -> None:
    """Where no gradient is needed: a check of every place and parameter would take longer than the small kernels."""
    x, seen = integers(2, 5, 12, 14), []

    def keep(guards: Any) -> list[bool]:
        seen.extend(one.name for one in guards)
        return [True] * len(guards)

    fast = im2win.torch.optimize(module, x)
    with torch.no_grad():
        assert torch.equal(torch.compile(fast, backend="eager", options={"guard_filter_fn": keep})(x), module(x))
    assert any("by_place" in name for name in seen) and not any("site_" in name or "_parameters[" in name for name in seen)


def test_many_modules_are_compiled(module: Any) -> None:
    """Each has its own program: PyTorch gives up on code for which it has made eight."""
    x = integers(2, 5, 12, 14)
    for _ in range(10):
        compiled = torch.compile(im2win.torch.optimize(module, x), backend="eager", fullgraph=True)
        with torch.no_grad():
            assert torch.equal(compiled(x), module(x))


def test_compiled_modules_have_gradients(module: Any) -> None:
    x = integers(2, 5, 12, 14)
    fast = torch.compile(im2win.torch.optimize(module, x), backend="aot_eager", fullgraph=True)
    fast(x).sum().backward()
    grads = [parameter.grad for parameter in module.parameters()]
    for parameter in module.parameters():
        parameter.grad = None
    module(x).sum().backward()
    for mine, parameter in zip(grads, module.parameters(), strict=True):
        torch.testing.assert_close(mine, parameter.grad)


def test_exported_modules(module: Any) -> None:
    x = integers(2, 5, 12, 14)
    fast = im2win.torch.optimize(module, x, dynamic="build")
    program = torch.export.export(fast, (x,))
    assert sum(node.target is conv_op.conv2d for node in program.graph.nodes) == 3
    assert set(program.state_dict) == set(module.state_dict())
    with torch.inference_mode():
        assert torch.equal(program.module()(x), module(x))
    batch = torch.export.Dim("batch", min=2, max=64)
    anything = torch.export.export(fast, (x,), dynamic_shapes={"x": {0: batch}})
    with torch.inference_mode():
        for images in (2, 3):
            more = integers(images, 5, 12, 14)
            assert torch.equal(anything.module()(more), module(more))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # by PyTorch's own forward differentiation
def test_traced_and_transformed_calls(module: Any) -> None:
    """Tracers see the operator; transforms see PyTorch's own, which they know."""
    x = integers(2, 5, 12, 14)
    fast = im2win.torch.optimize(module, x)
    traced = torch.fx.experimental.proxy_tensor.make_fx(fast)(x)
    assert sum(node.target is conv_op.conv2d for node in traced.graph.nodes) == 3
    with torch.no_grad():
        both = torch.vmap(fast)(torch.stack([x, -x]))
        assert torch.equal(both, torch.stack([module(x), module(-x)]))
        tangent = integers(2, 5, 12, 14, seed=1)
        for mine, wanted in zip(torch.func.jvp(fast, (x,), (tangent,)), torch.func.jvp(module, (x,), (tangent,)), strict=True):
            assert torch.equal(mine, wanted)
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x, tangent)
            assert torch.equal(torch.autograd.forward_ad.unpack_dual(fast(dual)).tangent, wanted)
        other = with_integers(Residual())
        for parameter in other.parameters():
            parameter.data.neg_()
        assert torch.equal(torch.func.functional_call(fast, dict(other.named_parameters()), x), other(x))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_fake_kernel(device: str) -> None:
    """Shapes and strides without computing, of devices that are not here, too."""
    with FakeTensorMode():
        for order in (torch.contiguous_format, torch.channels_last):
            x = torch.empty(4, 6, 12, 14, device=device, dtype=torch.float16).to(memory_format=order)
            weight = torch.empty(8, 3, 3, 2, device=device, dtype=torch.float16)
            y = torch.ops.im2win.conv2d(
                x, weight, None, None, None, None, None, None, None, 0.0, [2, 1], [0, 1, 1, 1], [1, 2], 2, "relu", "any"
            )
            assert y.shape == (4, 8, 6, 14) and y.device.type == device and y.dtype == torch.float16
            assert y.is_contiguous(memory_format=order)


def test_memory_formats() -> None:
    """The output's is PyTorch's, whatever the strides are."""
    weight = torch.randn(8, 4, 3, 3)
    whole = torch.randn(2, 8, 10, 12)
    last = whole.contiguous(memory_format=torch.channels_last)
    one = torch.randn(8, 1, 3, 3)
    for x, filters in (
        (whole[:, :4], weight), (last[:, :4], weight), (last[:, 4:, 1:, ::2], weight), (whole[:, :4, ::2], weight),
        (whole[:, :1], one), (last[:, :1], one), (whole[:, :1], one.contiguous(memory_format=torch.channels_last)),
        (whole[:, :4], weight.contiguous(memory_format=torch.channels_last)), (whole[:, :4, :3, :3], weight),
    ):  # fmt: skip
        y = torch.conv2d(x, filters)
        assert y.is_contiguous(memory_format=memory_format(x, filters)), (x.shape, x.stride(), filters.stride())
