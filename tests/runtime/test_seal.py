"""Manifests that were changed: a library is sealed with what its manifest said, and every value has a rule."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ops import default

import im2win
from im2win.runtime.manifest import ArtefactError, manifest_path
from im2win.runtime.seal import MARK, is_sealed, seal
from im2win.spec.conv2d import Conv2d

CONV = Conv2d.parse("n1-c4x9x9-k16x3x3-p1")
SEALED = "changed since it was written: layer.so is sealed with other facts"


@pytest.fixture(scope="module")
def layer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return default(CONV).export(tmp_path_factory.mktemp("layer") / "layer.so")


def changed(path: Path, change: Any) -> None:
    """Writes a manifest with a change, given as what replaces values by their path: "pack.order", "buckets.0.batch"."""
    values = json.loads(manifest_path(path).read_text())
    for where, value in change.items():
        *outer, last = where.split(".")
        inside: Any = values
        for name in outer:
            inside = inside[int(name) if name.isdigit() else name]
        inside[int(last) if last.isdigit() else last] = value
    manifest_path(path).write_text(json.dumps(values))


def copied(path: Path, folder: Path) -> Path:
    for one in path.parent.glob(f"{path.name}*"):
        (folder / one.name).write_bytes(one.read_bytes())
    return folder / path.name


def test_the_seal_is_one_line_behind_the_library(layer: Path, tmp_path: Path) -> None:
    op = im2win.load(layer)
    content, facts = layer.read_bytes(), op.manifest.facts()
    assert is_sealed(content, facts) and content.count(MARK) == 1
    again = op.export(tmp_path / "another name.so")
    assert again.read_bytes() == content, "an export is sealed once"
    assert not is_sealed(content, {**facts, "threads": 99}) and is_sealed(content, {**facts, "library": "x", "sha256": ""})
    other = copied(layer, tmp_path)
    seal(other, {"a": 1})
    assert is_sealed(other.read_bytes(), {"a": 1}) and len(other.read_bytes()) == len(content)


@pytest.mark.fault("libraries", "a manifest was changed")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"conv": f"{CONV}-relu"}, SEALED),
        ({"pack.order": "cvu"}, SEALED),
        ({"extra_bytes": 7}, SEALED),
        ({"isa": ""}, SEALED),
        ({"target": "rocm"}, r"`target` \(='rocm'\) must be one of cpu, cuda"),
        ({"target": None}, r"`target` \(=None\) must be one of cpu, cuda"),
        ({"isa": []}, r"`isa` \(=\[\]\) must be a text"),
        ({"made": float("inf")}, r"`made` \(=inf\) must be an integer from 0"),
        ({"made": -1}, r"`made` \(=-1\) must be an integer from 0"),
        ({"threads": True}, r"`threads` \(=True\) must be an integer from 1"),
        ({"tile": {"rows": []}}, r"`tile` \(={'rows': \[\]}\) must be numbers and words by name"),
        ({"pack.block": 0}, "division|modulo|zero"),
        ({"pack.block": -8}, "`pack` .* must be a packing of the filters"),
        ({"sha256": "0" * 63}, "must be a SHA-256 digest"),
        ({"tuned": "yes" * 99}, r"`tuned` \(='yes.*\.\.\.\) must be true or false"),
    ],
)
def test_a_changed_manifest_is_refused(change: dict[str, Any], message: str, layer: Path, tmp_path: Path) -> None:
    path = copied(layer, tmp_path)
    changed(path, change)
    with pytest.raises(ArtefactError, match=message):
        im2win.load(path)


def test_a_library_without_its_seal_is_refused(layer: Path, tmp_path: Path) -> None:
    """Also where the digest in the manifest was made to fit."""
    import hashlib

    path = copied(layer, tmp_path)
    path.write_bytes(path.read_bytes().rpartition(MARK)[0])
    with pytest.raises(ArtefactError, match="checksums differ"):
        im2win.load(path)
    changed(path, {"sha256": hashlib.sha256(path.read_bytes()).hexdigest()})
    with pytest.raises(ArtefactError, match=SEALED):
        im2win.load(path)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    from model_graphs import graph, integers, node

    path = tmp_path_factory.mktemp("model") / "layer.so"
    one = graph([node("Conv", "x w", "y")], {"x": (1, 4, 8, 8)}, {"w": integers(4, 4, 1, 1)})
    im2win.compile_model(one, path, batches=[1, 2])
    return path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"buckets.0.workspace": 1}, SEALED),
        ({"buckets.0.batch": 3}, SEALED),
        ({"outputs.0.shape": [1, 4, 8, 4]}, SEALED),
        ({"buckets.0.function": "walk"}, SEALED),
        ({"weights_bytes": 1}, SEALED),
        ({"buckets.0.workspace": -5}, r"`buckets\[0\]\.workspace` \(=-5\) must be an integer from 0"),
        ({"buckets": []}, "`buckets` must hold a compiled batch"),
        ({"outputs.0.dtype": "complex64"}, r"`outputs\[0\]\.dtype` \(='complex64'\) must be one of"),
        ({"inputs.0.shape": [1, -4]}, r"`inputs\[0\]\.shape` \(=\[1, -4\]\) must be a list of at most 32 sizes"),
        ({"layers.0.tile": 5}, r"`layers\[0\]\.tile` \(=5\) must be numbers and words by name"),
        ({"target": "rocm"}, r"`target` \(='rocm'\) must be one of cpu, cuda"),
        ({"buckets": [[1]]}, "not a manifest of im2win|is missing"),
    ],
)
def test_a_changed_manifest_of_a_model_is_refused(change: dict[str, Any], message: str, model: Path, tmp_path: Path) -> None:
    path = copied(model, tmp_path)
    changed(path, change)
    with pytest.raises(ArtefactError, match=message):
        im2win.load_model(path)


def test_models_of_schemas_without_a_seal_load(model: Path, tmp_path: Path) -> None:
    """And name what their library lacks."""
    path = copied(model, tmp_path)
    changed(path, {"schema": 3})
    x = np.ones((2, 4, 8, 8), np.float32)
    np.testing.assert_array_equal(im2win.load_model(path)(x), im2win.load_model(model)(x))
    changed(path, {"buckets.1.function": "walk"})
    with pytest.raises(ArtefactError, match="it has no function 'walk', which its manifest names"):
        im2win.load_model(path)
