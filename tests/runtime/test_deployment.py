"""Exported operators: files that replace one another, move, are of older schemas, and load without the compiler."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from ops import computing, default, host, run, sampled_tiles, tiled
from oracle import assert_equal, exact_tensors, integers, oracle

import im2win
from im2win import Conv2d
from im2win.runtime.manifest import ArtefactError, manifest_path

CONV = Conv2d.parse("n2-c5x11x13-k16x3x3-p1")
FULL = Conv2d.parse("n2-c5x11x13-k16x3x3-p1-bias-add-relu")
POINTWISE = Conv2d.parse("n1-c8x6x8-k16x1x1")


@computing(FULL)
def test_export_and_load(tmp_path: Path, algorithm: str) -> None:
    op = default(FULL, algorithm)
    path = op.export(str(tmp_path / "new" / "folder" / "layer.so"))
    assert sorted(file.name for file in path.parent.iterdir()) == ["layer.so", "layer.so.json"]
    loaded = im2win.load(path)
    for name in ("conv", "algorithm", "tile", "tuned", "extra_bytes", "manifest"):
        assert getattr(loaded, name) == getattr(op, name)
    tensors = exact_tensors(FULL)
    assert_equal(FULL, run(loaded, tensors), oracle(FULL, **tensors))
    again = loaded.export(tmp_path / "again.so")
    assert again.read_bytes() == path.read_bytes()
    assert_equal(FULL, run(im2win.load(again), tensors), oracle(FULL, **tensors))


def test_an_export_replaces_the_one_before(tmp_path: Path) -> None:
    """Also while the old one is in use: the file is replaced, not written over."""
    path = tmp_path / "layer.so"
    old = im2win.load(default(CONV).export(path))
    default(POINTWISE).export(path)
    x, w, expected = integers(CONV)
    assert_equal(CONV, old(x, w), expected)
    x, w, expected = integers(POINTWISE)
    assert_equal(POINTWISE, im2win.load(path)(x, w), expected)


@pytest.mark.slow
def test_two_versions_of_one_file_do_not_mix(tmp_path: Path) -> None:
    """The dynamic linker knows a library by its path: asked for the same path again it would hand out the old code, silently wrong."""
    path = tmp_path / "layer.so"
    x, w, expected = integers(CONV)
    tiles = [tile for tile in sampled_tiles(CONV, "direct/tiled", 8) if tile.axis == "channels"]
    assert len({tile.pack for tile in tiles}) > 1, "filters are packed in different ways, so that the wrong code gives wrong numbers"
    loaded = [im2win.load(tiled(CONV, "direct/tiled", tile).export(path)) for tile in tiles]
    for op in loaded:
        assert_equal(CONV, op(x, w), expected)


def test_a_library_may_move_with_its_manifest(tmp_path: Path) -> None:
    path = default(CONV).export(tmp_path / "a.so")
    moved = tmp_path / "other name.so"
    manifest_path(path).rename(manifest_path(moved))
    path.rename(moved)
    x, w, expected = integers(CONV)
    assert_equal(CONV, im2win.load(moved)(x, w), expected)


def test_libraries_of_an_older_schema_load(tmp_path: Path) -> None:
    """Schema 4 had other names for fields of tiles; schema 3 also named an algorithm and its schedule in one word."""
    path = default(CONV).export(tmp_path / "layer.so")
    values = json.loads(manifest_path(path).read_text())
    tile = {"strip" if name == "row_block" else name: value for name, value in values["tile"].items()}
    fourth = {**values, "schema": 4, "tile": tile}
    third = {name: value for name, value in fourth.items() if name != "schedule"} | {"schema": 3, "algorithm": "direct"}
    x, w, expected = integers(CONV)
    for older in (third, fourth):
        manifest_path(path).write_text(json.dumps(older))
        op = im2win.load(path)
        assert op.method == "direct/tiled" and op.tile == values["tile"]
        assert_equal(CONV, op(x, w), expected)
    for wrong in ({"algorithm": 7}, {"algorithm": "fft"}, {"algorithm": ["direct"]}):
        manifest_path(path).write_text(json.dumps({**third, **wrong}))
        with pytest.raises(ArtefactError, match="schema 3 is not"):
            im2win.load(path)
    del fourth["tile"]
    manifest_path(path).write_text(json.dumps(fourth))
    with pytest.raises(ArtefactError, match="schema 4 is not"):
        im2win.load(path)


def test_manifest_is_readable(tmp_path: Path) -> None:
    """A person finds what a library holds without loading it."""
    op = default(CONV)
    values = json.loads(manifest_path(op.export(tmp_path / "layer.so")).read_text())
    assert values["conv"] == "n2-c5x11x13-k16x3x3-p1" and values["tile"] == op.tile
    assert (values["algorithm"], values["schedule"]) == ("direct", "tiled")
    assert values["machine"] == host().name and values["threads"] == host().threads and values["library"] == "layer.so"


DEPLOYED = """
    import sys

    def no_compiler(event, arguments):
        if event == "import" and arguments[0].split(".")[0] == "tvm":
            raise ImportError(f"{arguments[0]} must not be imported where a kernel is only run")

    sys.addaudithook(no_compiler)
    try:
        import tvm
    except ImportError:
        pass
    else:
        raise SystemExit("the hook does not work")
    import numpy as np
    import im2win

    op = im2win.load(sys.argv[1])
    y = op(np.load(sys.argv[2]), np.load(sys.argv[3]))
    np.save(sys.argv[4], y)
    loaded = open("/proc/self/maps").read() if sys.platform == "linux" else ""
    assert "libtvm_compiler" not in loaded, "the compiler's library is loaded"
    assert "libtvm_runtime" in loaded or not loaded
    assert not [name for name in sys.modules if name == "tvm" or name.startswith("tvm.")]
    assert not [name for name in ("xgboost", "typer", "rich", "onnx") if name in sys.modules]
    of_others = ("packing.mma_fragments", "numerics.winograd_error", "runtime.cuda", "runtime.model")
    assert not [name for name in of_others if f"im2win.{name}" in sys.modules], "a CPU's library needs nothing of GPUs and models"
"""


def test_loading_needs_no_compiler(tmp_path: Path) -> None:
    """In a process where importing `tvm` is impossible; its compiler's library is never mapped."""
    x, w, expected = integers(CONV)
    files = [tmp_path / name for name in ("layer.so", "x.npy", "w.npy", "y.npy")]
    default(CONV).export(files[0])
    np.save(files[1], x)
    np.save(files[2], w)
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(DEPLOYED), *map(str, files)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert_equal(CONV, np.load(files[3]), expected)
