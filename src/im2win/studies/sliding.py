"""The sliding-window study: kernels with one thread for each pixel, against im2col, the default kernel and cuDNN, in one run.

The kernels read from global or from shared memory. The study repeats the comparison of docs/papers.md, section 5, which varies the image,
the stride and the thread block. Every form is checked against the float64 reference before it is timed, and im2win's again afterwards, as
in the benchmark (cuda_harness.py). A kernel that cannot be launched has a reason and no time.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from im2win.bench.cpu import spreads
from im2win.bench.cuda_builds import Library, Recipe, TileRecipe, build_all
from im2win.bench.cuda_harness import Subject, interleaved, prepared, set_up_peers
from im2win.bench.results import Spread
from im2win.builder.build import cuda_manifest
from im2win.codegen import cuda as cuda_codegen
from im2win.codegen.llvm import TileError
from im2win.device.gpu import Gpu, device_gpu
from im2win.numerics.tolerance import tolerance
from im2win.registry.backends import backend_for
from im2win.runtime.manifest import Manifest
from im2win.schedules.studies import sliding
from im2win.spec.conv2d import Conv2d
from im2win.spec.suites import Layer
from im2win.spec.symbols import SYMBOL
from im2win.studies.entries import DEFAULT, IM2COL
from im2win.studies.entries import SLIDING as STUDY
from im2win.studies.gpu_study import every_peer, head, kernel_subject, timed
from im2win.tuner.runners.check import verify
from im2win.tuner.runners.cuda import Bench

SEED = 0
BLOCKS = (4, 8, 16, 32, 64)
LIBRARIES = {IM2COL: "im2col", DEFAULT: "auto"}  # forms without a thread block to vary: the registry's algorithm

Form = tuple[str, int | None]
"""(name, edge of the thread block where it is the form's to choose)"""


@dataclass(frozen=True)
class Entry:
    """One form on one problem: milliseconds per call, or the reason why there is no time.

    Attributes:
        block: edge of its thread block, where that is varied.
        error: against the reference, relative to the largest output.
    """

    conv: str
    image: int
    stride: int
    form: str
    block: int | None
    ms: float | None = None
    p10_ms: float | None = None
    p90_ms: float | None = None
    samples: int = 0
    error: float | None = None
    algorithm: str = ""
    failed: str | None = None


@dataclass(frozen=True)
class SlidingRecipe:
    """A sliding-window kernel for a problem."""

    conv: Conv2d
    form: str
    block: int
    gpu: Gpu

    def compile(self, path: Path) -> Manifest:
        """Compiles into the library `path`.

        Raises:
            TileError: the thread block cannot be launched.
        """
        broken = sliding.violations(self.conv, self.form, self.block, self.gpu)
        if broken:
            raise TileError("; ".join(broken) + ".")
        kernel = sliding.sliding_kernel(self.conv, self.form, self.block, SYMBOL)
        cuda_codegen.compile_module(cuda_codegen.kernel_module({SYMBOL: kernel}), self.gpu).export(path)
        tile = {"form": self.form, "block": self.block}
        return cuda_manifest(self.conv, "direct", tile, sliding.PACK, self.gpu, threads=self.block**2)


def recipes(conv: Conv2d, blocks: Sequence[int], gpu: Gpu) -> dict[Form, Recipe]:
    """Recipes of im2win's forms for a problem."""
    ours: dict[Form, Recipe] = {(form, block): SlidingRecipe(conv, form, block, gpu) for form in sliding.FORMS for block in blocks}
    return {**ours, **{(form, None): TileRecipe(conv, algorithm, gpu) for form, algorithm in LIBRARIES.items()}}


def run(
    layers: Sequence[Layer],
    blocks: Sequence[int] = BLOCKS,
    *,
    rounds: int = 15,
    seconds: float = 0.5,
    progress: Callable[[int, int, list[Entry]], None] | None = None,
) -> dict[str, Any]:
    """Times every form on every layer on the first GPU.

    Args:
        layers: problems, as in the suite "sliding".
        blocks: edges of thread blocks; edges that no device can launch are allowed.
        rounds: most samples of a form on a layer.
        seconds: most seconds of timed calls of a form on a layer.
        progress: called with (layers done, layers in all, entries of the layer) after each layer.

    Returns:
        The study, as it is written to JSON (see `sliding_report`).

    Raises:
        ValueError: no layers, no blocks, or `rounds` below 1.
        NoGpuError: there is no GPU.
        ToolchainError: there is no CUDA compiler.
    """
    if not layers or not blocks or rounds < 1:
        raise ValueError(f"`layers` and `blocks` must name at least one each, and `rounds` (={rounds}) must be at least 1.")
    gpu = device_gpu()
    backend_for(gpu).check_tools()
    set_up_peers("float32")
    facts = head(STUDY, layers, gpu)
    entries: list[Entry] = []
    with tempfile.TemporaryDirectory(prefix="im2win-sliding-") as folder:
        wanted = {(layer.conv, form): one for layer in layers for form, one in recipes(layer.conv, blocks, gpu).items()}
        built = build_all(wanted, Path(folder))
        for done, layer in enumerate(layers, 1):
            libraries = {form: library for (conv, form), library in built.items() if conv == layer.conv}
            found = time_layer(layer.conv, libraries, rounds, seconds)
            entries += found
            if progress is not None:
                progress(done, len(layers), found)
    return {**facts, "entries": [asdict(entry) for entry in entries]}


def time_layer(conv: Conv2d, libraries: Mapping[Form, Library | str], rounds: int, seconds: float) -> list[Entry]:
    """Checks and times every form, and cuDNN, on one problem."""
    bench = Bench(conv, SEED)
    names = {_label(form): form for form in libraries}
    with every_peer(bench) as peers:
        ours = [(_label(form), partial(kernel_subject, bench, library, tolerance(conv))) for form, library in libraries.items()]
        ready, failed = prepared([*ours, *peers])
        samples = interleaved(bench, ready, rounds, seconds)
        for name in names.keys() & ready.keys():
            message, _ = verify(bench, ready[name].call, tolerance(conv))
            if message:
                failed[name] = f"after timing: {message}"
                del samples[name]
    found = spreads(samples)
    every = {**names, **{name: (name, None) for name in (*ready, *failed) if name not in names}}
    return [_entry(conv, form, found.get(name), ready.get(name), failed.get(name)) for name, form in every.items()]


def _label(form: Form) -> str:
    return form[0] if form[1] is None else f"{form[0]} {form[1]}x{form[1]}"


def _entry(conv: Conv2d, form: Form, spread: Spread | None, subject: Subject | None, failed: str | None) -> Entry:
    entry = timed(Entry(str(conv), conv.height, conv.stride[0], *form), spread, subject, failed)
    if subject is None or entry.ms is None or form[0] not in LIBRARIES:
        return entry
    return replace(entry, algorithm=subject.algorithm)
