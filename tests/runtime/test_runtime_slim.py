"""`im2win.runtime` loads and runs exported libraries where neither TVM's compiler nor im2win's own can be imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np

import im2win

REFUSED = (
    "tvm.s_tir", "tvm.te", "tvm.relax", "im2win.compute", "im2win.schedules", "im2win.reconstruct", "im2win.emulator", "im2win.codegen",
    "im2win.registry", "im2win.records", "im2win.builder", "im2win.tuner", "im2win.export", "im2win.frontends", "im2win.bench",
    "im2win.studies", "im2win.reports", "im2win.cli",
)  # fmt: skip

HEAD = f"""
import sys

class Refusing:
    def find_spec(self, name, path=None, target=None):
        if any(name == one or name.startswith(one + ".") for one in {REFUSED!r}):
            raise ImportError(f"{{name}} is refused")

sys.meta_path.insert(0, Refusing())
"""

LOAD = """
import numpy as np
import im2win
from im2win.runtime.load import load

op = load(sys.argv[1])
x, w = (np.load(path) for path in sys.argv[2:4])
np.save(sys.argv[4], op(x, w))
assert im2win.load is load and type(op) is im2win.Op
try:
    op.export_c(".")
except ImportError as error:
    assert "im2win.export" in str(error), error
else:
    raise AssertionError("export_c needs the compiler")
"""


def refusing(code: str, *words: object) -> subprocess.CompletedProcess[str]:
    """A program in a process of its own that cannot import what is refused."""
    return subprocess.run([sys.executable, "-c", HEAD + code, *map(str, words)], capture_output=True, text=True, check=False)


def test_every_module_of_the_runtime_can_be_imported() -> None:
    names = [f"im2win.runtime.{path.stem}" for path in (Path(im2win.__file__).parent / "runtime").glob("*.py") if path.stem != "__init__"]
    done = refusing("import importlib\nfor name in sys.argv[1:]: importlib.import_module(name)", *names)
    assert len(names) > 5 and done.returncode == 0, done.stderr


def test_an_exported_library_runs_without_a_compiler(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    op = im2win.build("n1-c3x9x9-k8x3x3-p1", algorithm="direct/tiled", threads=1)
    x, w = (rng.standard_normal(shape, dtype=np.float32) for shape in (op.conv.input_shape, op.conv.filter_shape))
    library = op.export(tmp_path / "conv.so")
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "w.npy", w)
    done = refusing(LOAD, library, tmp_path / "x.npy", tmp_path / "w.npy", tmp_path / "y.npy")
    assert done.returncode == 0, done.stderr
    assert np.array_equal(np.load(tmp_path / "y.npy"), op(x, w))


def test_what_is_refused_cannot_be_imported() -> None:
    done = refusing("import im2win.registry.algorithms")
    assert done.returncode != 0 and "is refused" in done.stderr
