"""What layers `im2win.torch.optimize` takes for a module: tuned, cached, wrong ones; what a call costs; a GPU's side without one."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from compiled_torch import with_compiled  # noqa: E402
from networks import Residual, integers, with_integers  # noqa: E402
from ops import host  # noqa: E402
from optimizing import X, equal, optimized  # noqa: E402
from paths import ROOT, SUPPORT  # noqa: E402
from torch import nn  # noqa: E402

import im2win.torch  # noqa: E402
from im2win.builder.cache import Artefacts  # noqa: E402
from im2win.device.gpu import H200, NoGpuError  # noqa: E402
from im2win.frontends.torch import call_site, conv_op  # noqa: E402
from im2win.frontends.torch.bound import Bound  # noqa: E402
from im2win.frontends.torch.planning import Planner  # noqa: E402
from im2win.records.log import Log  # noqa: E402
from im2win.registry.backends import backend_for  # noqa: E402
from im2win.registry.ranking import default_tile  # noqa: E402
from im2win.registry.schedules import schedule_of  # noqa: E402
from im2win.runtime import cuda as cuda_runtime  # noqa: E402
from im2win.spec.captured_layers import read_layers  # noqa: E402
from im2win.spec.conv2d import Conv2d  # noqa: E402

pytestmark = pytest.mark.usefixtures("direct")

# --- what layers get


def test_untuned_layers_may_be_kept(calls: list[str]) -> None:
    module = with_integers(Residual())
    fast = optimized(module, untuned="keep")
    assert fast.im2win_report.swapped == 0
    assert {layer.reason for layer in fast.im2win_report.layers} == {"no record of this layer on this device"}
    equal(fast, module)
    assert not calls


def test_layers_are_captured_tuned_and_found(tmp_path: Path, command: Any) -> None:
    """A running program's layers, tuned from the command line, are what `optimize` then takes; so are its own fused ones."""
    module = with_integers(nn.Sequential(nn.Conv2d(5, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU()))
    path, logs = tmp_path / "layers.jsonl", tmp_path / "logs"
    with im2win.capture(path), torch.inference_mode():
        module(X)
    done = command("tune", path, "--trials", 2, "--logs", logs, "--algorithm", "direct/tiled")
    assert done.status == 0, done.err
    fast = optimized(module, logs=logs, untuned="keep")
    assert {layer.reason for layer in fast.im2win_report.layers} == {"other epilogue"}
    equal(fast, module)
    fused = tmp_path / "fused.jsonl"
    fast.im2win_report.save(fused)
    (layer,), _ = read_layers(fused)
    log = Log(logs)
    for record in list(log):  # as tuning that layer would write them
        log.append(dataclasses.replace(record, conv=str(layer.conv)))
    assert [layer.reason for layer in optimized(module, logs=logs, untuned="keep").im2win_report.layers] == ["exact"]


def test_an_operator_that_is_wrong_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Bound.__call__
    monkeypatch.setattr(Bound, "__call__", lambda self, *arguments: run(self, *arguments) * torch.nan)
    module = with_integers(Residual())
    fast = im2win.torch.optimize(module, X)
    assert fast.im2win_report.swapped == 0 and all(one.reason.startswith("wrong: error nan") for one in fast.im2win_report.layers)
    equal(fast, module)


@pytest.mark.slow
def test_the_next_process_compiles_nothing(tmp_path: Path) -> None:
    """Nor does one that loads an exported program, which never loads TVM's compiler."""
    module = with_integers(Residual())
    fast = optimized(module, cache=tmp_path)
    torch.save({"x": X, "state": module.state_dict()}, tmp_path / "saved.pt")
    torch.export.save(torch.export.export(fast, (X,)), tmp_path / "exported.pt2")
    program = """
import sys, torch, im2win.torch
from im2win.frontends.torch.bound import Bound
from networks import Residual, with_integers
saved = torch.load("saved.pt")
x, ran, run = saved["x"], [], Bound.__call__
Bound.__call__ = lambda self, *arguments: ran.append(self.name) or run(self, *arguments)
with torch.inference_mode():
    exported = torch.export.load("exported.pt2").module()
    y, count, compiler = exported(x), len(ran), "tvm.tirx" in sys.modules
    module = with_integers(Residual())
    fast = im2win.torch.optimize(module, x, untuned="default")
    print(int(torch.equal(y, module(x))), count, int(compiler), fast.im2win_report.built, int(torch.equal(fast(x), y)))
"""
    folders = os.pathsep.join([str(ROOT / "src"), str(SUPPORT)])
    environment = {**os.environ, "IM2WIN_CACHE": str(with_compiled(tmp_path)), "PYTHONPATH": folders}
    for path in tmp_path.glob("*/defaults"):
        raise AssertionError(f"{path}: the tests' choice is not the cache's")
    folder = tmp_path / host().name / "defaults"
    folder.mkdir()
    for layer in fast.im2win_report.layers:
        name, tile = default_tile(layer.conv, "direct/tiled", host())
        choice = json.dumps({"algorithm": name, "tile": tile.as_dict()})
        (folder / f"{layer.conv}.float32.{im2win.builder.cache._package()}.json").write_text(choice)
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=200, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["1", "3", "0", "0", "1"], done.stderr


# --- what a call costs


def test_a_call_goes_past_the_dispatcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plain call runs the bound operator and a few dozen Python calls, whatever its layer: no dispatch, no packing, no look-up anew."""
    fast = optimized(with_integers(nn.Sequential(nn.Conv2d(5, 8, 3), nn.BatchNorm2d(8), nn.ReLU())))
    place = fast._im2win.site_0
    monkeypatch.setattr(conv_op, "conv2d", None)
    monkeypatch.setattr(Bound, "_bind", None)
    monkeypatch.setattr(call_site.CallSite, "_route", None)
    count = 0

    def counted(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    with torch.inference_mode():
        place(X)
        sys.setprofile(counted)
        place(X)
        sys.setprofile(None)
    assert count < 50, count
    with pytest.raises(TypeError):  # gradients need the operator
        place(X)


# --- a GPU's side, as far as it goes without one


def test_the_ladder_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A record of the plain convolution serves it with any epilogue; without a GPU nothing is decided."""
    conv = Conv2d.parse("n1-c256x14x14-k256x3x3-p1-bias-add-relu")
    with pytest.raises(NoGpuError):
        Planner().decide(conv, "cuda")
    monkeypatch.setattr("im2win.registry.backends.device_for", lambda target, threads=None: H200)
    monkeypatch.setattr(Artefacts, "get", lambda self, conv, algorithm, tile, device, tuned: (f"{device.name} {algorithm}", object()))
    for problem, reason in ((conv, "other epilogue"), (conv.with_(bias=False, residual=False, activation=None), "exact")):
        decision = Planner(untuned="keep").decide(problem, "cuda")
        assert (decision.reason, decision.target) == (reason, "cuda") and decision.name.startswith("nvidia-h200 ")
    other = Planner(untuned="keep").decide(conv.with_(kernel=(5, 5)), "cuda")
    assert other.op is None and other.reason == "no record of this layer on this device"


@pytest.mark.parametrize("algorithm", ["direct/tiled", "im2win/stored"])
def test_a_gpus_layer_runs_and_packs_in_place(algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a call hands to the kernels, in their order; filters bound anew lie where the old ones were."""
    conv = Conv2d.parse("n1-c32x14x14-k64x3x3-bias-add-float16")
    row, backend = schedule_of(algorithm), backend_for(H200)
    _, tile = backend.ranked(conv, row)[0]
    seen: list[Any] = []
    made = row.on_gpu.workspace_bytes(conv, tile) // conv.itemsize
    manifest = SimpleNamespace(pack=row.on_gpu.pack(conv, tile), made=made)
    op: Any = SimpleNamespace(conv=conv, manifest=manifest, kernels=lambda *tensors: seen.extend(tensors))
    monkeypatch.setattr(cuda_runtime, "_upload", lambda array, device: torch.from_numpy(array).clone())
    w, bias = integers(*conv.filter_shape).half(), integers(64).half()
    layer, other = cuda_runtime.CudaLayer(op, w, bias), cuda_runtime.CudaLayer(op, -w, -bias)
    x, residual, out = (torch.zeros(shape, dtype=torch.float16) for shape in (conv.input_shape, conv.output_shape, conv.output_shape))
    layer.run(x, residual, out)
    data, scratch, filters, biases, added, output = seen
    assert (data is x, added is residual, output is out) == (True, True, True)
    assert scratch is None if algorithm == "direct/tiled" else scratch.numel() == made > 0
    seen.clear()
    layer.run("x", "residual", "out", x)  # by address
    assert (seen[0], seen[-2], seen[-1]) == ("x", "residual", "out")
    assert seen[1] is None if algorithm == "direct/tiled" else (seen[1].dtype, seen[1].numel()) == (torch.float16, made)
    address = filters.data_ptr()
    layer.rebind(-w, -bias)
    assert filters.data_ptr() == address and torch.equal(filters, other._packed[0]) and torch.equal(biases, -bias)
