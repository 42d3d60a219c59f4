"""Traces a module with torch.fx, verifies the graph on an example, and turns graphs into functions."""

from __future__ import annotations

import inspect
import linecache
import operator
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import fx, nn
from torch.utils._pytree import tree_flatten

from im2win.frontends.torch.source import Source, as_image, as_line

_GUARDS = "GuardsFn"  # the class of the module that checks the inputs of an exported program
_PLAIN = (type(None), bool, int, float, str)


class TraceFailure(Exception):
    """A module that torch.fx cannot trace so that the graph computes the same. The message says why."""


@dataclass
class Traced:
    """A module's graph, the facts of each node's output, and the arguments of the traced call.

    Attributes:
        facts: (shape, dtype, device) of nodes that compute tensors.
        given: number of arguments of the example.
        steps: (scale, zero point) of nodes that compute PyTorch's quantised tensors with one scale.
    """

    module: nn.Module
    graph: fx.Graph
    facts: dict[fx.Node, tuple[Any, ...]]
    given: int
    steps: dict[fx.Node, tuple[float, int]] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """What the module runs on the example, in words that tell different modules apart."""
        return "\n".join([repr(self.module), str(self.graph), *map(str, self.facts.values())])


class _Facts(fx.Interpreter):
    """Runs a graph with PyTorch's own modules and records facts of its nodes' outputs."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.facts: dict[fx.Node, tuple[Any, ...]] = {}
        self.steps: dict[fx.Node, tuple[float, int]] = {}

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if isinstance(result, torch.Tensor):
            self.facts[n] = result.shape, result.dtype, result.device
            if result.is_quantized and result.qscheme() == torch.per_tensor_affine:
                self.steps[n] = result.q_scale(), result.q_zero_point()
        return result


def norms() -> tuple[type[nn.Module], ...]:
    """The classes of batch normalisations: PyTorch's, and torchvision's with fixed statistics if torchvision is in use."""
    frozen = getattr(sys.modules.get("torchvision.ops.misc"), "FrozenBatchNorm2d", None)
    return (nn.BatchNorm1d, nn.BatchNorm2d) if frozen is None else (nn.BatchNorm1d, nn.BatchNorm2d, frozen)


class _Tracer(fx.Tracer):
    """Leaves normalisations whole: the forward of a fixed one computes with its statistics alone, which a trace would freeze.

    Args:
        buffers: read buffers by name. What a module computes of buffers alone would be frozen otherwise; but it cannot branch on them then.
    """

    def __init__(self, *, buffers: bool) -> None:
        super().__init__()
        self.proxy_buffer_attributes = buffers

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return type(m) in norms() or type(m).__name__ == _GUARDS or bool(super().is_leaf_module(m, module_qualified_name))


def trace(module: nn.Module, example: tuple[Any, ...]) -> Traced:
    """The graph of a module in eval mode, verified on an example: run node by node it returns what the module returns.

    Raises:
        TraceFailure: the module cannot be traced, or the graph computes something else.
    """
    before = set(vars(module))
    try:
        graph = _Tracer(buffers=isinstance(module, fx.GraphModule)).trace(module, _concrete(module, example))
    except TraceFailure:
        raise
    except Exception as error:  # the module's own code may raise any class for a proxy
        first = (str(error).strip() or "no message").splitlines()[0]
        raise TraceFailure(f"torch.fx cannot trace it ({type(error).__name__}: {first})") from error
    finally:
        constants = [name for name in vars(module) if name not in before]
        for name in constants:
            delattr(module, name)
    if constants:
        raise TraceFailure("its forward makes tensors of its own, which a trace would freeze")
    facts = _prove(module, graph, example)
    _drop_rank_checks(graph, facts.facts)
    return Traced(module, graph, facts.facts, len(example), facts.steps)


def _concrete(module: nn.Module, example: tuple[Any, ...]) -> dict[str, Any]:
    """The values that the trace fixes: arguments of the example that are no tensors, and defaults of those not given."""
    bound = inspect.signature(module.forward).bind(*example)
    given = set(bound.arguments)
    bound.apply_defaults()
    kinds = {name: one.kind for name, one in inspect.signature(module.forward).parameters.items()}
    fixed = {}
    for name, value in bound.arguments.items():
        if kinds[name] in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
            if value:
                raise TraceFailure(f"its forward takes any number of arguments (`{name}`)")
        elif not isinstance(value, torch.Tensor):
            if not isinstance(value, _PLAIN):
                raise TraceFailure(f"its argument `{name}` is a {type(value).__name__}, neither a tensor nor a plain value")
            if name in given and value is not None:
                raise TraceFailure(f"its argument `{name}` is no tensor")
            fixed[name] = value
    return fixed


def _prove(module: nn.Module, graph: fx.Graph, example: tuple[Any, ...]) -> _Facts:
    want = module(*copies(example))
    _order_dicts(graph, want)
    runner = _Facts(fx.GraphModule(module, graph))
    try:
        runner.run(*copies(example))
        got, shape = tree_flatten(compiled(graph, {}, {})(module, *copies(example)))
    except Exception as error:  # the module's own code may raise any class
        raise TraceFailure(f"its traced graph does not run ({type(error).__name__}: {error})") from error
    leaves, wanted_shape = tree_flatten(want)
    if shape != wanted_shape or not all(map(_same, got, leaves)):
        raise TraceFailure("its traced graph computes something else than the module")
    return runner


def _order_dicts(graph: fx.Graph, want: Any) -> None:
    """Makes the dictionaries of a graph's output ordered ones where the module's are: torch.fx keeps their items, not their type."""
    [output] = [node for node in graph.nodes if node.op == "output"]

    def typed(value: Any, want: Any) -> Any:
        if isinstance(value, dict) and isinstance(want, dict) and list(value) == list(want):
            items = {key: typed(value[key], want[key]) for key in value}
            return graph.call_function(OrderedDict, (items,)) if type(want) is OrderedDict else items
        if type(value) is type(want) and isinstance(value, (list, tuple)) and len(value) == len(want):
            return type(value)(map(typed, value, want)) if type(value) in (list, tuple) else value
        return value

    with graph.inserting_before(output):
        output.args = (typed(output.args[0], want),)


def _drop_rank_checks(graph: fx.Graph, facts: dict[fx.Node, tuple[Any, ...]]) -> None:
    """Removes assertions about the number of dimensions of tensors that hold on the example, since they would count as readers."""

    def rank_of(node: Any) -> int | None:
        read = isinstance(node, fx.Node) and node.target is getattr and node.args[1] == "ndim" and node.args[0] in facts
        return len(facts[node.args[0]][0]) if read else None

    for node in list(graph.nodes):
        equal = node.args[0] if node.target is torch._assert else None
        if isinstance(equal, fx.Node) and equal.target is operator.eq and rank_of(equal.args[0]) == equal.args[1]:
            graph.erase_node(node)
    for node in reversed(list(graph.nodes)):
        if not node.users and (rank_of(node) is not None or (node.target is operator.eq and rank_of(node.args[0]) is not None)):
            graph.erase_node(node)


def copies(example: tuple[Any, ...]) -> tuple[Any, ...]:
    """The example with copied tensors, since a module may write into its inputs."""
    return tuple(one.clone() if isinstance(one, torch.Tensor) else one for one in example)


def _same(a: Any, b: Any) -> bool:
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return a is b or (isinstance(a, _PLAIN) and a == b)
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not a.is_floating_point():
        return torch.equal(a, b)
    return torch.allclose(a, b, rtol=1e-3, atol=1e-3 * float(b.abs().max()) if b.numel() else 0.0, equal_nan=True)


class Pattern(Protocol):
    """Nodes that one operator computes, and what it reads; see `patterns.Pattern`."""

    nodes: list[fx.Node]
    x: fx.Node
    source: Source
    added: fx.Node | None
    operands: tuple[fx.Node, ...]


Call = tuple[str, Any, tuple[Any, ...]]  # kind and target of a torch.fx node, and its last arguments


def compiled(graph: fx.Graph, patterns: Mapping[str, Pattern], calls: Mapping[str, Call]) -> Callable[..., Any]:
    """The graph as a function of the module and its arguments, with each pattern replaced by a call.

    Args:
        calls: by the patterns' names. Their first arguments are the pattern's input and its residual, None without one.
    """
    new = fx.Graph(tracer_cls=getattr(graph, "_tracer_cls", None))
    mapped: dict[fx.Node, fx.Node] = {}
    output = new.graph_copy(graph, mapped)
    new.output(output)
    for name, pattern in patterns.items():
        nodes = [mapped[node] for node in pattern.nodes]
        kind, target, last = calls[name]
        given = [mapped[pattern.x], None if pattern.added is None else mapped[pattern.added]]
        with new.inserting_before(nodes[-1]):
            if pattern.source.line:
                given = [None if one is None else new.call_function(as_image, (one,)) for one in given]
            call = new.create_node(kind, target, (*given, *last))
            if pattern.source.line:
                call = new.call_function(as_line, (call,))
        nodes[-1].replace_all_uses_with(call)
        mapped[pattern.nodes[-1]] = call  # a later pattern may read it
        for node in reversed(nodes):
            new.erase_node(node)
    needless = {mapped[node] for pattern in patterns.values() for node in pattern.operands}
    for node in reversed(list(new.nodes)):
        if (node.op == "get_attr" or node in needless) and not node.users:
            new.erase_node(node)
    return _function(new)


def alone(traced: Traced, pattern: Pattern) -> Callable[..., Any] | None:
    """A pattern's nodes as a function of the module, the pattern's input and its residual: what PyTorch runs without im2win.

    None if the nodes read anything else that is computed.
    """
    new = fx.Graph(tracer_cls=getattr(traced.graph, "_tracer_cls", None))
    mapped = {pattern.x: new.placeholder("x")}
    added = new.placeholder("added")
    if pattern.added is not None:
        mapped[pattern.added] = added
    outside: list[fx.Node] = []

    def copied(node: fx.Node) -> fx.Node:
        if node not in mapped:
            outside.extend([node] if node.op != "get_attr" else [])
            mapped[node] = new.node_copy(node) if node.op == "get_attr" else mapped[pattern.x]
        return mapped[node]

    inside = set(pattern.nodes)
    for node in traced.graph.nodes:
        if node in inside:
            mapped[node] = new.node_copy(node, copied)
    new.output(mapped[pattern.nodes[-1]])
    return None if outside else _function_when_called(new)


def _function_when_called(new: fx.Graph) -> Callable[..., Any]:
    """As `_function`, compiled at the first call, since most paths are timed only once."""
    made: list[Callable[..., Any]] = []

    def run(*given: Any) -> Any:
        if not made:
            made.append(_function(new))
        return made[0](*given)

    return run


def _function(new: fx.Graph) -> Callable[..., Any]:
    """A graph as a function of the module and the graph's inputs."""
    code = new.python_code("self")
    namespace = dict(code.globals)
    name = f"<im2win.torch {id(new):x}>"
    lines = code.src.splitlines(keepends=True)
    linecache.cache[name] = (len(code.src), None, lines, name)
    exec(compile(code.src, name, "exec"), namespace)
    forward: Callable[..., Any] = namespace["forward"]
    return forward
