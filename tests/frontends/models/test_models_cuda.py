"""Whole models for a GPU: their plan, kernel by kernel, on the emulator; and libraries, which need no GPU to be made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from model_emulation import run
from model_graphs import classifier, dense, graph, integers, node, norm, peer

from im2win.device.gpu import H200
from im2win.frontends.models.assembly import Assembly
from im2win.frontends.models.compiler import write_model
from im2win.frontends.models.source import read


def check(model: Any, exact: bool = True) -> Assembly:
    feeds = {value.name: integers(*(dim.dim_value for dim in value.type.tensor_type.shape.dim)) for value in model.graph.input}
    found, assembly = run(model, feeds)
    for ours, theirs in zip(found, peer(model, feeds), strict=True):
        if exact:
            assert (ours == theirs).all(), np.abs(ours - theirs).max()
        else:
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)
    return assembly


def test_residual_block_and_classifier() -> None:
    nodes = [
        node("Conv", "x w0 b0", "a", pads=[1] * 4),
        node("Relu", "a", "b"),
        node("Conv", "b w1", "c", pads=[1] * 4),
        node("BatchNormalization", "c ng nb nm nv", "d", epsilon=0.0),
        node("Add", "d x", "e"),
        node("Relu", "e", "f"),
        node("MaxPool", "f", "g", kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4),
        node("Flatten", "g", "h"),
        node("Gemm", "h w2 b2", "y"),
        node("Softmax", "y", "z"),
    ]
    constants = {"w0": integers(8, 8, 3, 3, most=1), "b0": integers(8), "w1": integers(8, 8, 3, 3, most=1), **norm(8, "n")}
    constants |= {"w2": integers(8 * 4 * 4, 5, most=1), "b2": integers(5)}
    assembly = check(graph(nodes, {"x": (1, 8, 7, 7)}, constants, "y z"), exact=False)
    assert [layer.conv.partition("-k")[2] for layer in assembly.layers.values()] == [
        "8x3x3-p1-bias-relu",
        "8x3x3-p1-bias-add-relu",
        "5x1x1-NHWC-bias",
    ]


@pytest.mark.parametrize("batch", [1, 2])
def test_concatenations(batch: int) -> None:
    check(dense(batch))


def test_phases_slices_and_sizes() -> None:
    """A transposed convolution, DepthToSpace, a slice that shares memory, and one that would not be aligned."""
    nodes = [
        node("ConvTranspose", "x w b", "a", strides=[2, 2], pads=[1] * 4),
        node("Relu", "a", "c"),
        node("DepthToSpace", "c", "d", blocksize=2),
        node("Split", "d n", "e f", axis=1),
        node("Add", "e f", "y"),
        node("Slice", "d one two axis", "z"),
    ]
    constants = {"w": integers(4, 8, 4, 4, most=1), "b": integers(8), "n": np.array([1, 1]), "one": np.array([1]), "two": np.array([2])}
    assembly = check(graph(nodes, {"x": (1, 4, 3, 5)}, {**constants, "axis": np.array([1])}, "y z"))
    assert [layer.conv for layer in assembly.layers.values()] == ["n1-c4x3x5-k32x2x2-p1-bias-relu"]


def test_pooling_and_normalisation() -> None:
    nodes = [
        node("AveragePool", "x", "a", kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4),
        node("MaxPool", "x", "b", kernel_shape=[3, 2], strides=[2, 1], pads=[1, 0, 0, 1]),
        node("LRN", "x", "c", size=3, alpha=0.1, beta=0.75, bias=1.0),
        node("GlobalAveragePool", "x", "d"),
    ]
    check(graph(nodes, {"x": (1, 5, 7, 7)}, {}, "a b c d"), exact=False)


def test_a_library_is_made_without_a_gpu(tmp_path: Path) -> None:
    label, model = read(classifier("n"))
    manifest = write_model(label, model, H200, tmp_path / "model.so", [1, 2])
    assert (manifest.target, manifest.isa, [bucket.batch for bucket in manifest.buckets]) == ("cuda", "sm_90a", [1, 2])
    library = (tmp_path / "model.so").read_bytes()
    assert all(word in library for word in (b"__tvm_ffi_run_1", b"__tvm_ffi_run_2", b"conv_0"))
