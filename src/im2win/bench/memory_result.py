"""The result of a run of `bench.cuda_memory`, as data."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path

from im2win.bench.results import SCHEMA, ResultError, check_types, read_values
from im2win.common.files import replace_json

PREFIX = "memory-"  # prefix of the names of its files


@dataclass
class LayerMemory:
    """One layer; bytes beside input, filters and output, by name of the algorithm.

    Attributes:
        tensor_bytes: input, filters and output.
        formula_bytes, measured_bytes: im2win's.
        cudnn_bytes: workspaces of cuDNN's algorithms that accept the layer.
        cudnn_choice: the algorithm that cuDNN's heuristics select.
        torch_bytes: PyTorch's, in both layouts.
        failed: why there is no number, or what is wrong with a measured one.
    """

    layer: str
    conv: str
    tensor_bytes: int
    formula_bytes: dict[str, int] = field(default_factory=dict)
    measured_bytes: dict[str, int] = field(default_factory=dict)
    torch_bytes: dict[str, int] = field(default_factory=dict)
    cudnn_bytes: dict[str, int] = field(default_factory=dict)
    cudnn_choice: str | None = None
    failed: dict[str, str] = field(default_factory=dict)


@dataclass
class MemoryResult:
    """One run: the machine, the versions and a row for each layer. Schemas and `digests` are those of `results.Result`."""

    suite: str
    dtype: str
    batch: int | None
    device: str
    brand: str
    versions: dict[str, str]
    commit: str
    date: str
    layers: list[LayerMemory] = field(default_factory=list)
    digests: dict[str, str] = field(default_factory=dict)
    schema: int = SCHEMA

    def save(self, path: Path) -> Path:
        """Writes JSON and creates the folder. Returns the path.

        Raises:
            ResultError: see `check_path`.
        """
        check_path(path)
        return replace_json(path, asdict(self))

    @classmethod
    def load(cls, path: Path) -> MemoryResult:
        """Reads a file of `save`, of this schema or an older one.

        Raises:
            ResultError: no such file, not JSON, another schema, or missing or unknown fields, or a field of another type.
        """
        values = read_values(path)
        try:
            found = cls(**{**values, "layers": [LayerMemory(**row) for row in values["layers"]]})
        except (TypeError, KeyError) as error:
            raise ResultError(f"{path}: its fields must be those of schema {SCHEMA} ({error}).") from error
        check_types(path, found)
        return found


def check_path(path: Path) -> None:
    """Raises ResultError if reports would not find a memory result under this name."""
    if not (path.name.startswith(PREFIX) and path.suffix == ".json"):
        raise ResultError(f"{path}: the name of a result of memory must begin with {PREFIX!r} and end with '.json'.")
