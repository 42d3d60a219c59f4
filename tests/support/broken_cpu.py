"""Deliberately broken kernels of CPUs: scheduled programs, and packed filters, with one mistake each.

A program is changed in its JSON form, where every expression is a node: a mistake replaces one node, or what one refers to.
"""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tvm
from fuzz_cases import OLDER
from oracle import Array
from tvm_ffi.serialization import from_json_graph_str

from im2win.codegen.llvm import compile_module
from im2win.device.cpu import Machine
from im2win.registry import cpu_lowering
from im2win.registry.ranking import default_tile
from im2win.registry.schedules import schedule_of
from im2win.spec.conv2d import Conv2d

Node = dict[str, Any]
LAYERS = (  # key, schedule: no size is one, and no tile divides the sizes
    ("n2-c5x7x9-k19x3x3-p1-bias-relu", "direct/tiled"),
    ("n2-c6x8x9-k10x3x2-s2x1-p1.0.2.1-g2-NHWC-bias-add", "im2win/stored"),
    ("n2-c5x9x8-k18x3x3-p1-add-relu6", "im2win/fused"),
    ("n2-c4x9x9-k12x3x3-s2-p1-d2-bias", "im2col/tiled"),
    ("n2-c5x8x7-k9x3x3-p1-NHWC-bias-leaky_relu0.1", "implicit_gemm/tiled"),
    ("n2-c4x8x9-k17x3x3-p1-bias", "mec/tiled"),
    ("n2-c4x9x7-k17x3x3-p1-NHWC-add", "mcfa/tiled"),
    ("n2-c11x9x8-k22x3x3-s2x1-p1-g11-bias-relu", "direct/depthwise"),
    ("n2-c5x10x9-k18x3x3-p1-bias", "winograd/tiled"),
    ("n2-c6x7x9-k18x3x3-p1-bfloat16-bias-relu", "direct/dot_product"),
    ("n2-c6x7x9-k18x3x3-p1-int8-zero5-NHWC-bias", "direct/dot_product"),
    ("n2-c6x7x9-k18x3x3-s2-p1-g2-int8-out.int8-outzero3-bias-relu", "direct/dot_product"),
    ("n2-c7x7x8-k18x3x3-p1-uint8-out.uint8-zero128-outzero4-NHWC-bias-add", "direct/dot_product"),
)
PER_KIND = 2  # mistakes of one kind in one program


@dataclass(frozen=True)
class Mistake:
    """A mistake: its kind, and which of the places where a program can have it."""

    kind: str
    place: int

    def __str__(self) -> str:
        return f"{self.kind} {self.place}"


# --- mistakes in programs


class Graph:
    """A module as nodes that refer to each other by number."""

    def __init__(self, module: tvm.IRModule) -> None:
        self.graph: dict[str, Any] = json.loads(tvm.ir.save_json(module))
        self.nodes: list[Node] = self.graph["nodes"]

    def of(self, *kinds: str) -> Iterator[Node]:
        """The nodes of some types, in order."""
        return (node for node in self.nodes if node["type"] in kinds)

    def data(self, number: int) -> Any:
        """What a node holds."""
        return self.nodes[number]["data"]

    def add(self, kind: str, **data: Any) -> int:
        """A new node; its number."""
        self.nodes.append({"type": kind, "data": {"span": 0, **data}})
        return len(self.nodes) - 1

    def constant(self, number: int) -> float | None:
        """The value of a constant, of all its lanes alike; None for other expressions."""
        node = self.nodes[number]
        if node["type"] == "prim.Broadcast":
            return self.constant(node["data"]["value"])
        if node["type"] == "ir.IntImm":
            return float(self.data(node["data"]["value"]))
        return float(node["data"]["value"]) if node["type"] == "ir.FloatImm" else None

    def with_value(self, number: int, value: float) -> int:
        """A copy of a constant with another value; its number."""
        node = self.nodes[number]
        if node["type"] == "prim.Broadcast":
            return self.add(node["type"], **{**node["data"], "value": self.with_value(node["data"]["value"], value)})
        held = float(value) if node["type"] == "ir.FloatImm" else self.integer(int(value))
        return self.add(node["type"], **{**node["data"], "value": held})

    def integer(self, value: int) -> int:
        """A new node with the value of an integer; its number."""
        self.nodes.append({"type": "int", "data": value})
        return len(self.nodes) - 1

    def text(self, number: int) -> str:
        """The name of a variable or the text of a string; "" for other nodes."""
        node = self.nodes[number]
        if node["type"] == "ir.Var":
            return self.text(node["data"]["name"])
        return node["data"] if node["type"] == "ffi.String" else ""

    def dtype(self, number: int) -> str:
        """The element type of an expression, with its lanes: "float32x8"; "" for what has none."""
        held = self.nodes[number]["data"]
        kind = self.data(held["ty"]) if isinstance(held, dict) and "ty" in held else None
        return str(kind.get("dtype", "")) if isinstance(kind, dict) else ""

    @property
    def narrow(self) -> bool:
        """Whether some tensor has elements of sixteen bits."""
        kinds = [node["data"]["dtype"] for node in self.of("ir.PrimType")]
        return any(kind.split("x")[0] in ("float16", "bfloat16") for kind in kinds)

    def ten_bits(self, number: int) -> int:
        """A float32 expression, rounded to float16."""
        self.nodes.append({"type": "ir.PrimType", "data": {"span": 0, "dtype": "float16"}})
        half = self.add("prim.Cast", ty=len(self.nodes) - 1, value=number)
        return self.add("prim.Cast", ty=self.data(number)["ty"], value=half)

    def saturated(self, number: int, low: int, high: int) -> int:
        """An int32 expression, or a vector of it, cut off at both ends."""
        kind = self.data(number)["ty"]
        least = self.add("prim.Max", ty=kind, a=number, b=self.whole(number, low))
        return self.add("prim.Min", ty=kind, a=least, b=self.whole(number, high))

    def whole(self, number: int, value: int) -> int:
        """An integer of the type of an int32 expression, in all its lanes."""
        lanes = self.dtype(number).partition("x")[2]
        self.nodes.append({"type": "ir.PrimType", "data": {"span": 0, "dtype": "int32"}})
        one = self.add("ir.IntImm", ty=len(self.nodes) - 1, value=self.integer(value))
        if not lanes:
            return one
        kind = len(self.nodes)
        self.nodes.append({"type": "ir.PrimType", "data": {"span": 0, "dtype": "int32"}})
        count = self.add("ir.IntImm", ty=kind, value=self.integer(int(lanes)))
        return self.add("prim.Broadcast", ty=self.data(number)["ty"], value=one, lanes=count)

    def held(self, store: Node) -> int:
        """What a place holds that a statement stores to."""
        kind = self.data(store["data"]["value"])["ty"]
        return self.add("ir.TensorLoad", ty=kind, source=store["data"]["buffer"], indices=store["data"]["indices"], predicate=0)

    def floating(self, node: Node) -> bool:
        """Whether an expression is of a floating-point type."""
        kind = self.data(node["data"]["ty"])
        return isinstance(kind, dict) and "float" in str(kind.get("dtype", ""))


Change = Callable[[], None]


def _set(data: Any, name: Any, value: Any) -> Change:
    def change() -> None:
        data[name] = value() if callable(value) else value

    return change


def sum_starts_wrong(graph: Graph) -> Iterator[Change]:
    """A sum that starts at another number than zero, or what is stored as zero."""
    for node in graph.of("tirx.BufferStore"):
        value = node["data"]["value"]
        if graph.constant(value) == 0:
            yield _set(node["data"], "value", lambda value=value: graph.with_value(value, 1))


def padding_is_not_zero(graph: Graph) -> Iterator[Change]:
    """Padding, and channels that fill a word, which are not zero."""
    for node in graph.of("ir.Call"):
        if graph.data(node["data"]["op"]) == "prim.if_then_else":
            arguments = graph.data(node["data"]["args"])
            if graph.constant(arguments[2]) is not None:
                yield _set(arguments, 2, lambda other=arguments[2]: graph.with_value(other, 2 + (graph.constant(other) or 0)))


def condition_shifted(graph: Graph) -> Iterator[Change]:
    """Bounds of padding and tails off by one: < as <=, and the like."""
    other = {"prim.LT": "prim.LE", "prim.LE": "prim.LT", "prim.GE": "prim.GT", "prim.GT": "prim.GE"}
    for node in graph.of(*other):
        yield _set(node, "type", other[node["type"]])


def condition_forgotten(graph: Graph) -> Iterator[Change]:
    """One half of a condition."""
    for node in graph.of("prim.And"):
        yield _set(node["data"], "a", node["data"]["b"])


def loop_ends_early(graph: Graph) -> Iterator[Change]:
    """A loop without its last iteration."""
    for node in graph.of("tirx.For"):
        extent = graph.constant(node["data"]["extent"])
        if extent is not None and extent > 1:
            yield _set(node["data"], "extent", lambda number=node["data"]["extent"], extent=extent: graph.with_value(number, extent - 1))


def subtracted(graph: Graph) -> Iterator[Change]:
    """What is to be added."""
    for node in graph.of("prim.Add"):
        if graph.floating(node):
            yield _set(node, "type", "prim.Sub")


def factor_changed(graph: Graph) -> Iterator[Change]:
    """A wrong stride, group offset or size in an index."""
    for node in graph.of("prim.Mul", "prim.FloorDiv", "prim.FloorMod"):
        number = node["data"]["b"]
        value = graph.constant(number)
        if value is not None and value > 1 and not graph.floating(node):
            yield _set(node["data"], "b", lambda number=number, value=value: graph.with_value(number, value + 1))


def axes_swapped(graph: Graph) -> Iterator[Change]:
    """The last two axes of a tensor in place of each other."""
    for node in graph.of("ir.TensorLoad"):
        indices = graph.data(node["data"]["indices"])
        if len(indices) >= 2 and indices[-1] != indices[-2]:
            yield _set(node["data"], "indices", lambda indices=indices: _array(graph, [*indices[:-2], indices[-1], indices[-2]]))


def index_stale(graph: Graph) -> Iterator[Change]:
    """An index that stays at the first element."""
    for node in graph.of("ir.TensorLoad"):
        indices = graph.data(node["data"]["indices"])
        for axis, number in enumerate(indices):
            if graph.nodes[number]["type"] in ("ir.Var", "prim.Add", "prim.Mul"):
                yield _set(node["data"], "indices", lambda at=indices, i=axis: _array(graph, [*at[:i], _zero(graph, at[i]), *at[i + 1 :]]))


def index_off_by_one(graph: Graph) -> Iterator[Change]:
    """The element behind the right one."""
    for node in graph.of("ir.TensorLoad"):
        indices = graph.data(node["data"]["indices"])
        last = indices[-1]
        if graph.nodes[last]["type"] in ("ir.Var", "prim.Add", "prim.Mul"):
            yield _set(node["data"], "indices", lambda indices=indices, last=last: _array(graph, [*indices[:-1], _next(graph, last)]))


def epilogue_lost(graph: Graph) -> Iterator[Change]:
    """A bias, scale or residual that is not read, but taken to be 0."""
    sources = ("bias", "scale", "residual")
    for node in graph.of("ir.TensorLoad"):
        if graph.text(node["data"]["source"]) in sources and graph.floating(node):
            zero = {"type": "ir.FloatImm", "data": {"span": 0, "ty": node["data"]["ty"], "value": 0.0}}
            yield lambda node=node, zero=zero: node.update(zero)  # type: ignore[misc]


def activation_lost(graph: Graph) -> Iterator[Change]:
    """The other end of what an activation or a saturation cuts off."""
    other = {"prim.Max": "prim.Min", "prim.Min": "prim.Max"}
    for node in graph.of(*other):
        if graph.floating(node):
            yield _set(node, "type", other[node["type"]])


def constant_wrong(graph: Graph) -> Iterator[Change]:
    """A coefficient of a transform or an activation, or an end of a type's range."""
    for node in graph.of("ir.FloatImm"):
        if node["data"]["value"] not in (0.0, 1.0):
            yield _set(node["data"], "value", lambda node=node: node["data"]["value"] * 0.75)


def sum_rounded(graph: Graph) -> Iterator[Change]:
    """An accumulator with ten bits of fraction, as if the tolerance were that of float16. Types that round more are left out."""
    for node in graph.of("tirx.BufferStore"):
        number = node["data"]["value"]
        if graph.nodes[number]["type"] == "prim.Add" and graph.dtype(number) == "float32" and not graph.narrow:
            yield _set(node["data"], "value", lambda number=number: graph.ten_bits(number))


def sum_of_sixteen_bits(graph: Graph) -> Iterator[Change]:
    """An accumulator that saturates as 16-bit integers do."""
    for node in graph.of("tirx.BufferStore"):
        number = node["data"]["value"]
        if graph.nodes[number]["type"] == "prim.Add" and graph.dtype(number).startswith("int32"):
            yield _set(node["data"], "value", lambda number=number: graph.saturated(number, -(2**15), 2**15 - 1))


def store_lost(graph: Graph) -> Iterator[Change]:
    """A value that is not stored, but what is there already."""
    for node in graph.of("tirx.BufferStore"):
        value = graph.nodes[node["data"]["value"]]
        if graph.constant(node["data"]["value"]) is None and value["type"] != "ir.TensorLoad":
            yield _set(node["data"], "value", lambda node=node: graph.held(node))


def _array(graph: Graph, numbers: list[int]) -> int:
    graph.nodes.append({"type": "ffi.Array", "data": numbers})
    return len(graph.nodes) - 1


def _zero(graph: Graph, number: int) -> int:
    return graph.add("ir.IntImm", ty=_type(graph, number), value=graph.integer(0))


def _next(graph: Graph, number: int) -> int:
    kind = _type(graph, number)
    return graph.add("prim.Add", ty=kind, a=number, b=graph.add("ir.IntImm", ty=kind, value=graph.integer(1)))


def _type(graph: Graph, number: int) -> int:
    return int(graph.data(number)["ty"])


KINDS: dict[str, Callable[[Graph], Iterator[Change]]] = {
    made.__name__.replace("_", " "): made
    for made in (
        sum_starts_wrong, padding_is_not_zero, condition_shifted, condition_forgotten, loop_ends_early, subtracted, factor_changed,
        axes_swapped, index_stale, index_off_by_one, epilogue_lost, activation_lost, constant_wrong, sum_rounded, sum_of_sixteen_bits,
        store_lost,
    )
}  # fmt: skip


def places(module: tvm.IRModule, kind: str) -> int:
    """How many places a program has for a kind of mistake."""
    return sum(1 for _ in KINDS[kind](Graph(module)))


def broken(module: tvm.IRModule, mistake: Mistake) -> tvm.IRModule:
    """A program with a mistake."""
    graph = Graph(module)
    changes = list(KINDS[mistake.kind](graph))
    changes[mistake.place]()
    return _reordered(graph)


def _reordered(graph: Graph) -> tvm.IRModule:
    """The module; what a node refers to has to come before it."""
    order: list[int] = []
    seen: set[int] = set()

    def visit(number: int) -> None:
        if number in seen:
            return
        seen.add(number)
        for one in _references(graph.nodes[number]):
            visit(one)
        order.append(number)

    visit(graph.graph["root_index"])
    renamed = {old: new for new, old in enumerate(order)}
    nodes = [_renamed(copy.deepcopy(graph.nodes[old]), renamed) for old in order]
    return from_json_graph_str(json.dumps({**graph.graph, "root_index": renamed[graph.graph["root_index"]], "nodes": nodes}))


_PLAIN = {"kind", "iter_type", "ndim", "data_alignment", "offset_factor", "line", "column", "end_line", "end_column"}  # hold numbers


def _references(node: Node) -> list[int]:
    data = node.get("data")
    if node["type"] in ("ffi.Array", "ffi.Map"):
        return list(data or [])
    return [value for name, value in data.items() if _refers(name, value)] if isinstance(data, dict) else []


def _refers(name: str, value: Any) -> bool:
    """Whether a field's value is the number of a node."""
    return isinstance(value, int) and not isinstance(value, bool) and name not in _PLAIN


def _renamed(node: Node, renamed: dict[int, int]) -> Node:
    data = node.get("data")
    if node["type"] in ("ffi.Array", "ffi.Map"):
        node["data"] = [renamed[one] for one in data or []]
    elif isinstance(data, dict):
        for name, value in data.items():
            if _refers(name, value):
                data[name] = renamed[value]
    return node


# --- mistakes in packed filters


@dataclass(frozen=True)
class WrongPack:
    """Packs filters as the kernel's own packing does, after a mistake."""

    pack: Any
    change: str

    def filter(self, conv: Conv2d, w: Array) -> Array:
        """The packed filters."""
        return np.asarray(self.pack.filter(self._seen(conv), PACKS[self.change](w)))

    def _seen(self, conv: Conv2d) -> Conv2d:
        return conv.with_(zero_point=0) if self.change == "zero point forgotten" else conv

    def bias(self, conv: Conv2d, bias: Array) -> Array:
        """The packed bias."""
        return np.asarray(self.pack.bias(self._seen(conv), np.roll(bias, 1) if self.change == "bias in another order" else bias))


def _rounded(w: Array) -> Array:
    """Eight bits of fraction; integers lose their last bit."""
    return (w & ~1 if w.dtype.kind in "iu" else w.astype("float32").view(np.uint32) & np.uint32(0xFFFF8000)).view(
        w.dtype if w.dtype.kind in "iu" else np.float32
    ).astype(w.dtype)  # fmt: skip


def _last_lost(w: Array) -> Array:
    w = w.copy()
    w[-1, -1, -1, -1] = 0
    return w


PACKS: dict[str, Callable[[Array], Array]] = {
    "filter transposed": lambda w: np.ascontiguousarray(w.reshape(*w.shape[:2], -1)[:, :, ::-1].reshape(w.shape)),
    "filters in another order": lambda w: np.roll(w, 1, 0),
    "channels in another order": lambda w: np.roll(w, 1, 1) if w.shape[1] > 1 else np.roll(w, 1, 2),
    "filter rounded": _rounded,
    "last weight lost": _last_lost,
    "bias in another order": np.copy,
    "zero point forgotten": np.copy,
}


# --- broken kernels


@dataclass(frozen=True)
class Broken:
    """A kernel with a mistake: a layer of `LAYERS`, and a mistake of its program, or of its packing."""

    layer: int
    mistake: Mistake | str

    def __str__(self) -> str:
        return f"{' '.join(LAYERS[self.layer])}: {self.mistake}"


def machine() -> Machine:
    """What kernels are built for: the same on every x86-64 with AVX2, so that the programs are the same."""
    host = Machine.host()
    return dataclasses.replace(OLDER, threads=1) if host.isa in ("avx512f", "avx2") else dataclasses.replace(host, threads=1)


def program(layer: int) -> tuple[Conv2d, Any, tvm.IRModule]:
    """Problem, tile and scheduled program of a layer."""
    key, schedule = LAYERS[layer]
    conv = Conv2d.parse(key)
    tile = default_tile(conv, schedule, machine())[1]
    return conv, tile, cpu_lowering.lower(conv, schedule_of(schedule), tile, machine())


def injected() -> list[Broken]:
    """All broken kernels: of each kind at most `PER_KIND` mistakes in a program, far apart from each other."""
    found: list[Broken] = []
    for layer in range(len(LAYERS)):
        conv, _, module = program(layer)
        for kind in KINDS:
            count = places(module, kind)
            apart = sorted({i * count // PER_KIND for i in range(PER_KIND)}) if count else []
            found += [Broken(layer, Mistake(kind, place)) for place in apart]
        lacking = {"filter rounded": conv.dtype == "bfloat16", "bias in another order": not conv.bias}
        lacking["zero point forgotten"] = not (conv.bias and conv.zero_point)
        found += [Broken(layer, change) for change in PACKS if not lacking.get(change, False)]
    return found


def build(one: Broken | int, path: Path) -> tuple[Conv2d, Any, str]:
    """Compiles a broken kernel, or that of a layer as it is, into the library `path`. Returns problem, packing and fingerprint.

    The fingerprint tells whether the lowered program is another one: compilation may simplify a change away.
    """
    conv, tile, module = program(one if isinstance(one, int) else one.layer)
    pack = tile.pack
    if isinstance(one, Broken):
        if isinstance(one.mistake, str):
            pack = WrongPack(pack, one.mistake)
        else:
            module = broken(module, one.mistake)
    compiled = compile_module(module, machine())
    compiled.export(path)
    return conv, pack, compiled.fingerprint

