"""Real models compiled for a GPU, run there: against ONNX Runtime on the CPU, in every bucket, on a stream and in a CUDA graph."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("onnx")

import light  # noqa: E402
from gpu_only import this_gpu  # noqa: E402
from model_graphs import classifier, integers, peer  # noqa: E402

import im2win  # noqa: E402
from im2win.bench.models import with_random_weights  # noqa: E402
from im2win.runtime.tensors import ArgumentError  # noqa: E402

this_gpu()

ALLOWED = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 0.16}  # of the largest output: hundreds of layers, each rounded to its type


@pytest.mark.timeout(600)
@pytest.mark.parametrize("dtype", list(ALLOWED))
@pytest.mark.parametrize("name", light.NAMES)
def test_real_models(name: str, dtype: str, tmp_path: Path) -> None:
    random = with_random_weights(light.path(name))
    im2win.compile_model(random, tmp_path / "model.so", "cuda", dtype=dtype)
    model = im2win.load_model(tmp_path / "model.so")
    x = np.random.default_rng(1).normal(size=model.inputs[0].shape).astype(np.float32)
    given = torch.from_numpy(x).cuda()
    feeds = {model.inputs[0].name: given}
    first, second, expected = model.run(feeds), model.run(feeds), peer(random, {model.inputs[0].name: x})
    for ours, again, theirs in zip(first.values(), second.values(), expected, strict=True):
        assert np.abs(ours.cpu().numpy() - theirs).max() <= ALLOWED[dtype] * np.abs(theirs).max()
        assert torch.equal(ours, again)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A model of whole numbers for one image and four, and ONNX Runtime's answer."""
    path, source = tmp_path_factory.mktemp("small") / "model.so", classifier("n")
    im2win.compile_model(source, path, "cuda", batches=[1, 4], accuracy="exact")
    return im2win.load_model(path), lambda x: torch.from_numpy(peer(source, {"x": x})[0]).cuda()


@pytest.mark.parametrize("images", [1, 2, 4, 7])
def test_batches(small: Any, images: int) -> None:
    model, expected = small
    x = integers(images, 3, 8, 8)
    assert torch.equal(model(torch.from_numpy(x).cuda()), expected(x))


def test_another_stream_and_a_graph(small: Any) -> None:
    model, expected = small
    x = integers(4, 3, 8, 8)
    given, want = torch.from_numpy(x).cuda(), expected(x)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        assert torch.equal(model(given), want)
    torch.cuda.current_stream().wait_stream(side)
    graph, zeros = torch.cuda.CUDAGraph(), torch.zeros_like(given)
    with torch.cuda.graph(graph):
        captured = model(zeros)
    zeros.copy_(given)
    graph.replay()
    assert torch.equal(captured, want)


def test_what_is_no_cuda_tensor_is_refused(small: Any) -> None:
    model, _ = small
    with pytest.raises(ArgumentError, match="must be a CUDA tensor of PyTorch"):
        model(torch.zeros(1, 3, 8, 8))
    with pytest.raises(ArgumentError, match="dtype float16; it must be float32"):
        model(torch.zeros(1, 3, 8, 8, dtype=torch.float16, device="cuda"))
