"""A short hash of the code that turns a tile into a kernel: a record made with other code no longer applies."""

from __future__ import annotations

import functools
import hashlib
import inspect
from types import ModuleType

from im2win import codegen, packing
from im2win.algorithms import ALGORITHMS
from im2win.schedules import cpu, registers, tails, tile, turn

# What every CPU kernel goes through. Files that only choose tiles (model, space) or other schedules (ladder) do not count.
_PIPELINE: tuple[ModuleType, ...] = (codegen, packing, cpu, registers, tails, tile, turn)


def _definition(module: ModuleType) -> list[ModuleType]:
    """A definition's module and the modules of compute/ that it uses."""
    used = [value for value in vars(module).values() if inspect.ismodule(value) and value.__name__.startswith("im2win.compute.")]
    return [module, *used]


@functools.cache
def fingerprint(algorithm: str) -> str:
    """Twelve hexadecimal digits that change when the source behind this algorithm's CPU kernels does."""
    definition = inspect.getmodule(ALGORITHMS[algorithm].define)
    assert definition is not None
    digest = hashlib.sha256()
    for module in sorted({*_PIPELINE, *_definition(definition)}, key=lambda m: m.__name__):
        digest.update(module.__name__.encode() + inspect.getsource(module).encode())
    return digest.hexdigest()[:12]
