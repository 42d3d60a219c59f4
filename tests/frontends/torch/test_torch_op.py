"""`torch.ops.im2win.conv2d`: what PyTorch's own checks, compilers and autograd make of it."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from networks import integers  # noqa: E402
from ops import default  # noqa: E402
from torch import nn  # noqa: E402

from im2win.builder.cache import artefact_name  # noqa: E402
from im2win.device.cpu import Machine  # noqa: E402
from im2win.frontends.torch import bound, conv_op  # noqa: E402
from im2win.registry.ranking import default_tile  # noqa: E402
from im2win.spec.conv2d import Conv2d  # noqa: E402

pytestmark = pytest.mark.usefixtures("way")
CONV = Conv2d.parse("n2-c5x9x7-k6x3x2-s2x1-p1.0.2.1-bias-add-relu")


def kernel(conv: Conv2d, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of an operator that this process knows."""
    op = default(conv)
    name = artefact_name(conv, "direct/tiled", default_tile(conv, "direct/tiled", Machine.host())[1].as_dict(), Machine.host())
    monkeypatch.setitem(bound._OPS, name, op)
    return name


def arguments(conv: Conv2d, name: str, *, norm: bool = True, grad: bool = False, dtype: Any = torch.float32) -> list[Any]:
    """Whole numbers for every tensor; statistics without gradients."""

    def tensor(*shape: int, seed: int) -> torch.Tensor:
        return integers(*shape, seed=seed).to(dtype).requires_grad_(grad)

    k = conv.out_channels
    batch, channels, height, width = conv.batch, conv.in_channels, conv.height, conv.width
    tensors: list[Any] = [tensor(batch, channels, height, width, seed=0), tensor(*conv.filter_shape, seed=1)]
    tensors.append(tensor(k, seed=2) if conv.bias else None)
    tensors.append(tensor(batch, k, *conv.output_size, seed=3) if conv.residual else None)
    statistics = [integers(k, seed=6).to(dtype), torch.full((k,), 4.0, dtype=dtype), torch.tensor(1)]
    tensors += [tensor(k, seed=4), tensor(k, seed=5), *statistics] if norm else [None] * 5
    return [*tensors, 0.0, list(conv.stride), list(conv.padding), list(conv.dilation), conv.groups, conv.activation, name]


def plain(given: list[Any]) -> torch.Tensor:
    """The same by PyTorch's operators."""
    x, weight, bias, residual, scale, shift, mean, variance, _, eps, stride, padding, dilation, groups, activation, _ = given
    top, left, bottom, right = padding
    y = nn.functional.conv2d(nn.functional.pad(x, (left, right, top, bottom)), weight, bias, stride, 0, dilation, groups)
    y = y if mean is None else nn.functional.batch_norm(y, mean, variance, scale, shift, False, 0.0, eps)
    y = y if residual is None else y + residual
    return {"none": lambda y: y, "relu": torch.relu, "relu6": nn.functional.relu6, "silu": nn.functional.silu}[activation](y)


@pytest.mark.parametrize("norm", [True, False], ids=["norm", "plain"])
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_the_operator_runs_what_was_built(layout: str, norm: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    given = arguments(CONV, kernel(CONV.with_(layout=layout), monkeypatch), norm=norm)
    if layout == "NHWC":
        given[0] = given[0].contiguous(memory_format=torch.channels_last)
    monkeypatch.setattr(conv_op, "reference", None)
    y = torch.ops.im2win.conv2d(*given)
    assert torch.equal(y, plain(given)) and y.is_contiguous(memory_format=torch.channels_last) == (layout == "NHWC")


def test_other_inputs_are_pytorchs(monkeypatch: pytest.MonkeyPatch) -> None:
    name = kernel(CONV, monkeypatch)
    changes: list[dict[str, Any]] = [{"batch": 1}, {"residual": False}, {"stride": 1}, {"activation": "relu6"}, {"bias": False}]
    for other in (CONV, *(CONV.with_(**change) for change in changes)):
        given = arguments(other, name if other != CONV else "", norm=False)
        assert torch.equal(torch.ops.im2win.conv2d(*given), plain(given)), other
    for residual in (torch.ones(1), torch.ones(CONV.output_shape, dtype=torch.float64)):
        given = arguments(CONV, name)
        given[3] = residual
        assert torch.equal(torch.ops.im2win.conv2d(*given), plain(given))
    given = arguments(CONV, name, dtype=torch.float64)
    assert torch.equal(torch.ops.im2win.conv2d(*given), plain(given))


def test_an_unknown_artefact_is_noted_once(way: str, caplog: pytest.LogCaptureFixture) -> None:
    given = arguments(CONV, f"{CONV}.direct.{way}")
    for _ in range(2):
        assert torch.equal(torch.ops.im2win.conv2d(*given), plain(given))
    assert len(caplog.records) == 1 and "no artefact n2-c5x9x7" in caplog.text


@pytest.mark.sampled
@pytest.mark.parametrize("grad", [False, True], ids=["inference", "gradients"])
@pytest.mark.parametrize("built", [True, False], ids=["built", "plain"])
def test_pytorchs_own_checks(built: bool, grad: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Schema, registration for autograd, fake kernel, tracing with symbolic shapes."""
    given = arguments(CONV, kernel(CONV, monkeypatch) if built else "", grad=grad)
    if not built:
        given[0] = given[0].detach().contiguous(memory_format=torch.channels_last).requires_grad_(grad)
        given[14] = "silu"
    assert set(torch.library.opcheck(conv_op.conv2d, given).values()) == {"SUCCESS"}


@pytest.mark.sampled
@pytest.mark.parametrize("activation", ["none", "relu", "relu6", "silu"])
@pytest.mark.parametrize("norm", [True, False], ids=["norm", "plain"])
def test_gradients(norm: bool, activation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By differences in float64, which PyTorch computes forward; in float32, whose forward is im2win's, as PyTorch's own."""
    conv = Conv2d.parse(f"n2-c4x5x6-k4x3x2-p1.0.2.1-g2-bias-add{'' if activation == 'none' else f'-{activation}'}")
    given = arguments(conv, "", norm=norm, grad=True, dtype=torch.float64)
    places = [i for i in range(6) if given[i] is not None]

    def function(*tensors: torch.Tensor) -> torch.Tensor:
        return torch.ops.im2win.conv2d(*[tensors[places.index(i)] if i in places else one for i, one in enumerate(given)])

    torch.manual_seed(0)
    tensors = [torch.randn_like(given[i], requires_grad=True) for i in places]
    assert torch.autograd.gradcheck(function, tensors, fast_mode=True)
    given = arguments(conv, kernel(conv, monkeypatch), norm=norm, grad=True)
    tensors = [given[i] for i in places]
    y, expected = torch.ops.im2win.conv2d(*given), plain(given)
    grad = torch.randn_like(expected)
    for mine, wanted in zip(torch.autograd.grad(y, tensors, grad), torch.autograd.grad(expected, tensors, grad), strict=True):
        torch.testing.assert_close(mine, wanted, atol=1e-4, rtol=1e-4)


# --- what stands between a call and its kernel


@pytest.mark.parametrize("context", [torch.inference_mode, torch.no_grad, torch.enable_grad], ids=lambda one: one.__name__)
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_calls_without_gradients_pass_the_dispatcher_once(layout: str, context: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Autograd's key hands them straight on, under no_grad those with parameters that require gradients, too."""
    given = arguments(CONV, kernel(CONV.with_(layout=layout), monkeypatch), grad=context is torch.no_grad)
    if layout == "NHWC":
        given[0] = given[0].contiguous(memory_format=torch.channels_last)
    monkeypatch.setattr(conv_op, "_redispatched", None)
    monkeypatch.setattr(conv_op, "reference", None)
    with context():
        for sign in (1, -1):
            y = torch.ops.im2win.conv2d(*given)
            assert torch.equal(y, plain(given)) and not y.requires_grad and y._base is None, sign
            with torch.no_grad():
                given[1].neg_()


def test_modes_see_calls_without_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    given = arguments(CONV, kernel(CONV, monkeypatch))
    seen: list[Any] = []

    class Mode(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    for context in (torch.inference_mode, torch.no_grad, torch.enable_grad):
        with context(), Mode():
            y = torch.ops.im2win.conv2d(*given)
        assert seen.pop(0) is conv_op.conv2d and torch.equal(y, plain(given))
        seen.clear()
    given[0] = torch._neg_view(-given[0])  # what is to be negated when it is read
    assert given[0].is_neg() and torch.equal(torch.ops.im2win.conv2d(*given), plain(given))


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_threads_share_a_layer(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call writes its own output, whatever other threads are computing with the same filters."""
    given = arguments(CONV, kernel(CONV.with_(layout=layout), monkeypatch))
    order = torch.channels_last if layout == "NHWC" else torch.contiguous_format
    jobs = []
    for seed in range(64):
        x, residual = (integers(*given[place].shape, seed=seed + place).contiguous(memory_format=order) for place in (0, 3))
        jobs.append([x, *given[1:3], residual, *given[4:]])
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda job: torch.ops.im2win.conv2d(*job), jobs))
    assert all(torch.equal(y, plain(job)) for y, job in zip(found, jobs, strict=True))


def test_what_a_kernel_reads_is_laid_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compact and in the problem's order; on a GPU it begins where wide copies may, too."""
    given = arguments(CONV.with_(layout="NHWC"), kernel(CONV.with_(layout="NHWC"), monkeypatch))
    wide = integers(2, 5, 18, 7).contiguous(memory_format=torch.channels_last)
    given[0], given[3] = wide[:, :, ::2], integers(*given[3].shape, seed=9)
    assert torch.equal(torch.ops.im2win.conv2d(*given), plain(given))

    class OnGpu:
        is_cuda = True

        def __init__(self, address: int) -> None:
            self.data_ptr = lambda: address

        def contiguous(self, memory_format: Any) -> OnGpu:
            assert memory_format is torch.channels_last
            return self

        def clone(self) -> OnGpu:
            return OnGpu(4096)

    place: Any = bound.Bound("", default(CONV.with_(layout="NHWC")), 0.0)
    assert [place._laid_out(OnGpu(address)).data_ptr() for address in (32, 36)] == [32, 4096]


def test_operators_of_exported_programs_go_with_their_filters(monkeypatch: pytest.MonkeyPatch) -> None:
    given = arguments(CONV, kernel(CONV, monkeypatch))
    before = len(bound._OWN)
    for _ in range(3):
        torch.ops.im2win.conv2d(*given)
    assert len(bound._OWN) == before + 1
    with torch.no_grad():
        given[1].neg_()
    assert torch.equal(torch.ops.im2win.conv2d(*given), plain(given))
    del given
    gc.collect()
    assert len(bound._OWN) == before
