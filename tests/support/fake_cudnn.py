"""A stand-in for the module `cudnn` of nvidia-cudnn-frontend: graphs that PyTorch computes on the CPU, with plans that a test lists."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

TYPES = {
    "FLOAT": torch.float32, "HALF": torch.float16, "BFLOAT16": torch.bfloat16, "INT8": torch.int8, "UINT8": torch.uint8,
    "INT32": torch.int32, "FP8_E4M3": torch.float8_e4m3fn,
}  # fmt: skip
BYTES = {"FP8_E4M3": torch.int8}  # as which tensors of a type come
OPERATIONS: dict[str, Callable[..., Any]] = {
    "add": torch.add,
    "mul": torch.mul,
    "min": torch.minimum,
    "identity": lambda y: y,
    "relu": torch.relu,
    "swish": torch.nn.functional.silu,
    "leaky_relu": torch.nn.functional.leaky_relu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "gelu": torch.nn.functional.gelu,
    "gelu_approx_tanh": lambda y: torch.nn.functional.gelu(y, approximate="tanh"),
}


@dataclass(frozen=True)
class Plan:
    """A plan that cuDNN lists.

    Attributes:
        notes: numerical notes.
        does: "right", "wrong" (its outputs are one too large), or the message of its refusal.
    """

    name: str
    notes: tuple[str, ...] = ()
    does: str = "right"
    workspace: int = 0


@dataclass(eq=False)
class Tensor:
    """A tensor of a graph and the operation that makes it."""

    dim: list[int] | None = None
    stride: list[int] | None = None
    dtype: str = "FLOAT"
    value: Callable[[dict[Any, Any]], Any] | None = None
    output: bool = False

    def set_output(self, on: bool) -> Tensor:
        self.output = on
        return self

    def set_data_type(self, dtype: str) -> Tensor:
        self.dtype = dtype
        return self

    def set_dim(self, dim: list[int]) -> Tensor:
        self.dim = dim
        return self

    def set_stride(self, stride: list[int]) -> Tensor:
        self.stride = stride
        return self

    def of(self, pack: dict[Any, Any]) -> Any:
        """Its value, from the tensors that a caller gave; sums are kept as they are, in float64."""
        if self.value is not None:
            return self.value(pack)
        given = pack[self]
        assert list(given.shape) == self.dim and given.dtype == BYTES.get(self.dtype, TYPES[self.dtype])
        given = given.view(TYPES[self.dtype])
        wanted = [one for one, size in zip(self.stride or (), given.shape, strict=True) if size > 1]
        assert [one for one, size in zip(given.stride(), given.shape, strict=True) if size > 1] == wanted
        return given.double()


@dataclass
class Graph:
    """cudnn.pygraph."""

    plans: Sequence[Plan]
    operations: list[str]
    modes: list[str] = field(default_factory=list)
    excluded: list[str] = field(default_factory=list)
    built: list[int] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)

    def tensor(self, *, name: str, dim: list[int], stride: list[int], data_type: str) -> Tensor:
        return Tensor(dim, stride, data_type)

    def conv_fprop(
        self, *, image: Tensor, weight: Tensor, pre_padding: Any, post_padding: Any, stride: Any, dilation: Any, **_: Any,
    ) -> Tensor:
        assert image.dim is not None and weight.dim is not None
        groups = image.dim[1] // weight.dim[1]
        sides = (pre_padding[1], post_padding[1], pre_padding[0], post_padding[0])

        def value(pack: dict[Any, Any]) -> Any:
            x = torch.nn.functional.pad(image.of(pack), sides)
            return torch.nn.functional.conv2d(x, weight.of(pack), None, stride, 0, dilation, groups)

        return self._made("conv_fprop", value)

    def __getattr__(self, name: str) -> Any:
        if name not in OPERATIONS:
            raise AttributeError(name)

        def operation(*inputs: Tensor, compute_data_type: str, **numbers: float) -> Tensor:
            return self._made(name, lambda pack: OPERATIONS[name](*(one.of(pack) for one in inputs), **numbers))

        return operation

    def _made(self, name: str, value: Callable[[dict[Any, Any]], Any]) -> Tensor:
        self.operations.append(name)
        made = Tensor(value=value)
        self.outputs.append(made)
        return made

    def validate(self) -> None:
        assert sum(one.output for one in self.outputs) == 1

    def build_operation_graph(self) -> None:
        if not self.plans:
            raise NotSupported("No valid engine configs for ConvFwd\n{engine 9}")

    def create_execution_plans(self, modes: list[str]) -> None:
        self.modes += modes

    def deselect_numeric_notes(self, notes: list[str]) -> None:
        self.excluded += notes

    def get_execution_plan_count(self) -> int:
        return len(self.plans)

    def get_plan_name_at_index(self, index: int) -> str:
        return self.plans[index].name

    def build_plan_at_index(self, index: int) -> None:
        if set(self.plans[index].notes) & set(self.excluded):
            raise NotSupported("Deselecting execution plan")
        self.built.append(index)

    def get_workspace_size_plan_at_index(self, index: int) -> int:
        assert index in self.built
        return self.plans[index].workspace

    def execute_plan_at_index(self, pack: dict[Any, Any], workspace: Any, index: int, handle: Any) -> None:
        plan = self.plans[index]
        assert handle == "handle" and workspace.numel() >= plan.workspace
        if plan.does not in ("right", "wrong"):
            raise RuntimeError(plan.does)
        [out] = [one for one in self.outputs if one.output]
        into, dtype = pack[out], TYPES[out.dtype]
        assert list(into.shape) == out.dim and into.dtype == BYTES.get(out.dtype, dtype)
        into = into.view(dtype)
        result = out.of(pack) + (plan.does == "wrong")
        into.copy_(result if dtype.is_floating_point else result.round().clamp(torch.iinfo(dtype).min, torch.iinfo(dtype).max))


class NotSupported(RuntimeError):
    """cudnn.cudnnGraphNotSupportedError."""


class Names:
    """An enumeration whose members are their names."""

    def __getattr__(self, name: str) -> str:
        return name


def module(plans: Callable[[list[str]], Sequence[Plan]]) -> Any:
    """The module, and in `graphs` the graphs that were made of it.

    Args:
        plans: the plans of a graph that has these operations so far; called when it is built.
    """
    graphs: list[Graph] = []

    class Lazy(Graph):
        def build_operation_graph(self) -> None:
            self.plans = plans(self.operations)
            super().build_operation_graph()

    def pygraph(**_: Any) -> Graph:
        graphs.append(Lazy([], []))
        return graphs[-1]

    return SimpleNamespace(
        pygraph=pygraph, data_type=Names(), heur_mode=Names(), numerical_note=Names(), create_handle=lambda: "handle",
        set_stream=lambda handle, stream: None, graphs=graphs,
    )
