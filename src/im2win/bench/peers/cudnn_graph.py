"""cuDNN's graph interface (package nvidia-cudnn-frontend, `import cudnn`): a layer as graphs of operations, and the plans that run them.

A graph is the convolution with the layer's epilogue behind it. cuDNN's heuristics, asked in all their modes, list plans for it: an engine
and values of its knobs each, far more than the eight algorithms that `im2win.bench.peers.cudnn` calls by name.

Sums are float32, and int32 for int8, as ours. Everything between the convolution and the output is float32. The scale of a requantised
layer, or of one in float8_e4m3fn, is a product with one number for each channel. So that the strongest plan is among them, a layer may have
several graphs:

- the whole layer: engines that cuDNN compiles at run time, one by one, for the fused operations;
- the same with a copy at the end, for int8 sums without an epilogue: without it there are only engines without tensor cores;
- the convolution alone, for a layer with an epilogue in a floating-point type: precompiled engines, and PyTorch's operators behind them, in
  place. PyTorch has no such operators for float8_e4m3fn outputs.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from im2win.bench.peers.subject import PeerError
from im2win.common.messages import brief
from im2win.runtime.tensors import kernel_view
from im2win.spec.accuracy import Accuracy, allows
from im2win.spec.activations import found, torch_function
from im2win.spec.conv2d import Conv2d
from im2win.spec.dtypes import ELEMENT_TYPES

MODES = ("A", "B", "FALLBACK")
"""cudnn.heur_mode: the model, another model that may take longer, and what runs where both list nothing."""
TYPES = {"float32": "FLOAT", "float16": "HALF", "bfloat16": "BFLOAT16", "int8": "INT8", "uint8": "UINT8", "int32": "INT32",
         "float8_e4m3fn": "FP8_E4M3"}  # fmt: skip
"""Names in cudnn.data_type."""
WHOLE, COPIED, ALONE = "", "with a copy: ", "convolution alone: "  # graphs of a layer, in front of the names of their plans


def unsupported(conv: Conv2d) -> str | None:
    """The reason why a layer is not written as a graph; None if it is. cuDNN may still have no plan for it."""
    known = [row.name for row in ELEMENT_TYPES.values() if row.cudnn_maths or row.scaled]
    if conv.dtype not in known:
        return f"`dtype` (={conv.dtype!r}) must be one of {', '.join(known)}"
    if conv.zero_point or conv.out_zero_point:
        return "it has a zero point, which a graph of cuDNN has not"
    return None


def excluded_notes(conv: Conv2d, accuracy: Accuracy) -> tuple[str, ...]:
    """Names in cudnn.numerical_note of what a plan must not do.

    No plan may round inputs to a narrower type. Tensor cores multiply float32 as TF32, which the accuracy has to allow. "exact" is for
    direct sums in the type of the sums: it excludes Winograd's form, FFT, and parts of a sum that are stored in a narrower type.
    """
    notes = ["DOWN_CONVERT_INPUTS"]
    if conv.dtype == "float32" and not allows(accuracy, "tf32"):
        notes.append("TENSOR_CORE")
    if accuracy == "exact":
        notes += ["WINOGRAD", "FFT", "REDUCED_PRECISION_REDUCTION"]
    return tuple(notes)


def frontend() -> Any:
    """The module `cudnn`.

    Raises:
        PeerError: it is not installed, or finds no cuDNN.
    """
    try:
        module = importlib.import_module("cudnn")
    except ImportError as error:
        raise PeerError(f"cudnn-graph: nvidia-cudnn-frontend is not installed ({error}); pip install 'im2win[cudnn]'.") from error
    except Exception as error:
        raise PeerError(f"cudnn-graph: nvidia-cudnn-frontend cannot be used: {brief(error)}.") from error
    if not hasattr(module, "pygraph"):
        raise PeerError("cudnn-graph: the module cudnn must be that of nvidia-cudnn-frontend, with pygraph; pip install 'im2win[cudnn]'.")
    return module


def strides(shape: tuple[int, int, int, int], layout: str) -> list[int]:
    """Strides, in elements, of a tensor with [N, C, H, W] or [K, C, R, S] = `shape` that is contiguous in this layout."""
    _, channels, height, width = shape
    image = channels * height * width
    return [image, height * width, width, 1] if layout == "NCHW" else [image, 1, width * channels, channels]


@dataclass(frozen=True)
class Graph:
    """A graph with its plans.

    Attributes:
        kind: `WHOLE`, `COPIED` or `ALONE`.
        built: cudnn.pygraph.
        tensors: cuDNN's tensors by the names in `conv.arguments`, and by the value (as text) for constants.
        constants: values of those, float32 of shape [1, 1, 1, 1].
        names: of the plans, by their index.
    """

    kind: str
    built: Any
    tensors: Mapping[str, Any]
    constants: Mapping[str, float]
    names: tuple[str, ...]


@dataclass
class _Writer:
    """Writes operations into a graph; results are float32 unless said otherwise."""

    cudnn: Any
    graph: Any
    constants: dict[str, float] = field(default_factory=dict)
    tensors: dict[str, Any] = field(default_factory=dict)

    def input(self, name: str, shape: tuple[int, int, int, int], layout: str, dtype: str) -> Any:
        kind = getattr(self.cudnn.data_type, TYPES[dtype])
        self.tensors[name] = self.graph.tensor(name=name, dim=list(shape), stride=strides(shape, layout), data_type=kind)
        return self.tensors[name]

    def constant(self, value: float) -> Any:
        name = repr(value)
        self.constants[name] = value
        return self.tensors[name] if name in self.tensors else self.input(name, (1, 1, 1, 1), "NCHW", "float32")

    def apply(self, operation: str, *inputs: Any, **numbers: float) -> Any:
        single = self.cudnn.data_type.FLOAT
        result = getattr(self.graph, operation)(*inputs, compute_data_type=single, **numbers)
        result.set_data_type(single)
        return result


def _sixth(writer: _Writer, y: Any) -> Any:
    """max(0, min(1, y / 6 + 1 / 2))."""
    line = writer.apply("add", writer.apply("mul", y, writer.constant(1 / 6)), writer.constant(0.5))
    return writer.apply("min", writer.apply("relu", line), writer.constant(1.0))


ACTIVATIONS: dict[str, Callable[..., Any]] = {  # by the name of the row in im2win.spec.activations
    "none": lambda writer, y: y,
    "relu": lambda writer, y: writer.apply("relu", y),
    "relu6": lambda writer, y: writer.apply("min", writer.apply("relu", y), writer.constant(6.0)),
    "silu": lambda writer, y: writer.apply("swish", y),
    "leaky_relu": lambda writer, y, slope: writer.apply("leaky_relu", y, negative_slope=slope),
    "sigmoid": lambda writer, y: writer.apply("sigmoid", y),
    "tanh": lambda writer, y: writer.apply("tanh", y),
    "hardsigmoid": _sixth,
    "hardswish": lambda writer, y: writer.apply("mul", y, _sixth(writer, y)),
    "gelu": lambda writer, y: writer.apply("gelu", y),
    "gelu_tanh": lambda writer, y: writer.apply("gelu_approx_tanh", y),
}


def kinds(conv: Conv2d) -> list[str]:
    """The graphs of a layer (see the module's docstring), in the order in which their plans are tried."""
    epilogue = conv.bias or conv.residual or conv.activation != "none"
    if ELEMENT_TYPES[conv.dtype].scaled:
        return [WHOLE] if ELEMENT_TYPES[conv.out_dtype].scaled else [WHOLE, ALONE]
    if ELEMENT_TYPES[conv.dtype].integer:
        return [WHOLE] if epilogue or conv.requantised else [WHOLE, COPIED]
    return [WHOLE, ALONE] if epilogue else [WHOLE]


def planned(cudnn: Any, conv: Conv2d, layout: str, kind: str, accuracy: Accuracy, **how: Any) -> Graph:
    """A graph of a layer and the plans that cuDNN lists for it, without those whose arithmetic the accuracy excludes.

    Args:
        cudnn: the module.
        layout: of all tensors, the filter among them.
        how: further arguments of cudnn.pygraph: `handle`, or `device_property` where there is no GPU.

    Raises:
        PeerError: cuDNN has no plan for the graph, with its message.
    """
    types = cudnn.data_type
    given = getattr(types, TYPES[conv.dtype])
    graph = cudnn.pygraph(io_data_type=given, intermediate_data_type=types.FLOAT, compute_data_type=types.FLOAT, **how)
    writer = _Writer(cudnn, graph)
    result = _written(writer, conv, layout, kind)
    shape = (conv.batch, conv.out_channels, *conv.output_size)
    out = getattr(types, TYPES[conv.out_dtype])
    result.set_output(True).set_data_type(out).set_dim(list(shape)).set_stride(strides(shape, layout))
    try:
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([getattr(cudnn.heur_mode, name) for name in MODES])
        graph.deselect_numeric_notes([getattr(cudnn.numerical_note, name) for name in excluded_notes(conv, accuracy)])
    except Exception as error:
        said = str(error).strip().splitlines() or [repr(error)]  # what follows the first line lists what every engine said
        raise PeerError(f"cudnn-graph: no plan: {said[0][:200]}") from None
    names = tuple(kind + graph.get_plan_name_at_index(place) for place in range(graph.get_execution_plan_count()))
    return Graph(kind, graph, {**writer.tensors, "output": result}, writer.constants, names)


def _written(writer: _Writer, conv: Conv2d, layout: str, kind: str) -> Any:
    """Writes the layer's operations. Returns the result."""
    types, element = writer.cudnn.data_type, ELEMENT_TYPES[conv.dtype]
    given = conv.dtypes
    sums = types.INT32 if element.integer else types.FLOAT
    x = writer.input("data", (conv.batch, conv.in_channels, conv.height, conv.width), layout, given["data"])
    w = writer.input("filter", conv.filter_shape, layout, given["filter"])
    top, left, bottom, right = conv.padding
    y = writer.graph.conv_fprop(
        image=x, weight=w, pre_padding=[top, left], post_padding=[bottom, right], stride=list(conv.stride), dilation=list(conv.dilation),
        compute_data_type=sums,
    )
    whole = (conv.batch, conv.out_channels, *conv.output_size)
    if kind == ALONE:
        return y
    y.set_data_type(sums)
    if kind == COPIED:
        return writer.graph.identity(y, compute_data_type=sums)
    for name in ("scale", "bias") if element.scaled else ("bias", "scale"):
        if name in given:
            operation, dtype = ("add", bias_dtype(conv)) if name == "bias" else ("mul", "float32")
            y = writer.apply(operation, y, writer.input(name, (1, conv.out_channels, 1, 1), layout, dtype))
    if conv.residual:
        y = writer.apply("add", y, writer.input("residual", whole, layout, given["residual"]))
    named = found(conv.activation)
    assert named is not None
    return ACTIVATIONS[named[0].name](writer, y, *named[1])


def bias_dtype(conv: Conv2d) -> str:
    """The type in which the bias is given to cuDNN: that of the layer; float32 for int32, whose sums with it become float32 anyway."""
    return "float32" if ELEMENT_TYPES[conv.dtype].integer else conv.dtypes["bias"]


class Layer:
    """A layer's tensors in a layout, on the device, and a run of any of its plans. `output` is overwritten by every run.

    Args:
        tensors: PyTorch's, by the names in `conv.arguments`, in the layer's own layout.
        layout: of cuDNN's tensors. What differs from the layer's is converted here, once.
    """

    def __init__(self, conv: Conv2d, tensors: Mapping[str, Any], layout: str) -> None:
        import torch

        self.conv = conv
        memory = torch.channels_last if layout == "NHWC" else torch.contiguous_format

        def laid_out(name: str) -> Any:
            tensor = tensors[name]
            if name in ("bias", "scale"):
                return tensor.to(getattr(torch, bias_dtype(conv) if name == "bias" else "float32")).reshape(1, -1, 1, 1)
            logical = tensor if conv.layout == "NCHW" or name == "filter" else tensor.permute(0, 3, 1, 2)
            return logical.contiguous(memory_format=memory)

        self._given = {name: laid_out(name) for name in conv.arguments if name != "output"}
        self._device = self._given["data"].device
        shape = (conv.batch, conv.out_channels, *conv.output_size)
        self.output = torch.empty(shape, dtype=getattr(torch, conv.out_dtype), device=self._device, memory_format=memory)
        self._workspace = torch.empty(1, dtype=torch.uint8, device=self._device)

    def result(self) -> Any:
        """The output as the layer has it, in its own layout."""
        return self.output if self.conv.layout == "NCHW" else self.output.permute(0, 2, 3, 1)

    def runner(self, graph: Graph, index: int, handle: Any, most_bytes: float = math.inf) -> Callable[[], None]:
        """Builds a plan. Returns what runs it, on the stream of `handle`, without waiting for it.

        Raises:
            PeerError: it needs a workspace of more than `most_bytes`; other exceptions are cuDNN's.
        """
        import torch

        graph.built.build_plan_at_index(index)
        needed = max(1, graph.built.get_workspace_size_plan_at_index(index))
        if needed > most_bytes:
            raise PeerError(f"it needs a workspace of {needed} bytes.")
        if needed > self._workspace.numel():
            self._workspace = torch.empty(needed, dtype=torch.uint8, device=self._device)
        constants = {name: torch.full((1, 1, 1, 1), value, device=self._device) for name, value in graph.constants.items()}
        named = {name: kernel_view(tensor) for name, tensor in {**self._given, **constants, "output": self.output}.items()}
        pack = {tensor: named[name] for name, tensor in graph.tensors.items()}
        execute, after = graph.built.execute_plan_at_index, self._after if graph.kind == ALONE else None

        def run() -> None:
            execute(pack, self._workspace, index, handle=handle)
            if after is not None:
                after()

        return run

    def workspace_bytes(self, graph: Graph, index: int) -> int:
        """Bytes of workspace of a plan that was built."""
        return int(graph.built.get_workspace_size_plan_at_index(index))

    def _after(self) -> None:
        """The epilogue by PyTorch's operators, in place."""
        conv, y = self.conv, self.output
        if conv.requantised:
            y.mul_(self._given["scale"])
        if conv.bias:
            y.add_(self._given["bias"])
        if conv.residual:
            y.add_(self._given["residual"])
        done = torch_function(conv.activation, inplace=True)(y)
        if done is not y:
            y.copy_(done)
