"""PyTorch modules on im2win on a GPU: right in every type and layout, on any stream, in CUDA graphs, without a hidden wait."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from gpu_only import this_gpu  # noqa: E402
from networks import Residual, integers, resnet, with_integers  # noqa: E402
from torch import nn  # noqa: E402

import im2win.torch  # noqa: E402
from im2win.frontends.torch import bound, native  # noqa: E402
from im2win.frontends.torch.call_site import CallSite  # noqa: E402
from im2win.spec.captured_layers import read_layers  # noqa: E402
from im2win.spec.conv2d import Conv2d  # noqa: E402

this_gpu()
pytestmark = pytest.mark.usefixtures("way")


def images(count: int = 4) -> Any:
    return integers(count, 5, 24, 26).cuda()


def optimized(module: nn.Module, x: Any, **options: Any) -> Any:
    fast = im2win.torch.optimize(module, x, **options)
    assert all(layer.algorithm and layer.target == "cuda" for layer in fast.im2win_report.layers), fast.im2win_report
    return fast


@pytest.fixture
def exact() -> tuple[Any, Any, Any]:
    """A module of whole numbers, the same on im2win in IEEE float32, and its input: outputs are equal."""
    module, x = with_integers(Residual()).cuda(), images()
    return module, optimized(module, x, accuracy="exact"), x


def right(module: nn.Module, x: Any) -> Any:
    """In float64, where cuDNN rounds nothing away."""
    with torch.inference_mode():
        return copy.deepcopy(module).double()(x.double()).float()


def captured(fast: nn.Module, held: Any) -> tuple[Any, Any]:
    """A CUDA graph of a call, and the output that it writes."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = fast(held)
    return graph, y


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_resnet(dtype: str, layout: str) -> None:
    torch.manual_seed(0)
    order = torch.channels_last if layout == "NHWC" else torch.contiguous_format
    kind = getattr(torch, dtype)
    module = resnet(18).cuda().to(kind, memory_format=order)
    x = torch.randn(4, 3, 64, 64, device="cuda", dtype=kind).contiguous(memory_format=order)
    fast = optimized(module, x)
    assert all(layer.conv and (layer.conv.layout, layer.conv.dtype) == (layout, dtype) for layer in fast.im2win_report.layers)
    with torch.inference_mode():
        y, expected = fast(x), right(module, x)
    assert float((y - expected).abs().max()) <= (1e-4 if dtype == "float32" else 2e-2) * float(expected.abs().max())


def test_whole_numbers_are_exact(exact: Any) -> None:
    module, fast, x = exact
    with torch.inference_mode():
        assert torch.equal(fast(x), right(module, x))
    assert fast(x).requires_grad  # parameters need gradients outside of inference mode: the operator's path
    assert torch.equal(fast(x).detach(), right(module, x))


def test_calls_wait_for_nothing(exact: Any) -> None:
    module, fast, x = exact
    expected = right(module, x)
    with torch.inference_mode():
        fast(x)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            y = fast(x)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(y, expected)


def test_a_side_stream(exact: Any) -> None:
    module, fast, x = exact
    expected = right(module, x)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.inference_mode(), torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        late = fast(x * 1)
    stream.synchronize()
    assert torch.equal(late, expected)


def test_a_cuda_graph_sees_new_inputs_and_new_filters(exact: Any) -> None:
    module, fast, x = exact
    held = torch.zeros_like(x)
    with torch.inference_mode():
        fast(held)
        graph, y = captured(fast, held)
    held.copy_(x)
    graph.replay()
    assert torch.equal(y, right(module, x))
    with torch.no_grad():
        module.first.weight.neg_()
        module.second_norm.running_mean += 1
        fast(x)  # packs them into the memory that the graph reads
    graph.replay()
    assert torch.equal(y, right(module, x))


def test_packing_refuses_to_be_captured(exact: Any) -> None:
    module, fast, x = exact
    with torch.no_grad():
        module.first.weight.neg_()
    torch.cuda.synchronize()
    with pytest.raises(RuntimeError, match="call the module once before capturing"), torch.inference_mode():
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            fast(x)


def test_moves_between_devices(exact: Any) -> None:
    module, fast, x = exact
    expected = right(module, x)
    fast.cpu()
    with torch.inference_mode():
        assert torch.equal(fast(x.cpu()), expected.cpu())
        for index in range(torch.cuda.device_count()):
            fast.to(f"cuda:{index}")
            assert torch.equal(fast(x.to(f"cuda:{index}")).cpu(), expected.cpu())


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled(exact: Any, mode: str) -> None:
    """The latter captures CUDA graphs by itself."""
    module, fast, x = exact
    compiled = torch.compile(fast, mode=mode, fullgraph=True)
    with torch.inference_mode():
        for _ in range(4):
            assert torch.equal(compiled(x).clone(), right(module, x))
        with torch.no_grad():
            module.first.weight.neg_()
        im2win.torch.repack(fast)
        assert torch.equal(compiled(x).clone(), right(module, x))


def test_gradients(exact: Any) -> None:
    module, fast, x = exact
    alone = copy.deepcopy(module)
    fast(x).sum().backward()
    alone(x).sum().backward()
    for mine, other in zip(fast.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-3, atol=1e-3 * float(other.grad.abs().max()))


def test_layers_are_captured(exact: Any, tmp_path: Path) -> None:
    module, fast, x = exact
    for one in (module, fast):
        with torch.inference_mode(), im2win.capture(tmp_path / "layers.jsonl") as captured:
            one(x)
        assert {target for _, target in captured.counts} == {"cuda"}
    assert len(read_layers(tmp_path / "layers.jsonl")[0]) == 6


# --- calls that pass Python by


@pytest.fixture
def by_library(way: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Called where from then on every call must pass Python by."""
    if way != "library":
        pytest.skip("about the compiled library")

    def only() -> None:
        monkeypatch.setattr(CallSite, "general", None)
        monkeypatch.setattr(bound.Bound, "__call__", None)

    return only


def warmed(layout: str = "NCHW", kind: Any = torch.float32) -> tuple[Any, Any, Any]:
    """A module, in float32 of whole numbers, the same on im2win, called before, and its input."""
    order, exact = torch.channels_last if layout == "NHWC" else torch.contiguous_format, kind is torch.float32
    torch.manual_seed(0)
    module = (with_integers(Residual()) if exact else Residual().eval()).cuda().to(kind, memory_format=order)
    x = images().to(kind).contiguous(memory_format=order)
    fast = optimized(module, x, accuracy="exact" if exact else "float32")
    with torch.inference_mode():
        for _ in range(2):
            fast(x)
    return module, fast, x


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("kind", [torch.float32, torch.float16], ids=["float32", "float16"])
def test_calls_pass_python_by(kind: Any, layout: str, by_library: Any) -> None:
    module, fast, x = warmed(layout, kind)
    expected = right(module, -x)
    with torch.inference_mode():
        fast(-x)
        by_library()
        y = fast(-x)
    error = float((y.float() - expected).abs().max())
    assert error <= (0 if kind is torch.float32 else 2e-2 * float(expected.abs().max()))
    order = torch.channels_last if layout == "NHWC" else torch.contiguous_format
    assert y.is_contiguous(memory_format=order) and y.dtype == kind


def test_streams_without_python(by_library: Any) -> None:
    """Behind work that the stream has yet to do, and not on the stream that was current before."""
    module, fast, x = warmed()
    expected = right(module, x)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    by_library()
    with torch.inference_mode(), torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        late = fast(x * 1)
    stream.synchronize()
    assert torch.equal(late, expected)
    with torch.inference_mode():
        assert torch.equal(fast(x), expected)


def test_graphs_without_python(by_library: Any) -> None:
    module, fast, x = warmed()
    held = torch.zeros_like(x)
    by_library()
    with torch.inference_mode():
        graph, y = captured(fast, held)
    held.copy_(x)
    graph.replay()
    assert torch.equal(y, right(module, x))


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("algorithm", ["direct/tiled", "im2win/stored"])
def test_the_operator_without_python(algorithm: str, layout: str, by_library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With and without scratch, which PyTorch's allocator gives; of inputs that begin anywhere."""
    conv = Conv2d.parse("n2-c8x12x10-k16x3x3-p1-bias-relu").with_(layout=layout)
    op = im2win.build(conv, "cuda", algorithm=algorithm, accuracy="exact")
    assert bool(op.manifest.made) == (algorithm == "im2win/stored")
    name = f"{conv}.{algorithm}.test"
    monkeypatch.setitem(bound._OPS, name, op)
    order = torch.channels_last if layout == "NHWC" else torch.contiguous_format
    weight, bias = integers(16, 8, 3, 3, seed=1).cuda(), integers(16, seed=2).cuda()
    storage = torch.empty(2 * 8 * 12 * 10 + 1, device="cuda")
    whole = integers(2, 8, 12, 10).cuda().contiguous(memory_format=order)
    shifted = storage[1:].as_strided(whole.shape, whole.stride()).copy_(whole)
    expected = torch.relu(torch.conv2d(whole.double(), weight.double(), bias.double(), padding=1)).float()

    def call(x: Any) -> Any:
        numbers = 0.0, [1, 1], [1, 1, 1, 1], [1, 1], 1, "relu", name
        return torch.ops.im2win.conv2d(x, weight, bias, None, None, None, None, None, None, *numbers)

    with torch.inference_mode():
        call(whole)
        assert shifted.data_ptr() % 16 and native.alignment(shifted) == 16
        by_library()
        for x in (whole, shifted):
            before = torch.cuda.memory_stats()["allocation.all.allocated"]
            assert torch.equal(call(x), expected)
            made = torch.cuda.memory_stats()["allocation.all.allocated"] - before
            assert made >= 1 + (algorithm == "im2win/stored") + (x is shifted)


def test_the_current_device_stays(way: str, request: pytest.FixtureRequest) -> None:
    """By the compiled library, and through Python."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    module, fast, x = warmed()
    fast.to("cuda:1")
    other = x.to("cuda:1")
    with torch.inference_mode():
        for _ in range(2):
            fast(other)
        torch.cuda.set_device(0)
        if way == "library":
            request.getfixturevalue("by_library")()
        y = fast(other)
    assert torch.cuda.current_device() == 0 and torch.equal(y, right(module, other))


def test_parameters_that_change_are_seen_without_a_call_through_python(by_library: Any) -> None:
    module, fast, x = warmed()
    with torch.no_grad():
        module.first.weight.neg_()
    with torch.inference_mode():
        for _ in range(2):
            assert torch.equal(fast(x), right(module, x))
        by_library()
        assert torch.equal(fast(x), right(module, x))
