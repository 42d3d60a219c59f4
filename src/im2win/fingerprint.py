"""A short hash of the code that turns a tile into a kernel: a record made with other code no longer applies.

What counts is what Python executes: comments, docstrings and layout do not.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
from pathlib import Path
from types import ModuleType
from typing import Any

from im2win import (
    chunk_packing,
    codegen,
    cuda_packing,
    packing,
    quantised_packing,
    reconstruct,
    split_packing,
    straight_line,
    winograd,
    winograd_packing,
    winograd_tiles,
)
from im2win.algorithms import ALGORITHMS
from im2win.compute import lowered, nest
from im2win.schedules import cpu, cuda, registers, tails, tile, turn
from im2win.schedules.cuda_family import CudaFamily
from im2win.schedules.persistent.plan import PersistentPlan
from im2win.schedules.split.plan import SplitPlan
from im2win.schedules.streamed.plan import StreamedPlan
from im2win.schedules.winograd import cpu as winograd_cpu
from im2win.schedules.winograd import tile as winograd_tile
from im2win.schedules.winograd import turn as winograd_turn

_FORM = (winograd, straight_line, winograd_packing)  # of Winograd's convolution: what CPU and CUDA share

# What every CPU kernel goes through, by the family of its scheduler. Files that only choose tiles (model, space) or other schedules
# (ladder) do not count.
_PIPELINES: dict[str, tuple[ModuleType, ...]] = {
    "windows": (codegen, packing, cpu, registers, tails, tile, turn),
    "winograd": (codegen, registers, tails, turn, winograd_cpu, winograd_tile, winograd_turn, *_FORM),
    "none": (),
}


# And every CUDA kernel; choosing tiles and kernels that no tile makes do not count there, either.
_NOT_TUNED = ("ladder", "ladder_kernel", "legality", "model", "sliding", "space")
# files that only one algorithm's kernels go through
_OF_ONE = {"parts": "mcfa", "winograd": "winograd", "winograd_transforms": "winograd"}

_OF_PERSISTENT = ("cluster", "epilogue", "instructions", "kernel", "matrix", "pipeline", "requantise", "shared")  # of schedules/cuda

_NOT_RUN = ("ctx", "kind", "type_comment")  # fields of a syntax tree that say nothing more, or nothing at all


def _definition(module: ModuleType) -> list[ModuleType]:
    """A definition's module and the modules of compute/ that it uses."""
    used = [value for value in vars(module).values() if inspect.ismodule(value) and value.__name__.startswith("im2win.compute.")]
    return [module, *used]


def _has_docstring(body: Any) -> bool:
    first = body[0] if isinstance(body, list) and body else None
    return isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)


def _plain(node: Any) -> str:
    """A syntax tree as text, the same for every version of Python that can run it: fields that are empty or say only where, left out."""
    if isinstance(node, ast.AST):
        fields: dict[str, Any] = {name: getattr(node, name, None) for name in sorted(node._fields) if name not in _NOT_RUN}
        if _has_docstring(fields.get("body")):
            fields["body"] = fields["body"][1:]
        return f"{type(node).__name__}({','.join(f'{name}={_plain(value)}' for name, value in fields.items() if value not in (None, []))})"
    if isinstance(node, list):
        return f"[{','.join(map(_plain, node))}]"
    return repr(node)


def code_hash(sources: dict[str, str]) -> str:
    """Twelve hexadecimal digits of what these sources, by module name, execute."""
    digest = hashlib.sha256()
    for name, source in sorted(sources.items()):
        digest.update(f"{name}:{_plain(ast.parse(source))}".encode())
    return digest.hexdigest()[:12]


def _cuda_sources(algorithm: str) -> dict[str, str]:
    """Sources of the CUDA schedules, by module name; device functions as one string, since C++ is not parsed here."""
    folder = Path(cuda.__file__).parent
    paths = [path for path in folder.glob("*.py") if path.stem not in _NOT_TUNED and _OF_ONE.get(path.stem, algorithm) == algorithm]
    sources = {f"{cuda.__name__}.{path.stem}": path.read_text() for path in paths}
    device = "".join((folder / f"{stem}.hpp").read_text() for stem in ("device", "requantise", "cluster"))
    sources["device"] = f"DEVICE = {device!r}"
    of_one = (*_FORM, winograd_tiles) if algorithm == "winograd" else ()
    return sources | {module.__name__: inspect.getsource(module) for module in (cuda_packing, packing, lowered, nest, *of_one)}


def _fused_sources() -> dict[str, str]:
    """Sources of kernels that the reconstructor makes what they are, or that do everything at once, by module name; see `_cuda_sources`."""
    shared = Path(cuda.__file__).parent
    own, rules = shared.parent / "winograd_tc", Path(reconstruct.__file__).parent
    paths = {f"winograd_tc.{path.stem}": path for path in own.glob("*.py") if path.stem not in _NOT_TUNED}
    paths |= {f"cuda.{stem}": shared / f"{stem}.py" for stem in ("epilogue", "kernel", "pipeline", "shared")}
    paths |= {f"reconstruct.{path.stem}": path for path in rules.glob("*.py") if path.stem not in ("hip", "judges")}
    paths |= {stem: Path(__file__).parent / f"{stem}.py" for stem in ("cuda_fused", "cuda_reconstruct")}
    sources = {name: path.read_text() for name, path in paths.items()}
    device = "".join((folder / "device.hpp").read_text() for folder in (shared, own))
    sources["device"] = f"DEVICE = {device!r}"
    return sources | {one.__name__: inspect.getsource(one) for one in (*_FORM, cuda_packing, quantised_packing)}


def _persistent_sources() -> dict[str, str]:
    """Sources of kernels whose blocks stay, by module name; device functions as in `_cuda_sources`."""
    shared = Path(cuda.__file__).parent
    own = shared.parent / "persistent"
    paths = {f"persistent.{path.stem}": path for path in own.glob("*.py") if path.stem not in _NOT_TUNED}
    paths |= {f"cuda.{stem}": shared / f"{stem}.py" for stem in _OF_PERSISTENT}
    sources = {name: path.read_text() for name, path in paths.items()}
    headers = (shared / "device.hpp", own / "device.hpp", shared / "requantise.hpp", shared / "cluster.hpp")
    device = "".join(path.read_text() for path in headers)
    packing_ = {module.__name__: inspect.getsource(module) for module in (chunk_packing, cuda_packing)}
    return {**sources, **packing_, "device": f"DEVICE = {device!r}"}


def _streamed_sources() -> dict[str, str]:
    """Sources of kernels whose filters and windows come in steps: those of kernels whose blocks stay, which they extend, and their own."""
    own, sources = Path(cuda.__file__).parent.parent / "streamed", _persistent_sources()
    kernel = {f"streamed.{path.stem}": path.read_text() for path in own.glob("*.py") if path.stem not in _NOT_TUNED}
    device = ast.literal_eval(sources["device"].removeprefix("DEVICE = ")) + (own / "device.hpp").read_text()
    return {**sources, **kernel, "device": f"DEVICE = {device!r}"}


def _split_sources() -> dict[str, str]:
    """Sources of kernels that compute parts of sums, by module name."""
    own = Path(cuda.__file__).parent.parent / "split"
    kernel = {f"split.{stem}": (own / f"{stem}.py").read_text() for stem in ("kernel", "tile")}
    return {**_cuda_sources("implicit_gemm"), **kernel, "split_packing": inspect.getsource(split_packing)}


@functools.cache
def fingerprint(algorithm: str, target: str = "cpu") -> str:
    """Twelve hexadecimal digits that change when the code behind this algorithm's kernels does."""
    row = ALGORITHMS[algorithm]
    if target == "cuda" and isinstance(row.cuda, CudaFamily):
        families = {PersistentPlan: _persistent_sources, SplitPlan: _split_sources, StreamedPlan: _streamed_sources}
        return code_hash(families.get(type(row.cuda), _fused_sources)())
    if target == "cuda":
        return code_hash({**_cuda_sources(algorithm), "plan": f"PLAN = {str(row.cuda)!r}"})
    definition = inspect.getmodule(row.define)
    assert definition is not None
    modules = (*_PIPELINES[row.scheduler.family], *_definition(definition))
    return code_hash({module.__name__: inspect.getsource(module) for module in modules})
