"""Whole models for a GPU: their plan, kernel by kernel, on the emulator; and libraries, which need no GPU to be made."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from model_graphs import classifier, dense, graph, integers, node, norm, peer

from im2win import cuda_codegen
from im2win.emulator import Emulation
from im2win.emulator.generate import generate
from im2win.gpu import H200
from im2win.models.assembly import Assembly
from im2win.models.compiler import write_model
from im2win.models.cuda import CudaKernels
from im2win.models.driver import Step
from im2win.models.source import at_batch, read


def emulate(kernels: CudaKernels, step: Step, tensors: list[np.ndarray]) -> None:
    """Runs one step of a model on the emulator."""
    own = step.kernel in kernels.convolutions
    function = kernels.convolutions[step.kernel] if own else kernels.rest[step.kernel]
    module = cuda_codegen.kernel_module({step.kernel: function})
    made = cuda_codegen.generate_source(module, H200) if own else generate(module, cuda_codegen.cuda_target(H200))
    named = {parameter.name: tensor.reshape(-1) for parameter, tensor in zip(function.params, tensors, strict=True)}
    named |= {name: np.full(shape, 0, dtype) for name, (shape, dtype) in made.workspace.items()}
    source = re.sub(r"(__shfl\w*_sync\([^;]*), 32\)", r"\1)", made.source)  # the width of a warp, which the emulator has anyway
    source = source.replace("__activemask()", "0xffffffffu")
    emulation = Emulation(source, made.launches)
    emulation({name: named[name.removesuffix("_ptr")] if name not in named else named[name] for name in emulation.names}, seed=1)


def run(model: Any, feeds: dict[str, np.ndarray]) -> tuple[list[np.ndarray], Assembly]:
    """The outputs of a model as its driver would compute them."""
    label, whole = read(model)
    source = at_batch(whole, label, None)
    kernels = CudaKernels(H200)
    assembly = Assembly(label, None, "exact", kernels)
    assembly.add(source, 1)
    weights = np.concatenate([np.pad(one.reshape(-1).view(np.uint8), (0, -one.nbytes % 64)) for one in assembly.weights.arrays])
    workspace = np.full(assembly.buckets[0].workspace, 0xFF, np.uint8)  # NaN
    results = [np.full(one.shape, np.nan, one.dtype) for one in source.outputs]
    bases = [weights, workspace, *(feeds[one.name].reshape(-1).view(np.uint8) for one in source.inputs)]
    bases += [one.reshape(-1).view(np.uint8) for one in results]
    [(_, steps)] = assembly.runs.values()
    for step in steps:
        tensors = []
        for one in step.arguments:
            assert one.place.offset % 64 == 0, "kernels load vectors"
            size = int(np.prod(one.shape)) * np.dtype(one.dtype).itemsize
            tensors.append(bases[one.place.base][one.place.offset : one.place.offset + size].view(one.dtype).reshape(one.shape))
        emulate(kernels, step, tensors)
    return results, assembly


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


def test_a_library_is_made_without_a_gpu(tmp_path: Path) -> None:
    label, model = read(classifier("n"))
    manifest = write_model(label, model, H200, tmp_path / "model.so", [1, 2])
    assert (manifest.target, manifest.isa, [bucket.batch for bucket in manifest.buckets]) == ("cuda", "sm_90a", [1, 2])
    library = (tmp_path / "model.so").read_bytes()
    assert all(word in library for word in (b"__tvm_ffi_run_1", b"__tvm_ffi_run_2", b"conv_0"))
