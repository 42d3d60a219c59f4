"""CUDA kernels on the emulator: from a problem, algorithms and tiles to outputs."""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from oracle import Array, Tensors, exact_tensors

from im2win.codegen import cuda as cuda_codegen
from im2win.codegen.cuda_source import Generated
from im2win.device.gpu import H200
from im2win.emulator import Emulation, EmulationError, Launch, TensorMap
from im2win.numerics.reference import reference
from im2win.registry import cuda_lowering
from im2win.registry.schedules import SCHEDULES, schedule_of
from im2win.schedules.cuda.families.multistage import OutputParts
from im2win.schedules.cuda.families.scheduled import Scheduled
from im2win.schedules.cuda.kernels.output_parts import WindowsInParts
from im2win.schedules.cuda.space.multistage import products
from im2win.schedules.cuda.tiles.multistage import MultistageTile
from im2win.schedules.cuda.tiles.persistent import PersistentTile
from im2win.schedules.studies.winograd_tc.tile import TensorCoreTile
from im2win.spec.conv2d import Conv2d

# MCFA with parts so small that the problems of tests have several: rows of an image, or some small images.
SMALL_PARTS = WindowsInParts("ncuvmx", wanted_bytes=20 << 10, least_outputs=1)
ROWS = {**SCHEDULES, "mcfa/tiled": replace(schedule_of("mcfa/tiled"), cuda=OutputParts(SMALL_PARTS))}
MARK = 'extern "C"'  # the kernels begin here; before it are the device functions
OWN = (
    "direct/persistent", "direct/warp_specialized", "implicit_gemm/split_k", "winograd/tiled", "winograd/tensor_cores",
    *(name for name, row in SCHEDULES.items() if isinstance(row.cuda, Scheduled)),
)  # with tests of their own
POISON = 4096  # bytes before and behind every input that no sum may see
Kernel = tuple[str, MultistageTile | TensorCoreTile | PersistentTile]
"""(algorithm, tile)"""


@dataclass(frozen=True)
class Made:
    """A kernel that comes from no algorithm's tile: its source, how it reads filters, elements of the tensor made first."""

    name: str
    generated: Generated
    pack: Any
    lowered: int = 0


_DEFINITION = re.compile(r"_kernel(?:_\d+)?\(([^()]*)\) \{\n")
_INPUT = re.compile(r"\b(?!output_ptr)(\w+_ptr(?:_\d+)?)(?:,|$)")


# --- kernels


@functools.lru_cache(maxsize=512)
def generated(conv: Conv2d, algorithm: str, tile: MultistageTile | TensorCoreTile | PersistentTile) -> Generated:
    """Source and launches for an H200."""
    return cuda_codegen.generate_source(cuda_lowering.lower(conv, ROWS[algorithm], tile, H200, overlap=False), H200)


def forget() -> None:
    """Generates the source of every kernel anew."""
    generated.cache_clear()


def cuda_algorithms(conv: Conv2d) -> list[str]:
    """Names of the algorithms that compute this problem on CUDA as it stands; Winograd's form has tests of its own."""
    return [name for name, row in ROWS.items() if name not in OWN and row.supports(conv, "cuda") is None]


@functools.lru_cache(maxsize=512)
def _space(conv: Conv2d, algorithm: str) -> list[MultistageTile]:
    return ROWS[algorithm].on_gpu.space(conv, H200, "winograd")


@functools.lru_cache(maxsize=512)
def tiles(conv: Conv2d, algorithm: str, product: str) -> tuple[MultistageTile, ...]:
    """The tiles that a tuner would sample."""
    return tuple(tile for tile in _space(conv, algorithm) if tile.product == product)


def sampled(conv: Conv2d, algorithm: str, product: str, count: int = 1) -> list[Kernel]:
    """Kernels with tiles drawn from the space, the same ones every time."""
    found = tiles(conv, algorithm, product)
    draw = random.Random(f"{conv} {algorithm} {product}")
    return [(algorithm, tile) for tile in draw.sample(found, min(count, len(found)))]


def everywhere(conv: Conv2d, count: int = 1) -> list[Kernel]:
    """Sampled kernels of every algorithm with every kind of arithmetic."""
    return [kernel for name in cuda_algorithms(conv) for product in products(conv, H200) for kernel in sampled(conv, name, product, count)]


def in_turn(conv: Conv2d) -> list[Kernel]:
    """A sampled kernel of every algorithm, with the kinds of arithmetic in turn, as far as an algorithm has them."""
    kernels = []
    for i, name in enumerate(cuda_algorithms(conv)):
        kinds = [product for product in products(conv, H200) if tiles(conv, name, product)]
        kernels += sampled(conv, name, kinds[i % len(kinds)]) if kinds else []
    return kernels


def made(conv: Conv2d, kernel: Kernel | Made) -> Made:
    """A kernel with all that is needed to run it."""
    if isinstance(kernel, Made):
        return kernel
    algorithm, tile = kernel
    schedule = ROWS[algorithm].on_gpu
    lowered = schedule.workspace_bytes(conv, tile) // conv.itemsize
    return Made(f"{algorithm} {tile}", generated(conv, algorithm, tile), schedule.pack(conv, tile), lowered)


def combined(conv: Conv2d, kernels: Sequence[Kernel | Made], edit: Callable[[str], str] = str) -> tuple[str, list[Launch]]:
    """One source with all kernels of a problem, numbered, and their launches; a kernel's own tensors get its number, too.

    Args:
        edit: changes the source of each, which begins at `MARK`.
    """
    heads, bodies, launches = set[str](), [], []
    for i, kernel in enumerate(kernels):
        one = made(conv, kernel).generated
        head, mark, body = one.source.partition(MARK)
        heads.add(head)
        bodies.append(re.sub(r"\b(conv2d|transform|transform_parts)_kernel(_\d+)?\b", rf"\1_{i}_kernel\2", edit(mark + body)))
        products = [launch for launch in one.launches if launch.kernel.startswith("conv2d_kernel")]
        transforms = [launch for launch in one.launches if launch.kernel == "transform_kernel"]
        stored = transforms or "conv2d_kernel_1" in {launch.kernel for launch in products}  # the whole tensor, or a part at a time
        parts = {name: f"lowered_{i}" for name in ("data", "tiles", "products")}  # of one tensor
        own = {name: f"{name}_{i}" for name in ("filter", "output")} | ({"input": "data", **parts} if stored else {})
        launches += [_numbered(launch, i, {"lowered": f"lowered_{i}"}) for launch in transforms]
        launches += [_numbered(launch, i, own) for launch in products]
    return max(heads, key=len) + "\n".join(bodies), launches  # TVM leaves out of a head what its kernel does not use


def _numbered(launch: Launch, i: int, renamed: dict[str, str]) -> Launch:
    def named(one: str | int | TensorMap) -> str | int | TensorMap:
        if isinstance(one, TensorMap):
            return replace(one, tensor=renamed.get(one.tensor, one.tensor))
        return renamed.get(one, one) if isinstance(one, str) else one

    arguments = tuple(map(named, launch.arguments))
    return replace(launch, kernel=launch.kernel.replace("_kernel", f"_{i}_kernel"), arguments=arguments)


# --- tensors


def typed(conv: Conv2d, tensors: Tensors) -> Tensors:
    """Tensors as kernels take them."""
    return {name: array.astype(conv.dtypes[name]) for name, array in tensors.items()}


def expected(conv: Conv2d, tensors: Tensors) -> Array:
    """The float64 reference of typed tensors, rounded once to the output's type."""
    y = reference(conv, tensors["data"], tensors["filter"], *map(tensors.get, ("bias", "residual", "scale")))
    return y.astype(conv.out_dtype)


def _poison(size: int, dtype: str) -> Array:
    return np.full(size, np.nan if dtype.startswith("float") else 111, dtype)


def _surrounded(array: Array) -> Array:
    """A flat copy between poison."""
    zone = _poison(POISON // array.itemsize, str(array.dtype))
    return np.concatenate([zone, array.ravel(), zone])


def _behind_poison(source: str) -> str:
    """Moves the addresses of all tensors but the output behind the poison before them."""

    def moved(match: re.Match[str]) -> str:
        return match[0] + "".join(f"  {name} += {POISON} / sizeof(*{name});\n" for name in _INPUT.findall(match[1]))

    return _DEFINITION.sub(moved, source)


def _maps_behind_poison(launch: Launch) -> Launch:
    """The same for maps of tensors."""
    given = (replace(one, offset=POISON) if isinstance(one, TensorMap) else one for one in launch.arguments)
    return replace(launch, arguments=tuple(given))


# --- runs


class Emulated:
    """Kernels of one problem, compiled together: most of a compilation is the emulator's headers.

    Args:
        edit: see `combined`.
    """

    def __init__(self, conv: Conv2d, kernels: Sequence[Kernel | Made], edit: Callable[[str], str] = str) -> None:
        self.conv, self.kernels = conv, tuple(made(conv, kernel) for kernel in kernels)
        source, launches = combined(conv, self.kernels, edit)
        self._emulation = Emulation(_behind_poison(source), [_maps_behind_poison(launch) for launch in launches])

    def __call__(self, tensors: Tensors, seed: int = 0, resident: int = 1) -> list[Array]:
        """The output of every kernel, for tensors named as in `conv.arguments` (see `typed`), with so many blocks running in turns.

        Inputs lie between poison, so that a read outside that reaches a sum shows; outputs start as poison between guards.

        Raises:
            EmulationError: a kernel breaks a rule of CUDA, or writes outside its tensors.
        """
        conv = self.conv
        given = {name: _surrounded(array) for name, array in tensors.items() if name != "filter"}
        for i, kernel in enumerate(self.kernels):
            given[f"filter_{i}"] = _surrounded(kernel.pack.filter(conv, tensors["filter"]))
            given[f"lowered_{i}"] = _surrounded(_poison(kernel.lowered, conv.dtype))
            unwritten = _poison(int(np.prod(conv.output_shape)), conv.out_dtype)
            given[f"output_{i}"] = unwritten + seed % 2 if conv.out_dtype == "int8" else unwritten  # two runs: no output has both values
        self._emulation(given, seed, resident)
        for i in range(len(self.kernels)):
            lowered = given[f"lowered_{i}"]
            size = POISON // lowered.itemsize
            for zone in (lowered[:size], lowered[-size:]):
                poison = _poison(size, conv.dtype)
                np.testing.assert_array_equal(zone.view(np.uint8), poison.view(np.uint8), "written outside the lowered tensor")
        return [given[f"output_{i}"].reshape(conv.output_shape) for i in range(len(self.kernels))]


def differences(conv: Conv2d, kernels: Sequence[Kernel | Made], found: Sequence[Array], right: Array) -> list[str]:
    """A line for every kernel whose output is not exactly right; NaN is never."""
    lines = []
    for kernel, y in zip(kernels, found, strict=True):
        assert y.shape == right.shape == conv.output_shape and y.dtype == right.dtype, f"{y.dtype} {y.shape}"
        wrong = ~(y == right)
        if wrong.any():
            first = tuple(int(i) for i in np.argwhere(wrong)[0])
            lines.append(f"{made(conv, kernel).name}: {wrong.sum()} of {y.size} outputs differ, at {first} {y[first]}, not {right[first]}")
    return lines


def goes_wrong(
    conv: Conv2d, kernel: Kernel | Made, edit: Callable[[str], str], seeds: Iterable[int], given: Sequence[Tensors] | None = None
) -> bool:
    """Whether the edited kernel gives another result, or breaks a rule while it runs, for some seed and some of the given tensors.

    If none are given, they are those of `exact_tensors`.
    """
    emulated = Emulated(conv, [kernel], edit)
    cases = [(one, expected(conv, one)) for one in (given or [typed(conv, exact_tensors(conv))])]

    def wrong(seed: int, tensors: Tensors, right: Array) -> bool:
        try:
            return bool(differences(conv, [kernel], emulated(tensors, seed), right))
        except EmulationError:
            return True

    return any(wrong(seed, *case) for seed in seeds for case in cases)
