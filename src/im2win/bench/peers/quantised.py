"""Peers on a CPU for int8 and uint8: oneDNN's quantised convolution as PyTorch calls it, ONNX Runtime's operators, and OpenVINO's graphs.

Inputs and filters have the scale 1 and outputs, too, so that a layer's scales are those of its filters. Libraries round a scaled sum in
their own order; an integer output may differ by one from im2win's definition (`allowed`).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from im2win.bench.peers.subject import PeerError, Tensors, Trial, from_nchw, to_nchw
from im2win.common.exact_sums import exact_sums
from im2win.numerics.tolerance import tolerance
from im2win.spec.conv2d import Conv2d
from im2win.spec.dtypes import ELEMENT_TYPES

Array = NDArray[Any]


def allowed(conv: Conv2d, expected: Array) -> float:
    """The largest relative error of a peer: that of im2win, and for requantised outputs one step of an integer or of a rounding."""
    if not conv.requantised:
        return tolerance(conv)
    element = ELEMENT_TYPES[conv.out_dtype]
    step = 1.01 / (float(np.max(np.abs(expected))) or 1.0) if element.integer else element.epsilon + 1e-5
    return max(tolerance(conv), step)


def torch_trial(conv: Conv2d, tensors: Tensors, threads: int, name: str, order: Any) -> Trial:
    """oneDNN's quantised convolution through PyTorch, which takes uint8.

    Raises:
        PeerError: it has no such convolution.
    """
    import torch

    if conv.dtype != "uint8" or conv.out_dtype not in ("uint8", "float32", "bfloat16"):
        raise PeerError(f"{name}: quantised convolutions take uint8 and give uint8, float32 or bfloat16; got {conv}.")
    if conv.residual or conv.activation not in ("none", "relu") or conv.padding[:2] != conv.padding[2:]:
        raise PeerError(f"{name}: quantised convolutions have no residual, other activations than relu, or unequal padding; got {conv}.")
    torch.set_num_threads(threads)
    assert tensors.scale is not None
    places = [list(conv.stride), list(conv.padding[:2]), list(conv.dilation), conv.groups]
    data = torch.from_numpy(np.ascontiguousarray(to_nchw(tensors.data, conv))).contiguous(memory_format=order)
    scale, zero = torch.from_numpy(tensors.scale), torch.zeros(conv.out_channels, dtype=torch.int32)
    weight = torch.from_numpy(tensors.filter)
    packed = torch.ops.onednn.qconv_prepack(weight, scale, 1.0, conv.zero_point, *places, list(data.shape))
    bias = None if tensors.bias is None else torch.from_numpy(tensors.bias.astype(np.float32) * tensors.scale)
    result: list[Any] = [None]
    arguments = (
        data, 1.0, conv.zero_point, packed, scale, zero, bias, *places, 1.0, conv.out_zero_point, getattr(torch, conv.out_dtype),
        conv.activation, [], "",
    )  # fmt: skip

    @torch.inference_mode()  # type: ignore[untyped-decorator,unused-ignore]
    def call() -> None:
        result[0] = torch.ops.onednn.qconv2d_pointwise(*arguments)

    return Trial(call, lambda: from_nchw(result[0].float().numpy(), conv))


def onnxruntime_trial(conv: Conv2d, tensors: Tensors, threads: int, name: str) -> Trial:
    """ONNX Runtime's QLinearConv, or ConvInteger for int32 sums.

    Raises:
        PeerError: its operators cannot express the layer.
    """
    import onnxruntime as ort

    relu = conv.activation == "relu" and conv.out_dtype == "uint8" and conv.out_zero_point == 0  # saturation at zero is this
    if conv.residual or not (conv.activation == "none" or relu) or conv.out_dtype not in (conv.dtype, "int32"):
        raise PeerError(f"{name}: QLinearConv has no residual and no activation, and gives its input's type; got {conv}.")
    if not conv.requantised and conv.bias:
        raise PeerError(f"{name}: ConvInteger has no bias; got {conv}.")
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    if conv.dtype == "uint8":
        exact_sums(options)
    session = ort.InferenceSession(_model(conv, tensors), options, providers=["CPUExecutionProvider"])
    held = ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(to_nchw(tensors.data, conv)))
    output = ort.OrtValue.ortvalue_from_numpy(np.zeros((conv.batch, conv.out_channels, *conv.output_size), conv.out_dtype))
    binding = session.io_binding()
    binding.bind_ortvalue_input("data", held)
    binding.bind_ortvalue_output("output", output)
    return Trial(partial(session.run_with_iobinding, binding), lambda: from_nchw(output.numpy(), conv))


def _model(conv: Conv2d, tensors: Tensors) -> bytes:
    """The layer as a serialized ONNX graph of one node."""
    from onnx import helper, numpy_helper

    kinds = {name: helper.np_dtype_to_tensor_dtype(np.dtype(name)) for name in (conv.dtype, conv.out_dtype)}
    constants: dict[str, Any] = {"zero": np.array(conv.zero_point, conv.dtype), "filter": tensors.filter}
    if conv.requantised:
        given = ["data", "one", "zero", "filter", "scale", "filter_zero", "one", "out_zero"]
        constants |= {
            "one": np.float32(1), "scale": tensors.scale, "filter_zero": np.zeros(conv.out_channels, np.int8),
            "out_zero": np.array(conv.out_zero_point, conv.out_dtype),
        }  # fmt: skip
        if tensors.bias is not None:
            given.append("bias")
            constants["bias"] = tensors.bias
    else:
        given = ["data", "filter", "zero"]
    node = helper.make_node(
        "QLinearConv" if conv.requantised else "ConvInteger", given, ["output"], strides=conv.stride, pads=conv.padding,
        dilations=conv.dilation, group=conv.groups, kernel_shape=conv.kernel,
    )  # fmt: skip
    data = helper.make_tensor_value_info("data", kinds[conv.dtype], [conv.batch, conv.in_channels, conv.height, conv.width])
    output = helper.make_tensor_value_info("output", kinds[conv.out_dtype], [conv.batch, conv.out_channels, *conv.output_size])
    initial = [numpy_helper.from_array(np.ascontiguousarray(value), name) for name, value in constants.items()]
    graph = helper.make_graph([node], "layer", [data], [output], initial)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    return bytes(model.SerializeToString())


def pairs_model(conv: Conv2d, tensors: Tensors, name: str) -> bytes:
    """The layer as a serialized ONNX graph of a Conv between DequantizeLinear and QuantizeLinear nodes, as quantised models have it.

    Raises:
        PeerError: such a graph cannot express the layer.
    """
    from onnx import helper, numpy_helper

    if conv.residual or conv.activation not in ("none", "relu") or not ELEMENT_TYPES[conv.out_dtype].integer or not conv.requantised:
        raise PeerError(f"{name}: quantised graphs have no residual, other activations than relu, or unscaled outputs; got {conv}.")
    assert tensors.scale is not None
    kinds = {dtype: helper.np_dtype_to_tensor_dtype(np.dtype(dtype)) for dtype in (conv.dtype, conv.out_dtype)}
    constants: dict[str, Any] = {
        "one": np.float32(1), "zero": np.array(conv.zero_point, conv.dtype), "filter": tensors.filter, "scale": tensors.scale,
        "filter_zero": np.zeros(conv.out_channels, np.int8), "out_zero": np.array(conv.out_zero_point, conv.out_dtype),
    }  # fmt: skip
    nodes = [
        helper.make_node("DequantizeLinear", ["data", "one", "zero"], ["x"]),
        helper.make_node("DequantizeLinear", ["filter", "scale", "filter_zero"], ["w"], axis=0),
    ]
    operands = ["x", "w"]
    if tensors.bias is not None:
        constants |= {"bias": tensors.bias, "bias_zero": np.zeros(conv.out_channels, np.int32)}
        nodes.append(helper.make_node("DequantizeLinear", ["bias", "scale", "bias_zero"], ["b"], axis=0))
        operands.append("b")
    nodes.append(
        helper.make_node(
            "Conv", operands, ["sums"], strides=conv.stride, pads=conv.padding, dilations=conv.dilation, group=conv.groups,
            kernel_shape=conv.kernel,
        )
    )  # fmt: skip
    if conv.activation == "relu":
        nodes.append(helper.make_node("Relu", ["sums"], ["positive"]))
    nodes.append(helper.make_node("QuantizeLinear", [nodes[-1].output[0], "one", "out_zero"], ["output"]))
    data = helper.make_tensor_value_info("data", kinds[conv.dtype], [conv.batch, conv.in_channels, conv.height, conv.width])
    output = helper.make_tensor_value_info("output", kinds[conv.out_dtype], [conv.batch, conv.out_channels, *conv.output_size])
    initial = [numpy_helper.from_array(np.ascontiguousarray(value), key) for key, value in constants.items()]
    graph = helper.make_graph(nodes, "layer", [data], [output], initial)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    return bytes(model.SerializeToString())
