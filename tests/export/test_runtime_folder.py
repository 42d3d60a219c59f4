"""The folder with which programs only run libraries: its size, and that it alone, with numpy, runs a kernel and a model."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from model_graphs import classifier, compiled, integers
from paths import ROOT

import im2win
from im2win.export import runtime
from im2win.numerics.reference import reference
from im2win.runtime.manifest import ArtefactError
from im2win.spec.conv2d import Conv2d

GUIDE = (ROOT / "docs" / "deploy.md").read_text(encoding="utf-8")
CONV = Conv2d(batch=1, in_channels=8, height=10, width=10, out_channels=16, kernel=3, padding=1)

PROGRAM = """
    import sys
    sys.path += sys.argv[1:3]
    import numpy as np
    import im2win
    op, model = im2win.load(sys.argv[3]), im2win.load_model(sys.argv[4])
    given = np.load(sys.argv[5])
    np.savez(sys.argv[6], y=op(given["x"], given["w"]), bound=op.bind(given["w"])(given["x"]), z=model(given["image"]))
    folders = {module.__file__.removeprefix(sys.argv[1]) for module in list(sys.modules.values())
               if getattr(module, "__name__", "").startswith(("im2win", "tvm")) and getattr(module, "__file__", None)}
    assert not [name for name in folders if name.startswith("/") and not name.startswith(("/im2win/", "/tvm_ffi/"))], folders
    for name in ("scipy", "xgboost", "tvm", "torch", "typer", "rich", "psutil"):
        assert name not in sys.modules, name
    libraries = {line.split()[-1] for line in open("/proc/self/maps") if "libtvm" in line} if sys.platform == "linux" else set()
    assert all(library.startswith(sys.argv[1]) and "compiler" not in library for library in libraries), libraries
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return im2win.export_runtime(tmp_path_factory.mktemp("deployed") / "runtime").resolve()


def numpy_folders() -> list[Path]:
    """numpy and the libraries of its wheel."""
    package = Path(np.__file__).parent
    return [path for path in (package, package.with_name("numpy.libs")) if path.is_dir()]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which a program finds numpy and nothing else."""
    made = tmp_path_factory.mktemp("numpy_alone")
    for path in numpy_folders():
        (made / path.name).symlink_to(path)
    return made


def test_a_program_needs_no_more_than_the_folder_and_numpy(folder: Path, alone: Path, tmp_path: Path) -> None:
    """Without site-packages: whatever else is installed here cannot help."""
    given = {"x": integers(1, 8, 10, 10), "w": integers(16, 8, 3, 3), "image": integers(2, 3, 8, 8)}
    im2win.build(CONV, algorithm="direct").export(tmp_path / "layer.so")
    model = compiled(classifier(2))
    model.export(tmp_path / "model.so")
    np.savez(tmp_path / "given.npz", **given)  # type: ignore[arg-type]
    paths = [folder, alone, *(tmp_path / name for name in ("layer.so", "model.so", "given.npz", "made.npz"))]
    command = [sys.executable, "-I", "-S", "-B", "-c", textwrap.dedent(PROGRAM), *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    with np.load(tmp_path / "made.npz") as made:
        for name in ("y", "bound"):  # small integers: every sum is exact
            np.testing.assert_array_equal(made[name], reference(CONV, given["x"], given["w"]))
        np.testing.assert_array_equal(made["z"], model(given["image"]))


def test_it_is_small(folder: Path) -> None:
    both = runtime.size(folder) + sum(map(runtime.size, numpy_folders()))
    assert runtime.size(folder) < 20e6 and both < 150e6
    if sys.platform == "linux" and platform.machine() == "x86_64":
        written = [int(count) for count in re.findall(r"^\| the folder.* \| (\d+) MB \|$", GUIDE, re.MULTILINE)]
        np.testing.assert_allclose(written, [runtime.size(folder) / 1e6, both / 1e6], rtol=0.25)


def test_the_guides_program_runs(folder: Path, alone: Path, tmp_path: Path) -> None:
    [code] = re.findall(r"^```python\n(.*?)^```$", GUIDE, re.DOTALL | re.MULTILINE)
    [key] = re.findall(r"^im2win build (\S+) --out my_kernels$", GUIDE, re.MULTILINE)
    im2win.build(Conv2d.parse(key), algorithm="direct").export(tmp_path / "my_kernels" / f"{key}.so")
    (tmp_path / "program.py").write_text(code + "assert y[0, 0, 1, 1] == 64 * 9 and y.shape == (1, 64, 28, 28)\n")
    environment = {"PYTHONPATH": f"{folder}{os.pathsep}{alone}"}
    command = [sys.executable, "-S", "-B", "program.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_it_holds_what_is_needed_and_licenses(folder: Path) -> None:
    assert sorted(path.name for path in (folder / "im2win").iterdir() if path.is_dir()) == runtime.rooms()
    assert {"runtime", "packing", "spec"} <= set(runtime.rooms()) and not {"builder", "codegen", "tuner"} & set(runtime.rooms())
    assert (folder / "im2win/runtime/lib/licenses/LICENSE").is_file()
    assert [*folder.glob("apache_tvm_ffi-*.dist-info/licenses/LICENSE")]
    assert not [*folder.rglob("__pycache__")] and not (folder / "tvm").exists()


def test_the_verb_writes_it(command: Callable[..., Any], tmp_path: Path) -> None:
    done = command("runtime", "--out", tmp_path / "new")
    assert done.status == 0 and " MiB; with PYTHONPATH=" in done.out and (tmp_path / "new/im2win/__init__.py").is_file()
    again = command("runtime", "--out", tmp_path / "new")
    assert again.status == 2 and "must be empty or new" in again.err


def test_where_nothing_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ArtefactError, match=r"^`folder` \(=.*/file/deeper'\) must be a folder that can be written: Not a directory\.$"):
        im2win.export_runtime(tmp_path / "file" / "deeper")
