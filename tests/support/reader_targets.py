"""What reads files and keys that others wrote, as functions of bytes: only the documented errors may come out of them.

`tests/fuzz/readers.py` calls them with inputs that a coverage-guided fuzzer makes of `seeds`; an ordinary test calls them with the seeds.
"""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from im2win.frontends.onnx.layers import ModelError, layers_of
from im2win.packing import codec
from im2win.reconstruct.parse import expressions
from im2win.reconstruct.parse.expressions import ExpressionError
from im2win.reconstruct.parse.unit import read
from im2win.reconstruct.text_rules import ReconstructError
from im2win.records.log import _parse_file
from im2win.records.record import Record, RecordError
from im2win.runtime.manifest import ArtefactError, Manifest
from im2win.runtime.model_manifest import ModelManifest
from im2win.spec.conv2d import Conv2d, ConvError

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Target:
    """A reader: what it does with the content of a file, and inputs to begin with."""

    run: Callable[[bytes], None]
    seeds: Callable[[], list[bytes]]


class _Held:
    """In place of a path: a file's content."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def __str__(self) -> str:
        return "held"

    def read_text(self) -> str:
        return self.data.decode()


# --- records and keys


def key(data: bytes) -> None:
    """`Conv2d.parse`; what it accepts is printed and read again as the same problem."""
    try:
        conv = Conv2d.parse(data.decode("utf-8", "replace"))
    except ConvError:
        return
    assert Conv2d.parse(str(conv)) == conv, conv


def _keys() -> list[bytes]:
    keys = (
        "n8-c64x56x56-k64x3x3-s2x1-p1.0.2.1-d2-g4-bfloat16-NHWC-bias-add-leaky_relu0.1", "n1-c1x1x1-k1x1x1",
        "n1-c6x7x9-k18x3x3-p1-int8-out.int8-zerom7-outzero3-NHWC-bias-relu", "n1-c3x9x9-k8x3x3-uint8-out.uint8-zero128",
    )  # fmt: skip
    return [one.encode() for one in keys]


def record(data: bytes) -> None:
    """A line of a log; what is accepted is written and read again as the same record."""
    text = data.decode("utf-8", "replace")
    try:
        found = Record.from_line(text)
    except RecordError:
        return
    assert Record.from_line(found.to_line()) == found


def log_file(data: bytes) -> None:
    """A file of a log, which reading never refuses: what is wrong is reported line by line."""
    path = Path("logs", "amd-epyc-znver3-2t", "n1-c1x1x1-k1x1x1.jsonl")
    file = _parse_file(path, (0, 0, 0), data)
    assert len(file.records) + len(file.problems) <= data.count(b"\n") + 1


def _lines() -> list[bytes]:
    from recorded import ok

    line = ok(1e-5).to_line()
    old = json.loads(line)
    old.pop("checksum", None)
    return [line.encode(), json.dumps(old).encode(), json.dumps({**old, "schema": 4}).encode(), json.dumps({**old, "schema": 1}).encode()]


# --- artefacts


def manifest(data: bytes) -> None:
    """The manifest of a library."""
    try:
        Manifest.read(_Held(data))  # type: ignore[arg-type]
    except ArtefactError:
        return


def model_manifest(data: bytes) -> None:
    """The manifest of a whole model."""
    try:
        ModelManifest.read(_Held(data))  # type: ignore[arg-type]
    except ArtefactError:
        return


def _manifests() -> list[bytes]:
    facts: dict[str, Any] = {
        "schema": 6, "conv": "n1-c8x9x11-k16x3x3-p1", "algorithm": "direct", "schedule": "tiled", "tile": {"lanes": 8, "order": "cuv"},
        "target": "cpu", "machine": "m", "isa": "avx2", "threads": 2, "tuned": False, "extra_bytes": 0, "tvm": "0", "im2win": "0",
        "made": 0, "library": "conv.so", "sha256": "0" * 64,
    }  # fmt: skip
    packs = [{"kind": kind, **{one.name: _value(one) for one in dataclasses.fields(made)}} for kind, made in codec.KINDS.items()]
    older = [{**facts, "schema": 4}, {**facts, "schema": 3, "algorithm": "direct_tiled"}]
    return [json.dumps({**one, "pack": pack}).encode() for one in (facts, *older) for pack in packs]


def _value(field: dataclasses.Field[Any]) -> Any:
    """A value of a packing's field."""
    if field.default is not dataclasses.MISSING:
        return field.default
    return "steps" if field.name in ("form", "order", "scales") else 2


def _model_manifests() -> list[bytes]:
    port = {"name": "x", "dtype": "float32", "shape": [1, 3, 8, 8], "batched": True}
    layer = {"name": "c", "conv": "n1-c3x8x8-k4x3x3", "algorithm": "direct/tiled", "tile": {"lanes": 8}, "tier": "exact", "extra_bytes": 0}
    facts = {
        "inputs": [port], "outputs": [port], "layers": [layer], "skipped": ["a"],
        "buckets": [{"batch": 1, "function": "main", "workspace": 0}],
        "target": "cpu", "machine": "m", "isa": "avx2", "threads": 2, "tvm": "0", "im2win": "0", "library": "m.so", "sha256": "0" * 64,
        "weights": "m.so.weights", "weights_bytes": 0, "weights_sha256": "0" * 64, "kind": "model", "schema": 4,
    }  # fmt: skip
    return [json.dumps(one).encode() for one in (facts, {**facts, "schema": 2}, {**facts, "schema": 1})]


# --- models


def onnx_model(data: bytes) -> None:
    """An ONNX file, with everything that is read of one."""
    with tempfile.NamedTemporaryFile(dir="/dev/shm" if os.path.isdir("/dev/shm") else None, suffix=".onnx") as file:
        file.write(data)
        file.flush()
        try:
            layers_of(file.name, epilogues=True, products=True)
        except ModelError:
            return


def _models() -> list[bytes]:
    import onnx
    from onnx import TensorProto, helper

    def model(nodes: list[Any], *tensors: Any) -> bytes:
        x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 2, 5, 5] if name == "x" else None) for name in "xy")
        graph = helper.make_graph(nodes, "g", [x], [y], list(tensors))
        made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)])
        return bytes(onnx.ModelProto.SerializeToString(made))

    w = helper.make_tensor("w", TensorProto.FLOAT, [2, 2, 3, 3], [0.5] * 36)
    b = helper.make_tensor("b", TensorProto.FLOAT, [2], [0.25, -1])
    conv = helper.make_node("Conv", ["x", "w", "b"], ["c"], pads=[1, 1, 1, 1], strides=[1, 1], dilations=[1, 1], group=1)
    scaled = [helper.make_node("BatchNormalization", ["c", "b", "b", "b", "b"], ["d"]), helper.make_node("Clip", ["d"], ["y"])]
    plain = [helper.make_node("Conv", ["x", "w"], ["c"], auto_pad="SAME_UPPER"), helper.make_node("Add", ["c", "x"], ["s"])]
    moved = [helper.make_node("ConvTranspose", ["x", "w"], ["y"], strides=[2, 2], output_padding=[1, 1])]
    flat = [helper.make_node("Flatten", ["x"], ["f"]), helper.make_node("Gemm", ["f", "m", "b"], ["y"], transB=1)]
    m = helper.make_tensor("m", TensorProto.FLOAT, [2, 50], [0.5] * 100)
    return [
        model([conv, *scaled], w, b), model([*plain, helper.make_node("Sigmoid", ["s"], ["y"])], w), model(moved, w), model(flat, m, b),
    ]  # fmt: skip


# --- generated sources


def source(data: bytes) -> None:
    """A CUDA source as the reconstructor reads it: launches, kernels, statements."""
    text = data.decode("utf-8", "replace")
    try:
        unit = read(text)
        for kernel in unit.kernels.values():
            _ = kernel.statements, kernel.barriers, kernel.loops, kernel.bound
            _ = kernel.static_bytes, kernel.launch, kernel.numbers
        assert read(unit.annotated()).kernels.keys() == unit.kernels.keys()
    except ReconstructError:
        return


def expression(data: bytes) -> None:
    """An expression of a source, read, and written and read again."""
    try:
        expressions.parse(expressions.text(expressions.parse(data.decode("utf-8", "replace"))))
    except ExpressionError:
        return


def _sources() -> list[bytes]:
    launch = "// launch: k(x, y, 3) grid 2 1 1 block 32 1 1 dynamic 0\n// workspace: w float32 4 5\n"
    body = """
extern "C" __global__ void __launch_bounds__(32) k(float* __restrict__ x, float* __restrict__ y, int n) {
  __shared__ alignas(16) float s[64];
  #pragma unroll
  for (int i = 0; i < 4; ++i) { if (i < n) { s[((i * 4) + ((int)threadIdx.x))] = x[i]; } else { y[0] = max(1.0f, x[i]); } }
  __syncthreads();
  y[((int)blockIdx.x)] = (((0 <= n) && (n < 5)) ? s[0] : 0x1p+0f/*1.0e+00*/);
}
"""
    return [(launch + body).encode(), body.encode(), *(path.read_bytes() for path in sorted((ROOT / "tests/golden").glob("*.cu"))[:1])]


def _expressions() -> list[bytes]:
    first = b"((((int)threadIdx.x) & 31) >> 3) * 4 + s[i ^ 1].x"
    return [first, b"f<4>(&(a[0]), (b < 3) ? -c : 0x1p+0f, *(int4*)(p + 1))", b"!a || ~b % 2"]


TARGETS: dict[str, Target] = {
    "key": Target(key, _keys),
    "record": Target(record, _lines),
    "log_file": Target(log_file, lambda: [b"\n".join(_lines()), b"\n\n{}\n"]),
    "manifest": Target(manifest, _manifests),
    "model_manifest": Target(model_manifest, _model_manifests),
    "onnx_model": Target(onnx_model, _models),
    "source": Target(source, _sources),
    "expression": Target(expression, _expressions),
}
