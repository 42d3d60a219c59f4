"""Scripts of benchmarks/ and examples/ as modules."""

from __future__ import annotations

import importlib.util
from types import ModuleType

from paths import ROOT


def script(path: str) -> ModuleType:
    """A script, given below the root of the repository, as a module."""
    spec = importlib.util.spec_from_file_location(path.rpartition("/")[2].removesuffix(".py"), ROOT / path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
