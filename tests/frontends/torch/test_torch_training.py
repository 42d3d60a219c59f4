"""Modules of `im2win.torch.optimize` whose parameters change, that train, and that autocast runs: all as PyTorch's own."""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch")

from networks import Residual, with_integers  # noqa: E402
from optimizing import Heads, X, equal, optimized  # noqa: E402
from torch import nn  # noqa: E402

import im2win.torch  # noqa: E402
from im2win.spec.activations import ACTIVATIONS  # noqa: E402

pytestmark = pytest.mark.usefixtures("direct", "way")

# --- parameters


def test_state_dict_is_the_modules_own() -> None:
    module = with_integers(Residual())
    fast = optimized(module)
    mine, theirs = fast.state_dict(keep_vars=True), module.state_dict(keep_vars=True)
    assert list(mine) == list(theirs) and all(mine[name] is theirs[name] for name in theirs)
    assert [name for name, _ in fast.named_modules()] == [name for name, _ in module.named_modules()]


def test_changes_of_parameters_are_seen(calls: list[str]) -> None:
    """Loaded in place and by assignment, written by an optimizer's step, in buffers, and in a copy of the module."""
    module, other = with_integers(Residual()), with_integers(Residual())
    for parameter in other.parameters():
        parameter.data.neg_()
    fast = optimized(module)
    with torch.inference_mode():
        before = module(X)
    module.load_state_dict(copy.deepcopy(other.state_dict()))
    equal(fast, other)
    with torch.inference_mode():
        assert not torch.equal(fast(X), before)
    fast.load_state_dict({name: value * 1 for name, value in with_integers(Residual()).state_dict().items()}, assign=True)
    with torch.inference_mode():
        assert torch.equal(fast(X), before)
    with torch.no_grad():
        module.first.weight += 1
        module.second_norm.running_mean += 1
    equal(fast, module)
    twin = copy.deepcopy(fast)
    with torch.no_grad():
        twin.second.bias.fill_(3)
        module.second.bias.fill_(-1)
    equal(fast, module)
    plain = copy.deepcopy(module)
    with torch.no_grad():
        plain.second.bias.fill_(3)
    calls.clear()
    equal(twin, plain)
    assert len(calls) == 3


def test_what_pytorch_does_not_count_is_packed_on_demand() -> None:
    for module in (with_integers(Residual()), with_integers(Heads())):
        fast = optimized(nn.Sequential(module).eval() if isinstance(module, Heads) else module)
        for one in module.parameters():
            one.data.neg_()
        im2win.torch.repack(nn.ModuleList([fast]))
        with torch.inference_mode():
            y, expected = fast(X), module(X)
            assert all(map(torch.equal, y, expected))
    with pytest.raises(ValueError, match=r"`module` \(a Conv2d\) must be a result of im2win.torch.optimize"):
        im2win.torch.repack(nn.Conv2d(1, 1, 1))


def test_shared_modules_and_parameters() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Conv2d(5, 5, 3, padding=1), nn.Conv2d(5, 5, 3, padding=1)
            self.other.weight = self.one.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.other(self.one(self.one(x) * 0.125)[:, :, ::2] * 0.125)

    module = with_integers(Shared())
    fast = optimized(module)
    assert [layer.name for layer in fast.im2win_report.layers] == ["one", "one", "other"]
    equal(fast, module)
    with torch.no_grad():
        fast.one.weight.neg_()
    equal(fast, module)


# --- training, gradients, autocast


def test_training_is_pytorchs(calls: list[str]) -> None:
    module = Residual().eval()
    fast, alone = optimized(module), copy.deepcopy(module)
    calls.clear()
    fast.train()
    y, expected = fast(X), alone.train()(X)
    assert torch.equal(y, expected) and not calls
    assert torch.equal(module.first_norm.running_mean, alone.first_norm.running_mean)
    fast.eval()
    alone.eval()
    with torch.no_grad():
        torch.testing.assert_close(fast(X), alone(X), atol=1e-5, rtol=1e-5)
        assert len(calls) == 3
        fast.second_norm.train()
        alone.second_norm.train()
        torch.testing.assert_close(fast(X), alone(X), atol=1e-5, rtol=1e-5)
    assert len(calls) == 5
    torch.testing.assert_close(fast.second_norm.running_var, alone.second_norm.running_var)


MODULES = [getattr(nn, one.module)() for row in ACTIVATIONS.values() for one in row.torch[:1]]


@pytest.mark.sampled(8)
@pytest.mark.parametrize("activation", MODULES, ids=str)
def test_gradients_are_pytorchs(activation: nn.Module, calls: list[str]) -> None:
    torch.manual_seed(0)
    module = Residual(activation=activation).eval()
    alone, x = copy.deepcopy(module), torch.randn(2, 5, 12, 14, requires_grad=True)
    fast = optimized(module, x.detach())
    calls.clear()
    y, expected = fast(x), alone(x)
    assert len(calls) == 3 and y.requires_grad
    grad = torch.randn_like(y)
    (of_x,) = torch.autograd.grad(y, x, grad, retain_graph=True)
    (wanted,) = torch.autograd.grad(expected, x, grad, retain_graph=True)
    torch.testing.assert_close(of_x, wanted, atol=1e-4, rtol=1e-4)
    y.backward(grad)
    expected.backward(grad)
    for (name, one), other in zip(fast.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, atol=1e-3, rtol=1e-4, msg=name)


def test_autocast_is_pytorchs(calls: list[str]) -> None:
    module = with_integers(Residual())
    fast = optimized(module)
    calls.clear()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(fast(X), module(X)) and not calls
