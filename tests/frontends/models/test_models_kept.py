"""Compiled convolutions in the cache: the next model with the same layers compiles none, and nothing that has changed is used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from model_graphs import compiled, graph, integers, node

import im2win
from im2win.frontends.models import convolutions, kept_kernels
from im2win.frontends.models.kept_kernels import Job, symbol_of
from im2win.registry.backends import device_for
from im2win.spec.conv2d import Conv2d

CONV = "n1-c3x9x11-k8x3x3-p1"


def model(channels: int = 3) -> Any:
    """Three convolutions, the last two of one problem; the same weights every time."""
    random = np.random.default_rng(channels)
    shapes = {"a": (8, channels, 3, 3), "b": (8, 8, 1, 1), "c": (8, 8, 1, 1)}
    weights = {name: random.integers(-3, 4, shape).astype(np.float32) for name, shape in shapes.items()}
    nodes = [node("Conv", "x a", "p", pads=[1, 1, 1, 1]), node("Conv", "p b", "q"), node("Conv", "q c", "y")]
    return graph(nodes, {"x": (1, channels, 9, 11)}, weights)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("IM2WIN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The problems that are compiled."""
    found: list[str] = []
    unchanged = convolutions.compiled

    def noted(module: Any, machine: Any) -> Any:
        [variable] = module.functions
        found.append(variable.name_hint)
        return unchanged(module, machine)

    monkeypatch.setattr(convolutions, "compiled", noted)
    return found


def objects(cache: Path) -> list[Path]:
    return sorted(cache.glob("*/objects/*.o"))


def test_a_second_model_compiles_what_is_new(cache: Path, built: list[str]) -> None:
    x = integers(1, 3, 9, 11)
    first = compiled(model())
    assert len(built) == len(objects(cache)) == 2
    second = compiled(model())
    assert len(built) == 2 and np.array_equal(first.run({"x": x})["y"], second.run({"x": x})["y"])
    assert [layer.tier for layer in second.manifest.layers] == [layer.tier for layer in first.manifest.layers]
    compiled(model(channels=4))
    assert len(built) == 3


def test_onnxruntimes_operators_share_them(cache: Path, built: list[str], tmp_path: Path) -> None:
    compiled(model())
    im2win.for_onnxruntime(model(), tmp_path / "ours.onnx", accuracy="exact", guard=False)
    assert len(built) == 2


@pytest.mark.parametrize("damage", ["changed", "truncated", "gone", "unsaid", "nonsense", "others"])
def test_what_has_changed_is_compiled_again(cache: Path, built: list[str], damage: str) -> None:
    x = integers(1, 3, 9, 11)
    expected = compiled(model()).run({"x": x})["y"]
    for path in objects(cache):
        content = bytearray(path.read_bytes())
        if damage == "changed":
            content[len(content) // 2] ^= 1
            path.write_bytes(content)
        elif damage == "truncated":
            path.write_bytes(content[:100])
        elif damage == "gone":
            path.unlink()
        elif damage == "others":
            path.chmod(0o666)
        else:
            path.with_suffix(".json").write_text("{}" if damage == "unsaid" else "[" * 100_000)
    assert np.array_equal(compiled(model()).run({"x": x})["y"], expected) and len(built) == 4


def test_a_kernel_that_fails_costs_no_other(cache: Path, built: list[str], tmp_path: Path) -> None:
    machine, convs = device_for("cpu"), [Conv2d.parse(CONV), Conv2d.parse(CONV).with_(dtype="int8", activation="silu")]
    jobs = [Job(conv, symbol_of(conv), machine, (), "exact", tmp_path / f"{i}.o") for i, conv in enumerate(convs)]
    with pytest.raises(ValueError, match="silu"):
        convolutions.build_all(jobs, 1)
    assert len(built) == 1
    convolutions.build_all(jobs[:1], 1)
    assert len(built) == 1


def test_without_a_folder_every_model_compiles(built: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("IM2WIN_CACHE", str(tmp_path / "file" / "cache"))
    for count in (2, 4):
        compiled(model())
        assert len(built) == count


def test_other_records_look_up_anew(cache: Path, built: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    conv, machine = Conv2d.parse(CONV), device_for("cpu")
    jobs = [Job(conv, symbol_of(conv), machine, (str(tmp_path / "logs"),), "exact", tmp_path / "one.o")]
    [first] = convolutions.build_all(jobs, 1)
    assert kept_kernels.find(jobs) == [first]
    (tmp_path / "logs" / machine.name).mkdir(parents=True)
    (tmp_path / "logs" / machine.name / "records.jsonl").write_text("")
    assert kept_kernels.find(jobs) == [None], "records may choose another tile"
    assert convolutions.build_all(jobs, 1) == [first] and len(built) == 1, "the same tile: the object file is found"
    monkeypatch.setattr(kept_kernels, "exporting_digest", lambda: "other")
    convolutions.build_all(jobs, 1)
    assert len(built) == 2
