"""Float16 and bfloat16 models for a GPU: channels last between convolutions, on the emulator, against ONNX Runtime's float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")

import light  # noqa: E402
from model_emulation import run  # noqa: E402
from model_graphs import classifier, dense, graph, helper, integers, node, norm, numpy_helper, peer, typed  # noqa: E402

from im2win.device.gpu import H200  # noqa: E402
from im2win.frontends.models.assembly import Assembly  # noqa: E402
from im2win.frontends.models.compiler import write_model  # noqa: E402
from im2win.frontends.models.cuda import CudaKernels  # noqa: E402
from im2win.frontends.models.precision import NARROW, chosen, widened  # noqa: E402
from im2win.frontends.models.source import at_batch, read  # noqa: E402
from im2win.frontends.onnx.layers import ModelError, layers_of  # noqa: E402

ROUNDED = {"float16": 2.0**-11, "bfloat16": 2.0**-8}  # of the largest number: what one rounding may be off
LARGEST = {"float16": 2048, "bfloat16": 256}  # up to which all integers are held
in_both = pytest.mark.parametrize("dtype", NARROW)


def check(model: Any, roundings: int = 0, dtype: str | None = "float16", **feeds: np.ndarray) -> Assembly:
    """Compares outputs with ONNX Runtime's in float32; without roundings they are integers that the type holds, and equal."""
    wide, _ = widened(model)
    precision = chosen(model, dtype)
    for value in wide.graph.input:
        if value.name not in feeds:
            feeds[value.name] = integers(*(dim.dim_value for dim in value.type.tensor_type.shape.dim), most=2)
    own = {one.name: one.type.tensor_type.elem_type for one in model.graph.input}
    given = {name: array.astype(helper.tensor_dtype_to_np_dtype(own[name])) for name, array in feeds.items()}
    found, assembly = run(model, given, dtype)
    for ours, theirs, port in zip(found, peer(wide, feeds), model.graph.output, strict=True):
        assert ours.dtype == helper.tensor_dtype_to_np_dtype(port.type.tensor_type.elem_type) and ours.shape == theirs.shape
        assert np.abs(theirs).max() <= LARGEST[precision] or roundings
        assert np.abs(ours - theirs).max() <= roundings * ROUNDED[precision] * np.abs(theirs).max(), port.name
    return assembly


def kernels(assembly: Assembly) -> list[str]:
    """What runs, in order: the batch's and the numbers' parts of names left out."""
    [(_, steps)] = assembly.runs.values()
    return ["_".join(word for word in step.kernel.split("_") if not word.isdigit()).removeprefix("b1_") for step in steps]


def assembled(label: str, model: Any) -> Assembly:
    """What a model becomes, not run."""
    assembly = Assembly(label, None, "float32", CudaKernels(H200), "float16")
    assembly.add(at_batch(widened(model)[0], label, None), 1)
    return assembly


def residual_block() -> Any:
    nodes = [
        node("Conv", "x w0 b0", "a", pads=[1] * 4),
        node("Relu", "a", "b"),
        node("Conv", "b w1", "c", pads=[1] * 4),
        node("BatchNormalization", "c ng nb nm nv", "d", epsilon=0.0),
        node("Add", "d a0", "e"),
        node("Relu", "e", "f"),
        node("Conv", "x w2", "a0"),
        node("MaxPool", "f", "g", kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4),
        node("GlobalAveragePool", "g", "h"),
        node("Flatten", "h", "i"),
        node("Gemm", "i w3 b3", "y"),
    ]
    nodes.insert(2, nodes.pop(6))
    constants = {"w0": integers(8, 8, 3, 3, most=1), "b0": integers(8), "w1": integers(8, 8, 3, 3, most=1), **norm(8, "n")}
    constants |= {"w2": integers(8, 8, 1, 1, most=1), "w3": integers(8, 5, most=1), "b3": integers(5)}
    return graph(nodes, {"x": (1, 8, 7, 7)}, constants)


@in_both
def test_nothing_is_converted_between_convolutions(dtype: str) -> None:
    """The input is, once; the mean over whole images and what is behind it have one order only."""
    assembly = check(residual_block(), roundings=4, dtype=dtype)
    assert kernels(assembly)[:5] == ["convert", "conv", "conv", "conv", "pool"]
    assert kernels(assembly).count("convert") == 2  # the output's, to float32
    assert [layer.conv.partition("-k")[2] for layer in assembly.layers.values()] == [
        f"8x3x3-p1-{dtype}-NHWC-bias-relu",
        f"8x1x1-{dtype}-NHWC",
        f"8x3x3-p1-{dtype}-NHWC-bias-add-relu",
        f"5x1x1-{dtype}-NHWC-bias",
    ]


@pytest.mark.slow
def test_concatenations() -> None:
    """Of channels in channels-last memory, of rows in ONNX's order, of an input and of constants."""
    check(dense(2), roundings=3)


@in_both
def test_what_tvm_computes_reads_and_writes_channels_last(dtype: str) -> None:
    """Elementwise operators between convolutions convert nothing beside them; a gate on each channel keeps its reduction."""
    nodes = [
        node("Conv", "x w0", "a", pads=[1] * 4),
        node("Neg", "a", "b"),
        node("Abs", "b", "c"),
        node("Conv", "c w1", "d"),
        node("ReduceMax", "d", "e", axes=[2, 3]),
        node("Conv", "e w2", "f"),
        node("Mul", "d f", "g"),
        node("Conv", "g w3", "y"),
        node("Add", "a d", "z"),
    ]
    constants = {"w0": integers(6, 3, 3, 3, most=1), "w1": integers(6, 6, 1, 1, most=1), "w2": integers(6, 6, 1, 1, most=1)}
    constants["w3"] = np.eye(6, dtype=np.float32).reshape(6, 6, 1, 1)
    assembly = check(graph(nodes, {"x": (1, 3, 5, 6)}, constants, "y z"), roundings=3, dtype=dtype)
    assert kernels(assembly).count("convert") == 2  # x, and y; z is written as it is wanted


def test_views_round_convolutions() -> None:
    """As a channel shuffle: one kernel of TVM's between the convolutions."""
    nodes = [
        node("Conv", "x w0", "a"),
        node("Reshape", "a split", "b"),
        node("Transpose", "b", "c", perm=[0, 2, 1, 3, 4]),
        node("Reshape", "c whole", "d"),
        node("Conv", "d w1", "e", group=2),
        node("Reshape", "e row", "y"),
    ]
    constants = {"w0": integers(6, 4, 1, 1, most=1), "w1": integers(4, 3, 1, 1, most=1), "split": np.array([1, 2, 3, 3, 5])}
    constants |= {"whole": np.array([1, 6, 3, 5]), "row": np.array([1, -1])}
    found = kernels(check(graph(nodes, {"x": (1, 4, 3, 5)}, constants)))
    assert [found[0], found[1], found[3]] == ["convert", "conv", "conv"] and len(found) == 5 and found.count("convert") == 1


@in_both
def test_means_and_responses_sum_in_float32(dtype: str) -> None:
    nodes = [
        node("AveragePool", "x", "a", kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4),
        node("LRN", "a", "b", size=3, alpha=0.5),
        node("AveragePool", "x", "c", kernel_shape=[2, 2], pads=[1, 0, 1, 1], count_include_pad=1),
        node("GlobalAveragePool", "big", "m"),
    ]
    model = graph(nodes, {"x": (1, 6, 7, 8), "big": (1, 2, 64, 64)}, outputs="b c m")
    big = 40 * np.ones((1, 2, 64, 64), np.float32)  # whose sum float16 does not hold
    check(model, roundings=3, dtype=dtype, big=big)
    row = integers(1, 5, 3)  # ONNX Runtime's responses are of images only
    [found], _ = run(graph([node("LRN", "row", "r", size=3)], {"row": row.shape}, outputs="r"), {"row": row}, dtype)
    squares = np.pad(row.astype(np.float64) ** 2, ((0, 0), (1, 1), (0, 0)))
    expected = row / (1 + 1e-4 / 3 * (squares[:, :-2] + squares[:, 1:-1] + squares[:, 2:])) ** 0.75
    np.testing.assert_allclose(found, expected, rtol=ROUNDED[dtype])


def test_outputs_of_every_kind() -> None:
    """An input, a constant, what convolutions read, too, and views; integers stay what they are."""
    nodes = [
        node("Identity", "x", "same"),
        node("Identity", "k", "fixed"),
        node("Conv", "x w", "a"),
        node("Relu", "a", "r"),
        node("Conv", "r w", "b"),
        node("Flatten", "b", "flat"),
        node("ArgMax", "b", "place", axis=1, keepdims=0),
        node("Concat", "r x", "both", axis=1),
        node("Shape", "x", "unused"),
    ]
    constants = {"w": integers(3, 3, 1, 1, most=1), "k": integers(2, 2)}
    model = graph(nodes[:-1], {"x": (1, 3, 4, 4)}, constants, "same fixed a r flat both")
    model.graph.output.append(helper.make_tensor_value_info("place", onnx.TensorProto.INT64, None))
    check(onnx.shape_inference.infer_shapes(model))


@in_both
def test_a_narrow_model_keeps_its_types(dtype: str) -> None:
    """Without saying so; with a cast that nothing needs, and sums in float32."""
    code = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    nodes = [node("Conv", "x w", "a"), node("Cast", "a", "b", to=1), node("Relu", "b", "c"), node("Cast", "c", "d", to=code)]
    nodes += [node("GlobalMaxPool", "d", "e"), node("Flatten", "e", "f"), node("Gemm", "f g", "y")]
    model = graph(nodes, {"x": (1, 4, 5, 5)}, {"w": integers(4, 4, 1, 1, most=1), "g": integers(4, 3, most=1)})
    for tensor in model.graph.initializer:
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(dtype), tensor.name))
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.elem_type = code
    del model.graph.value_info[:]
    assembly = check(model, dtype=None)
    found = [layer.conv for layer in assembly.layers.values()]
    assert found == [f"n1-c4x5x5-k4x1x1-{dtype}-NHWC-relu", f"n1-c4x1x1-k3x1x1-{dtype}-NHWC"]
    tuned = layers_of(model, epilogues=True, products=True)  # `im2win tune` reads no casts away, and fuses nothing behind them
    assert [str(layer.conv) for layer in tuned] == [f"n1-c4x5x5-k4x1x1-{dtype}", f"n1-c4x1x1-k3x1x1-{dtype}-NHWC"]
    filters = next(one for one in model.graph.initializer if one.name == "w")
    model.graph.initializer.remove(filters)
    model.graph.node.insert(0, helper.make_node("Constant", [], ["w"], value=filters))
    with pytest.raises(ValueError, match=rf"`dtype` \(='float32'\) must be {dtype} or left out"):
        chosen(model, "float32")
    assert chosen(model, None) == dtype


@pytest.mark.slow
def test_tuned_are_the_layers_that_are_looked_up() -> None:
    """As `im2win tune MODEL --target cuda --dtype float16 --layout NHWC` reads them."""
    model = residual_block()
    tuned = {str(layer.conv.with_(dtype="float16", layout="NHWC")) for layer in layers_of(model, epilogues=True, products=True)}
    assert tuned == {layer.conv for layer in assembled("", model).layers.values()}


@pytest.mark.slow
def test_of_a_real_model_only_the_image_is_converted() -> None:
    assembly = assembled(*read(light.path("shufflenet")))
    assert kernels(assembly).count("convert") == 1 and kernels(assembly).count("conv") == len(assembly.layers) == 50


def test_bad_arguments() -> None:
    _, model = read(classifier("n"))
    with pytest.raises(ValueError, match=r"`dtype` \(='int8'\) must be float32, float16, bfloat16, or left out"):
        chosen(model, "int8")
    with pytest.raises(ValueError, match=r"`dtype` \(='bfloat16'\) must be float16 or left out: the model's weights are float16"):
        chosen(typed(model, "float16"), "bfloat16")
    big = graph([node("Conv", "x w", "y")], {"x": (1, 1, 2, 2)}, {"w": np.full((1, 1, 1, 1), 1e5, np.float32)})
    with pytest.raises(ModelError, match=r"`dtype` \(='float16'\) must hold every weight; those of 'Conv_y' reach 100000, beyond 65504"):
        run(big, {"x": integers(1, 1, 2, 2)}, "float16")
    run(big, {"x": integers(1, 1, 2, 2)}, "bfloat16")


def test_a_library_is_made_without_a_gpu(tmp_path: Path) -> None:
    label, model = read(residual_block())
    manifest = write_model(label, model, H200, tmp_path / "model.so", [1], dtype="float16")
    assert (manifest.target, manifest.isa, [port.dtype for port in (*manifest.inputs, *manifest.outputs)]) == (
        "cuda",
        "sm_90a",
        ["float32"] * 2,
    )
    assert all("float16-NHWC" in layer.conv for layer in manifest.layers) and b"__tvm_ffi_run_1" in (tmp_path / "model.so").read_bytes()
