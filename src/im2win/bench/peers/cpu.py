"""The peers on a CPU: each runs one convolution in the fastest way that its public interface offers, on the given threads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from im2win.bench.peers import quantised
from im2win.bench.peers.subject import PeerError, Subject, Tensors, Trial, from_nchw, to_nchw
from im2win.device.cpu import Machine
from im2win.frontends.onnx.activations import onnx_nodes
from im2win.runtime.tensors import aligned, torch_tensor
from im2win.spec.activations import torch_function
from im2win.spec.conv2d import Conv2d
from im2win.spec.dtypes import ELEMENT_TYPES

Array = NDArray[Any]


def _need(conv: Conv2d, peer: str, *dtypes: str) -> None:
    if conv.dtype not in dtypes:
        raise PeerError(f"{peer}: `dtype` (={conv.dtype!r}) must be {' or '.join(dtypes)} on the CPU.")


@dataclass(frozen=True)
class Torch:
    """PyTorch eager (oneDNN) under `inference_mode`, with the activation in place. Its convolution takes no output tensor."""

    channels_last: bool = False

    @property
    def name(self) -> str:
        return "torch_nhwc" if self.channels_last else "torch_nchw"

    def prepare(self, conv: Conv2d, tensors: Tensors, threads: int) -> Trial:
        try:
            import torch
        except ImportError as error:
            raise PeerError(f"{self.name}: PyTorch is not installed; pip install 'im2win[bench]'.") from error
        torch.set_num_threads(threads)
        order = torch.channels_last if self.channels_last else torch.contiguous_format
        if ELEMENT_TYPES[conv.dtype].integer:
            return quantised.torch_trial(conv, tensors, threads, self.name, order)

        def tensor(array: Array | None) -> Any:
            if array is None:
                return None
            return torch_tensor(np.ascontiguousarray(array)).contiguous(memory_format=order)

        data, weight = tensor(to_nchw(tensors.data, conv)), tensor(tensors.filter)
        bias = None if tensors.bias is None else torch_tensor(tensors.bias)
        residual = None if tensors.residual is None else tensor(to_nchw(tensors.residual, conv))
        top, left, bottom, right = conv.padding
        symmetric = (top, left) == (bottom, right)
        functional = torch.nn.functional
        activate = torch_function(conv.activation, inplace=True)
        result: list[Any] = [None]

        @torch.inference_mode()  # type: ignore[untyped-decorator,unused-ignore]
        def call() -> None:
            x = data if symmetric else functional.pad(data, (left, right, top, bottom))
            y = torch.conv2d(x, weight, bias, conv.stride, (top, left) if symmetric else (0, 0), conv.dilation, conv.groups)
            result[0] = activate(y if residual is None else y.add_(residual))

        return Trial(call, lambda: from_nchw(result[0].float().numpy(), conv))


@dataclass(frozen=True)
class OnnxRuntime:
    """ONNX Runtime, CPU provider, all graph optimizations, input and output bound ahead of time (I/O binding), filters as initializers.

    Its threads spin between calls, which is the default. That is up to 12 % faster than without, measured, and does not slow others down
    (see harness.py).
    """

    name: str = "onnxruntime"

    def prepare(self, conv: Conv2d, tensors: Tensors, threads: int) -> Trial:
        _need(conv, self.name, "float32", "int8", "uint8")
        try:
            import onnx  # noqa: F401
            import onnxruntime as ort
        except ImportError as error:
            raise PeerError(f"{self.name}: onnx and onnxruntime are needed; pip install 'im2win[bench]'.") from error
        if ELEMENT_TYPES[conv.dtype].integer:
            return quantised.onnxruntime_trial(conv, tensors, threads, self.name)
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        session = ort.InferenceSession(_onnx_model(conv, tensors), options, providers=["CPUExecutionProvider"])
        inputs = {"data": tensors.data} if tensors.residual is None else {"data": tensors.data, "residual": tensors.residual}
        held = {name: ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(to_nchw(a, conv))) for name, a in inputs.items()}
        shape = (conv.batch, conv.out_channels, *conv.output_size)
        output = ort.OrtValue.ortvalue_from_numpy(np.full(shape, np.nan, "float32"))
        binding = session.io_binding()
        for name, value in held.items():
            binding.bind_ortvalue_input(name, value)
        binding.bind_ortvalue_output("output", output)
        return Trial(partial(session.run_with_iobinding, binding), lambda: from_nchw(output.numpy(), conv))


_NARROW_OPSET = 22  # of a Conv in bfloat16


@dataclass(frozen=True)
class OpenVino:
    """OpenVINO on the layer as an ONNX graph, tuned for latency, in the layer's type, with input and output bound ahead of time.

    Integers are between DequantizeLinear and QuantizeLinear (`quantised.pairs_model`). Without the hint float32 would be computed in
    bfloat16 where the CPU has instructions for that.
    """

    name: str = "openvino"

    def prepare(self, conv: Conv2d, tensors: Tensors, threads: int) -> Trial:
        try:
            import onnx  # noqa: F401
            import openvino
        except ImportError as error:
            raise PeerError(f"{self.name}: onnx and openvino are needed; pip install 'im2win[bench]'.") from error
        integer = ELEMENT_TYPES[conv.dtype].integer
        graph = quantised.pairs_model(conv, tensors, self.name) if integer else _onnx_model(conv, tensors)
        core = openvino.Core()
        hints = {
            "INFERENCE_NUM_THREADS": threads, "NUM_STREAMS": 1, "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_PRECISION_HINT": {"bfloat16": "bf16", "float16": "f16"}.get(conv.dtype, "f32"),
        }  # fmt: skip
        request = core.compile_model(core.read_model(graph), "CPU", hints).create_infer_request()

        def shared(array: Array) -> Any:
            if array.dtype.name == "bfloat16":  # numpy's type is not OpenVINO's
                return openvino.Tensor(array.view(np.uint16), openvino.Shape(list(array.shape)), openvino.Type.bf16)
            return openvino.Tensor(array, shared_memory=True)

        arrays = [tensors.data] if tensors.residual is None else [tensors.data, tensors.residual]
        held = [aligned(np.ascontiguousarray(to_nchw(array, conv))) for array in arrays]
        for place, array in enumerate(held):
            request.set_input_tensor(place, shared(array))
        shape = (conv.batch, conv.out_channels, *conv.output_size)
        output = aligned(np.full(shape, ELEMENT_TYPES[conv.out_dtype].poisons[0], conv.out_dtype))
        request.set_output_tensor(shared(output))

        def call(held: object = held) -> None:  # the request does not keep its inputs alive; its `infer` makes a dictionary of the outputs
            request.start_async()
            request.wait()

        return Trial(call, lambda: from_nchw(output, conv))


def _onnx_model(conv: Conv2d, tensors: Tensors) -> bytes:
    """The layer with its epilogue as a serialized ONNX graph (Conv, Add, and the nodes of the table of activations), in its type."""
    from onnx import helper, numpy_helper

    kind = helper.np_dtype_to_tensor_dtype(np.dtype(conv.dtype))
    shape = [conv.batch, conv.in_channels, conv.height, conv.width]
    out_shape = [conv.batch, conv.out_channels, *conv.output_size]
    constants = [numpy_helper.from_array(np.ascontiguousarray(tensors.filter), "filter")]
    arguments = ["data", "filter"]
    if tensors.bias is not None:
        constants.append(numpy_helper.from_array(tensors.bias, "bias"))
        arguments.append("bias")
    steps: list[tuple[str, list[str], dict[str, Any]]] = []
    attributes = {
        "strides": conv.stride,
        "pads": conv.padding,
        "dilations": conv.dilation,
        "group": conv.groups,
        "kernel_shape": conv.kernel,
    }
    steps.append(("Conv", arguments, attributes))
    inputs = [helper.make_tensor_value_info("data", kind, shape)]
    if conv.residual:
        steps.append(("Add", ["step0", "residual"], {}))
        inputs.append(helper.make_tensor_value_info("residual", kind, out_shape))
    last = f"step{len(steps) - 1}"
    activated, numbers, since = onnx_nodes(conv.activation, last, len(steps))
    steps += activated
    constants += [numpy_helper.from_array(np.array(value, conv.dtype), name) for name, value in numbers.items()]
    nodes = [
        helper.make_node(kind, names, ["output" if i == len(steps) - 1 else f"step{i}"], **fields)
        for i, (kind, names, fields) in enumerate(steps)
    ]
    result = helper.make_tensor_value_info("output", kind, out_shape)
    graph = helper.make_graph(nodes, "layer", inputs, [result], constants)
    least = 17 if conv.dtype == "float32" else _NARROW_OPSET
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", max(least, since))], ir_version=10)
    return bytes(model.SerializeToString())


@dataclass(frozen=True)
class TvmDefault:
    """TVM's default MetaSchedule space on a plain te convolution, searched with `trials` trials.

    Args:
        trials: candidates measured for a layer; a fair comparison uses the number that im2win had.
        cache: folder that keeps MetaSchedule's database and the best candidate of each layer, so that a second run does not search; None: a
            temporary one.
    """

    trials: int = 64
    cache: Path | None = None
    name: str = "tvm"

    def prepare(self, conv: Conv2d, tensors: Tensors, threads: int) -> Trial:
        if conv.bias or conv.residual or conv.activation != "none" or conv.layout != "NCHW":
            raise PeerError(f"{self.name}: the plain convolution has no epilogue and is NCHW; got {conv}.")
        import tvm

        from im2win.bench.peers.tvm_default import compiled

        function = compiled(conv, self.trials, Machine.host(threads), self.cache)
        cpu = tvm.cpu()
        output = tvm.runtime.tensor(np.full(conv.output_shape, np.nan, conv.dtype), cpu)
        arguments = [tvm.runtime.tensor(tensors.data, cpu), tvm.runtime.tensor(tensors.filter, cpu), output]
        return Trial(partial(function, *arguments), output.numpy)


PEERS: dict[str, tuple[Callable[[], Subject], ...]] = {
    "torch": (Torch, partial(Torch, channels_last=True)),
    "torch_nchw": (Torch,),
    "torch_nhwc": (partial(Torch, channels_last=True),),
    "onnxruntime": (OnnxRuntime,),
    "openvino": (OpenVino,),
    "tvm": (TvmDefault,),
}


def peers(names: tuple[str, ...] | list[str], tvm_trials: int = 64, tvm_cache: Path | None = None) -> list[Subject]:
    """The subjects with these names; `torch` stands for both of its layouts.

    Raises:
        ValueError: a name that is not in `PEERS`.
    """
    found: dict[str, Subject] = {}
    for name in names:
        if name not in PEERS:
            raise ValueError(f"`against` (={name!r}) must be one of {', '.join(PEERS)}.")
        for make in PEERS[name]:
            subject = TvmDefault(tvm_trials, tvm_cache) if name == "tvm" else make()
            found[subject.name] = subject
    return list(found.values())
