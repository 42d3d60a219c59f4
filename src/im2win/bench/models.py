"""Benchmarks whole models against ONNX Runtime and PyTorch with `im2win.bench.harness`: separate processes, interleaved rounds."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from im2win.bench.harness import Worker, WorkerError, interleaved
from im2win.bench.peers.subject import PeerError, Subject, Tensors, Trial
from im2win.bench.results import Spread
from im2win.frontends.models.source import at_batch, read
from im2win.frontends.onnx.graph import attributes_of
from im2win.frontends.onnx.layers import import_onnx
from im2win.runtime.load import load_model
from im2win.runtime.manifest import manifest_path
from im2win.runtime.model_manifest import ModelManifest
from im2win.runtime.tensors import aligned
from im2win.spec.activations import of_onnx, torch_function
from im2win.spec.conv2d import Conv2d

if TYPE_CHECKING:
    from onnx import ModelProto

    from im2win.frontends.models.source import Array
    from im2win.frontends.onnxruntime.operators import Rewritten
    from im2win.runtime.model import Model

_NO_LAYER = Conv2d(1, 1, 1, 1, 1, 1)  # the harness requires a layer; a model's subjects have their own inputs
TOLERANCE = 1e-3  # of the largest output, after hundreds of layers that are each within their tolerance
PEERS = ("onnxruntime", "torch")
INSIDE = "inside onnxruntime"  # ONNX Runtime with im2win's convolutions


@dataclass
class ModelRow:
    """One model: im2win's median time of a call in ms, those of the peers, and the largest difference from ONNX Runtime.

    Attributes:
        ratio: the best peer's time over im2win's.
        tiers: tiers of the look-up that the tiles of its layers come from, with counts.
        inside_ms, inside_failed: of ONNX Runtime with im2win's convolutions, if it took part.
    """

    model: str
    batch: int
    ours_ms: float | None = None
    peers: dict[str, float] = field(default_factory=dict)
    best_peer: str | None = None
    ratio: float | None = None
    error: float | None = None
    tiers: dict[str, int] = field(default_factory=dict)
    failed: str | None = None
    peers_failed: dict[str, str] = field(default_factory=dict)
    spread: dict[str, Spread] = field(default_factory=dict)
    inside_ms: float | None = None
    inside_failed: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def images(path: Path, seed: int) -> dict[str, Array]:
    """Random normal inputs of a compiled model's largest batch, the same in every process."""
    manifest = ModelManifest.read(manifest_path(path))
    random = np.random.default_rng(seed)
    batch = max(bucket.batch for bucket in manifest.buckets)
    return {port.name: aligned(random.normal(size=port.at(batch)).astype(port.dtype)) for port in manifest.inputs}


def convs_of(model: Model) -> list[str]:
    """Keys of the problems whose kernels a compiled model holds."""
    return sorted({layer.conv for layer in model.manifest.layers})


@dataclass(frozen=True)
class Ours:
    """A compiled model."""

    library: Path
    seed: int = 0
    name: str = "ours"

    def prepare(self, conv: Conv2d, tensors: Tensors, threads: int) -> Trial:
        model = load_model(self.library)
        inputs = list(images(self.library, self.seed).values())
        first = model(*inputs)
        out = tuple(aligned(np.full_like(one, np.nan)) for one in (first if isinstance(first, tuple) else (first,)))
        return Trial(model.bind(*inputs, out=out), lambda: _flat(out))


@dataclass(frozen=True)
class OnnxRuntimeModel:
    """ONNX Runtime on the same file, with all graph optimizations, and inputs and outputs bound ahead of time.

    Attributes:
        operators: the library of custom operators that the file needs.
    """

    library: Path
    source: Path
    seed: int = 0
    name: str = "onnxruntime"
    operators: Path | None = None

    def prepare(self, conv: Conv2d, tensors: Tensors, threads: int) -> Trial:
        try:
            import onnxruntime as ort
        except ImportError as error:
            raise PeerError(f"{self.name}: onnxruntime is needed; pip install 'im2win[bench]'.") from error
        options = ort.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads, options.log_severity_level = threads, 1, 3
        if self.operators is not None:
            options.register_custom_ops_library(str(self.operators))
        session = ort.InferenceSession(str(self.source), options, providers=["CPUExecutionProvider"])
        feeds = images(self.library, self.seed)
        outputs = [ort.OrtValue.ortvalue_from_numpy(one) for one in session.run(None, feeds)]
        held = {name: ort.OrtValue.ortvalue_from_numpy(value) for name, value in feeds.items()}
        binding = session.io_binding()
        for name, value in held.items():
            binding.bind_ortvalue_input(name, value)
        for one, value in zip(session.get_outputs(), outputs, strict=True):
            binding.bind_ortvalue_output(one.name, value)
        return Trial(partial(session.run_with_iobinding, binding), lambda: _flat([one.numpy() for one in outputs]))


@dataclass(frozen=True)
class TorchModel:
    """PyTorch eager (oneDNN), node by node as a module's `forward` would call it, under `inference_mode`.

    Weights are prepared ahead of time.
    """

    library: Path
    source: Path
    seed: int = 0
    name: str = "torch"

    def prepare(self, conv: Conv2d, tensors: Tensors, threads: int) -> Trial:
        try:
            import torch
        except ImportError as error:
            raise PeerError(f"{self.name}: PyTorch is not installed; pip install 'im2win[bench]'.") from error

        torch.set_num_threads(threads)
        label, model = read(self.source)
        feeds = {name: torch.from_numpy(value) for name, value in images(self.library, self.seed).items()}
        whole = at_batch(model, label, next(iter(feeds.values())).shape[0])
        constants = {name: torch.from_numpy(np.array(value)) for name, value in whole.constants.items()}
        steps = [(_torch_call(torch, node, whole.constants), list(filter(None, node.input)), node.output[0]) for node in whole.graph.nodes]
        wanted = [one.name for one in whole.outputs]
        result: list[Any] = []

        @torch.inference_mode()  # type: ignore[untyped-decorator,unused-ignore]
        def call() -> None:
            values = {**constants, **feeds}
            for function, inputs, output in steps:
                values[output] = function(*(values[name] for name in inputs))
            result[:] = [values[name] for name in wanted]

        return Trial(call, lambda: _flat([one.numpy() for one in result]))


def _flat(tensors: Sequence[Array]) -> Array:
    return np.concatenate([one.reshape(-1) for one in tensors])


def _torch_call(torch: Any, node: Any, constants: dict[str, Array]) -> Callable[..., Any]:
    """A node as a call of PyTorch.

    Raises:
        PeerError: an operator or attribute that is not supported here.
    """
    stated = attributes_of(node)
    functional = torch.nn.functional
    pads, strides = stated.get("pads", [0, 0, 0, 0]), stated.get("strides", [1, 1])
    if stated.get("auto_pad", b"NOTSET") not in (b"NOTSET", b"VALID") or stated.get("ceil_mode", 0):
        raise PeerError(f"torch: {node.op_type} with auto_pad or ceil_mode is not converted.")

    def windows(function: Callable[..., Any], empty: float = 0.0) -> Callable[..., Any]:
        """Asymmetric padding is a separate step."""
        if pads[:2] == pads[2:]:
            return partial(function, padding=tuple(pads[:2]))
        top, left, bottom, right = pads
        return lambda x, *others: function(functional.pad(x, (left, right, top, bottom), value=empty), *others)

    size = stated.get("kernel_shape")
    joined = partial(_joined, torch, stated.get("axis", 1))
    shape = [int(extent) for extent in constants[node.input[1]]] if node.op_type == "Reshape" else []
    known: dict[str, Callable[[], Callable[..., Any]]] = {
        "Conv": lambda: windows(
            partial(functional.conv2d, stride=strides, dilation=stated.get("dilations", [1, 1]), groups=stated.get("group", 1))
        ),
        "MaxPool": lambda: windows(partial(functional.max_pool2d, kernel_size=size, stride=strides), -np.inf),
        "AveragePool": lambda: windows(
            partial(functional.avg_pool2d, kernel_size=size, stride=strides, count_include_pad=bool(stated.get("count_include_pad", 0)))
        ),
        "GlobalAveragePool": lambda: partial(functional.adaptive_avg_pool2d, output_size=1),
        "BatchNormalization": lambda: lambda x, g, b, m, v: functional.batch_norm(x, m, v, g, b, eps=stated.get("epsilon", 1e-5)),
        "Add": lambda: torch.add,
        "Sum": lambda: lambda first, *others: sum(others, first),
        "Mul": lambda: torch.mul,
        "Concat": lambda: joined,
        "LRN": lambda: partial(
            functional.local_response_norm, size=stated.get("size"), alpha=stated.get("alpha", 1e-4), beta=stated.get("beta", 0.75),
            k=stated.get("bias", 1.0),
        ),
        "Reshape": lambda: lambda x, _: x.reshape([x.shape[place] if extent == 0 else extent for place, extent in enumerate(shape)]),
        "Flatten": lambda: partial(torch.flatten, start_dim=stated.get("axis", 1)),
        "Transpose": lambda: lambda x: x.permute(stated["perm"]).contiguous(),
        "Gemm": lambda: partial(_gemm, torch, bool(stated.get("transB", 0))),
        # up to operator set 12 softmax reduces all axes from this one on
        "Softmax": lambda: lambda x: torch.softmax(x.flatten(stated.get("axis", 1)), -1).reshape(x.shape),
        "Dropout": lambda: lambda x, *_: x,
        "Identity": lambda: lambda x: x,
    }  # fmt: skip
    if (named := of_onnx(node.op_type, stated)) is not None and (word := named[0].key(*named[1])) is not None:
        return torch_function(word)
    if node.op_type not in known:
        raise PeerError(f"torch: {node.op_type} is not converted.")
    return known[node.op_type]()


def _joined(torch: Any, axis: int, *tensors: Any) -> Any:
    return torch.cat(tensors, axis)


def _gemm(torch: Any, turned: bool, x: Any, w: Any, bias: Any = None) -> Any:
    return torch.nn.functional.linear(x, w if turned else w.T, bias)


def measure(
    name: str, source: Path, library: Path, against: Sequence[str] = PEERS, threads: int = 1, rounds: int = 15, warmup: float = 0.5,
    inside: Rewritten | None = None, beside: Sequence[Subject] = (), tolerance: float = TOLERANCE,
) -> ModelRow:  # fmt: skip
    """Times a compiled model and its peers on the same random inputs. Every output is checked against ONNX Runtime's.

    Args:
        source: the ONNX file that `library` was compiled from.
        inside: the same model for ONNX Runtime with im2win's convolutions, as a further subject.
        beside: subjects that compute another model; their times are in `spread` only.
        tolerance: the largest difference from ONNX Runtime's output, over the latter's largest magnitude.

    Raises:
        ValueError: an unknown peer.
    """
    unknown = [peer for peer in against if peer not in PEERS]
    if unknown:
        raise ValueError(f"`against` (={unknown[0]!r}) must be one of {', '.join(PEERS)}.")
    manifest = ModelManifest.read(manifest_path(library))
    row = ModelRow(name, max(bucket.batch for bucket in manifest.buckets))
    for layer in manifest.layers:
        row.tiers[layer.tier] = row.tiers.get(layer.tier, 0) + 1
    subjects: list[Subject] = [Ours(library), OnnxRuntimeModel(library, source)]
    subjects += [TorchModel(library, source)] if "torch" in against else []
    subjects += [OnnxRuntimeModel(library, inside.path, name=INSIDE, operators=inside.library)] if inside else []
    subjects += beside
    with ExitStack() as stack:
        workers: dict[str, Worker] = {}
        outputs: dict[str, Array] = {}
        for subject in subjects:
            worker = stack.enter_context(Worker(subject, threads))
            try:
                outputs[subject.name] = worker.prepare(_NO_LAYER, 0).output
                workers[subject.name] = worker
            except WorkerError as error:
                row.peers_failed[subject.name] = str(error)
        other = {one.name for one in beside}
        _judge(row, workers, {subject: output for subject, output in outputs.items() if subject not in other}, tolerance)
        if "onnxruntime" not in against:
            workers.pop("onnxruntime", None)
        samples, failed = interleaved(workers, rounds, warmup)
    row.peers_failed |= failed
    row.failed, row.inside_failed = (row.peers_failed.pop(each, None) for each in ("ours", INSIDE))
    for subject_name, seconds in samples.items():
        ordered = sorted(1e3 * second for second in seconds)
        low, high = (float(np.percentile(ordered, q)) for q in (10, 90))
        row.spread[subject_name] = Spread(statistics.median(ordered), low, high, len(ordered))
    row.peers = {peer: row.spread[peer].median for peer in against if peer in row.spread}
    row.best_peer = min(row.peers, key=lambda peer: row.peers[peer], default=None)
    row.inside_ms = row.spread[INSIDE].median if INSIDE in row.spread else None
    if "ours" in row.spread:
        row.ours_ms = row.spread["ours"].median
        row.ratio = row.peers[row.best_peer] / row.ours_ms if row.best_peer else None
    return row


def _judge(row: ModelRow, workers: dict[str, Worker], outputs: dict[str, Array], tolerance: float) -> None:
    """Drops every subject whose output differs from ONNX Runtime's."""
    expected = outputs.get("onnxruntime")
    if expected is None:
        return
    largest = float(np.abs(expected.astype(float)).max(initial=0.0)) or 1.0
    for name, output in outputs.items():
        error = np.abs(output.astype(float) - expected).max(initial=0.0) / largest if output.shape == expected.shape else float("inf")
        row.error = error if name == "ours" else row.error
        if not error <= tolerance:
            row.peers_failed[name] = f"its output differs from ONNX Runtime's by {error:.1e} of the largest"
            workers.pop(name).close()


def with_random_weights(source: Path | ModelProto, seed: int = 0) -> ModelProto:
    """A graph with random weights in place of ConstantOfShape nodes.

    The test models of the package onnx have such nodes, which make all channels equal. The magnitude of the weights keeps that of
    activations, so that no library meets numbers that it is slow on. The input of the last softmax becomes an output too, since with random
    weights one class takes nearly all of its sum.
    """
    onnx = import_onnx()
    model: ModelProto = onnx.load(source) if isinstance(source, Path) else source
    random = np.random.default_rng(seed)
    shapes = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    roles = {value: (node.op_type, place) for node in model.graph.node for place, value in enumerate(node.input)}
    kept = [node for node in model.graph.node if node.op_type != "ConstantOfShape"]
    for node in model.graph.node:
        if node.op_type == "ConstantOfShape":
            shape = tuple(int(extent) for extent in shapes[node.input[0]])
            array = _weights(*roles[node.output[0]], shape, random).astype(np.float32)
            model.graph.initializer.append(onnx.numpy_helper.from_array(array, node.output[0]))
            model.graph.input.append(onnx.helper.make_tensor_value_info(node.output[0], onnx.TensorProto.FLOAT, shape))
    del model.graph.node[:]
    model.graph.node.extend(kept)
    for node in kept:
        if node.op_type == "Softmax":
            model.graph.output.append(onnx.ValueInfoProto(name=node.input[0]))
            model.graph.output[-1].type.tensor_type.elem_type = onnx.TensorProto.FLOAT
    return model


def _weights(operator: str, place: int, shape: tuple[int, ...], random: np.random.Generator) -> Array:
    if operator in ("Conv", "Gemm") and place == 1:
        return random.normal(0, np.sqrt(2 / np.prod(shape[1:])), shape)
    if operator == "BatchNormalization" and place == 4:
        return random.uniform(0.5, 2, shape)
    if operator in ("BatchNormalization", "Mul", "Unsqueeze") and place in (0, 1):
        return random.uniform(0.5, 1.2, shape)
    return random.normal(0, 0.1, shape)
