"""An exported layer in C++ through tvm-ffi: the example, built with CMake as it says, and what the header refuses."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from compiled_c import run
from ops import default
from oracle import exact_tensors
from paths import ROOT

from im2win.runtime.manifest import ArtefactError
from im2win.runtime.weights import checksum, weights_path
from im2win.spec.conv2d import Conv2d

EXAMPLE = ROOT / "examples" / "cpp"
PATH = os.pathsep.join((os.environ["PATH"], str(Path(sys.executable).parent)))  # where pip puts cmake
MISSING = [tool for tool in ("cmake", "c++") if not shutil.which(tool, path=PATH)]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the example's commands make."""
    if MISSING:
        pytest.skip(f"needs {' and '.join(MISSING)} on PATH (pip install cmake)")
    folder = tmp_path_factory.mktemp("cpp")
    environment = {**os.environ, "PATH": PATH, "PYTHONPATH": str(ROOT / "src")}
    commands = [
        [sys.executable, str(EXAMPLE / "export.py"), str(folder)],
        ["cmake", "-S", str(EXAMPLE), "-B", str(folder), f"-DPython_EXECUTABLE={sys.executable}"],
        ["cmake", "--build", str(folder)],
    ]
    for words in commands:
        done = subprocess.run(words, capture_output=True, text=True, env=environment, timeout=200)
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
    return folder


@pytest.mark.slow
def test_example(built: Path) -> None:
    assert "25088 outputs, 0 wrong" in run(built, "./layer", "conv.so", "reference.bin")


def refused(folder: Path) -> str:
    """What the program says of the layer in a folder that it cannot load."""
    done = subprocess.run(["../layer", "conv.so", "../reference.bin"], cwd=folder, capture_output=True, text=True)
    assert done.returncode != 0
    return done.stderr


@pytest.mark.slow
def test_refusals(built: Path) -> None:
    """A file cut short, of something else or missing, and filters packed for another library: an error, never wrong numbers."""
    folder = built / "copy"
    folder.mkdir()
    for name in ("conv.so", "conv.so.weights"):
        shutil.copy(built / name, folder)
    weights = folder / "conv.so.weights"
    content = weights.read_bytes()
    for changed, message in (
        (content[:-1], "truncated"),
        (content[: content.index(b"data\n")], "truncated"),
        (b"im2win-weights 2" + content[16:], "no weights of this im2win"),
        (content.replace(b"library ", b"library 1", 1), "packed for another library"),
        (content.replace(b"tensor data float32 1", b"tensor data float32 -1", 1), "`shape` of data is none of a tensor"),
        (content.replace(b"tensor data float32 1", b"tensor data float32 one", 1), "`shape` of data is none of a tensor"),
        (content.replace(b"packed filter float32", b"packed filter float32 4294967296 4294967296", 1), "`shape` of filter is none"),
        (content.replace(b"packed filter float32", b"packed filter float32 1048576", 1), "truncated"),
        (content.replace(b"data\n", 4 * b"tensor data float32 1\n" + b"data\n", 1), "more arguments than a kernel has"),
    ):
        weights.write_bytes(changed)
        assert message in refused(folder), message
    weights.unlink()
    assert "cannot read it" in refused(folder)


def test_weights_beside_the_library(tmp_path: Path) -> None:
    """The file says what is in it; its numbers are the packed ones."""
    conv = Conv2d.parse("n1-c4x9x11-k17x3x3-p1-bias-add")
    op, tensors = default(conv), exact_tensors(conv)
    library = op.bind(tensors["filter"], tensors["bias"]).export(tmp_path / "conv.so")
    content = weights_path(library).read_bytes()
    head, _, _ = content.partition(b"data\n")
    pack = op.manifest.pack
    packed, bias = pack.filter(conv, tensors["filter"]), pack.bias(conv, tensors["bias"])
    assert head.decode().splitlines() == [
        "im2win-weights 1",
        f"library {checksum(library.read_bytes()):016x}",
        "tensor data float32 1 4 9 11",
        f"packed filter float32 {' '.join(map(str, packed.shape))}",
        f"packed bias float32 {' '.join(map(str, bias.shape))}",
        "tensor residual float32 1 17 9 11",
        "tensor output float32 1 17 9 11",
    ]
    assert content.endswith(bias.tobytes())
    start = -(-len(head + b"data\n") // 64) * 64
    np.testing.assert_array_equal(np.frombuffer(content[start : start + packed.nbytes], np.float32), packed.ravel())
    with pytest.raises(ArtefactError, match=r"`path` \(=.*\) must be a file that can be written"):
        op.bind(tensors["filter"], tensors["bias"]).export(library / "conv.so")
