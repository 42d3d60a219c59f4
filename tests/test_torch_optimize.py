"""`im2win.torch.optimize`: modules on im2win equal PyTorch's, whatever is done with them afterwards."""

from __future__ import annotations

import copy
import dataclasses
import json
import logging
import os
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from conftest import ROOT  # noqa: E402
from networks import Residual, integers, resnet, with_integers  # noqa: E402
from ops import host  # noqa: E402
from torch import nn  # noqa: E402

import im2win.torch  # noqa: E402
from im2win import cuda_runtime  # noqa: E402
from im2win.algorithms import ALGORITHMS  # noqa: E402
from im2win.artefacts import Artefacts  # noqa: E402
from im2win.backends import backend_for  # noqa: E402
from im2win.gpu import H200, NoGpuError  # noqa: E402
from im2win.layer_files import read_layers  # noqa: E402
from im2win.logs import Log  # noqa: E402
from im2win.problem import Conv2d  # noqa: E402
from im2win.ranking import default_tile  # noqa: E402
from im2win.torch import conv_op, site  # noqa: E402
from im2win.torch.bound import Bound  # noqa: E402
from im2win.torch.planning import Planner  # noqa: E402

X = integers(2, 5, 12, 14)


@pytest.fixture(autouse=True)
def direct(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of untuned layers the direct form: exact on integers, and found at once."""

    def choice(self: Artefacts, conv: Conv2d, device: Any, accuracy: Any = "float32") -> tuple[str, Any]:
        return default_tile(conv, "direct", device, accuracy)

    monkeypatch.setattr(Artefacts, "default_choice", choice)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the artefacts that ran, call by call."""
    seen: list[str] = []
    run = Bound.__call__

    def noted(self: Bound, *arguments: Any) -> Any:
        seen.append(self.name)
        return run(self, *arguments)

    monkeypatch.setattr(Bound, "__call__", noted)
    return seen


def optimized(module: nn.Module, example: Any = X, **options: Any) -> Any:
    fast = im2win.torch.optimize(module, example, **options)
    assert all(layer.error is None or layer.error < 1e-5 for layer in fast.im2win_report.layers)
    return fast


def equal(fast: nn.Module, module: nn.Module, x: Any = X) -> None:
    with torch.inference_mode():
        y, expected = fast(x), module(x)
    assert y.stride() == expected.stride() and torch.equal(y, expected)


# --- whole modules


@pytest.mark.parametrize("activation", [nn.ReLU(), nn.ReLU6(), nn.Identity()], ids=["relu", "relu6", "none"])
def test_a_residual_block_is_exact(activation: nn.Module, calls: list[str]) -> None:
    module = with_integers(Residual(activation=activation))
    fast = optimized(module)
    report = fast.im2win_report
    assert report.mode == "graph" and report.swapped == 3 and isinstance(fast, Residual)
    calls.clear()
    equal(fast, module)
    assert len(calls) == 3 and len(set(calls)) == 3
    word = {"Identity": "none"}.get(type(activation).__name__, type(activation).__name__.lower())
    assert [layer.fused[-1] for layer in report.layers] == (["norm", "add", "norm"] if word == "none" else [word, word, "norm"])


def test_resnet_50() -> None:
    """ResNet-18 is what examples/05_pytorch_resnet.py runs in the tests of texts."""
    torch.manual_seed(0)
    module, x = resnet(50), torch.randn(1, 3, 32, 32)
    fast = optimized(module, x)
    report = fast.im2win_report
    assert report.swapped == len(report.layers) == 53 and sum("add" in one.fused for one in report.layers) == 16
    with torch.inference_mode():
        y, expected = fast(x), module(x)
    assert float((y - expected).abs().max()) <= 1e-5 * float(expected.abs().max())
    for line in ("53 of 53 convolutions on im2win", "norm add relu", "default tile", "stages.0.convs.0"):
        assert line in str(report)


@pytest.mark.parametrize("name", ["resnet18", "mobilenetv2_035", "regnety_002"])
def test_timm(name: str) -> None:
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    module, x = timm.create_model(name, num_classes=10).eval(), torch.randn(1, 3, 32, 32)
    fast = optimized(module, x)
    assert fast.im2win_report.mode == "graph" and fast.im2win_report.swapped == len(fast.im2win_report.layers)
    assert sum("norm" in one.fused for one in fast.im2win_report.layers) > 10
    with torch.inference_mode():
        y, expected = fast(x), module(x)
    assert float((y - expected).abs().max()) <= 1e-4 * float(expected.abs().max())


def test_what_convolutions_there_are() -> None:
    """Strides, groups, dilation, sides that differ, windows that are not square; what is none of ours stays."""
    module = nn.Sequential(
        nn.Conv2d(5, 8, (3, 2), (2, 1), (0, 1)), nn.Conv2d(8, 8, 3, groups=8, dilation=(1, 2), padding="same"), nn.SiLU(),
        nn.Conv2d(8, 6, 4, padding="same", groups=2, bias=False), nn.Conv2d(6, 4, 3, padding=1, padding_mode="circular"),
        nn.ConvTranspose2d(4, 4, 2), nn.Conv2d(4, 4, 1).bfloat16(),
    )  # fmt: skip
    module.insert(6, _To(torch.bfloat16))
    module.eval()
    with pytest.warns(UserWarning, match="padding='same'"):
        fast = optimized(module)
        with torch.inference_mode():
            torch.testing.assert_close(fast(X), module(X), atol=1e-4, rtol=1e-2)
    report = {layer.name: (bool(layer.algorithm), layer.reason) for layer in fast.im2win_report.layers}
    assert [report[name][0] for name in ("0", "1", "3")] == [True] * 3
    assert report["4"] == (False, "padding mode 'circular'") and report["7"][1].startswith("input and filters are bfloat16 and bfloat16")
    assert [str(layer.conv) for layer in fast.im2win_report.layers][:3] == [
        "n2-c5x12x14-k8x3x2-s2x1-p0x1-bias", "n2-c8x5x15-k8x3x3-p1x2-d1x2-g8-bias-silu", "n2-c8x5x15-k6x4x4-p1.1.2.2-g2",
    ]  # fmt: skip


class _To(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(self.dtype)


def test_inputs_and_outputs_of_any_structure(calls: list[str]) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(5, 4, 3)

        def forward(self, x: torch.Tensor, y: torch.Tensor, scale: float = 2.0) -> dict[str, Any]:
            return {"sum": self.conv(x) + self.conv(y) * scale, "both": (x, [y])}

    module = with_integers(Two())
    fast = optimized(module, (X, X + 1))
    assert len(fast.im2win_report.layers) == 2
    calls.clear()
    with torch.inference_mode():
        for arguments, options, count in (((X, X + 1), {}, 2), ((X,), {"y": X + 1}, 2), ((X, X + 1, 3.0), {}, 0)):
            y, expected = fast(*arguments, **options), module(*arguments, **options)
            assert torch.equal(y["sum"], expected["sum"]) and y["both"][0] is X
            assert len(calls) == count
            calls.clear()


# --- memory formats and shapes


def test_channels_last_in_is_channels_last_out() -> None:
    module, x = with_integers(Residual()), X.contiguous(memory_format=torch.channels_last)
    fast = optimized(module, x)
    assert all(layer.conv and layer.conv.layout == "NHWC" for layer in fast.im2win_report.layers)
    equal(fast, module, x)
    last = copy.deepcopy(module).to(memory_format=torch.channels_last)  # the first layer decides by its filters
    fast = optimized(last, X)
    assert fast.im2win_report.layers[0].conv and fast.im2win_report.layers[0].conv.layout == "NHWC"
    equal(fast, last, X)


def test_filters_may_change_their_type_and_memory_format(calls: list[str]) -> None:
    module = with_integers(Residual())
    fast = optimized(module, dynamic="build")
    equal(fast, module)
    fast.to(memory_format=torch.channels_last)
    calls.clear()
    equal(fast, module)
    assert len(calls) == 3 and all("-NHWC" in name for name in calls)
    fast.double()
    with torch.inference_mode():
        assert torch.equal(fast(X.double()), module(X.double()))
    fast.float()
    equal(fast, module)


def test_other_shapes_fall_back_with_one_note(calls: list[str], caplog: pytest.LogCaptureFixture) -> None:
    module = with_integers(Residual())
    fast = optimized(module)
    calls.clear()
    with caplog.at_level(logging.WARNING, "im2win.torch"):
        for x in (X[:1], X[:, :, 2:], X[:1], X.contiguous(memory_format=torch.channels_last)):
            equal(fast, module, x)
    assert not calls and len(caplog.records) == 1
    assert "input (1, 5, 12, 14) (NCHW) is not the example's" in caplog.text
    equal(fast, module, X)
    assert len(calls) == 3


def test_other_shapes_are_built_if_asked(calls: list[str], tmp_path: Path) -> None:
    module = with_integers(Residual())
    fast = optimized(module, dynamic="build", cache=tmp_path)
    assert fast.im2win_report.built == 3
    calls.clear()
    for _ in range(2):
        equal(fast, module, X[:1])
    assert len(calls) == 6 and all(name.startswith("n1-") for name in calls)
    assert len(list(tmp_path.glob("*/*.so"))) == 6


def test_inputs_that_are_not_contiguous_are_copied(calls: list[str]) -> None:
    module = with_integers(nn.Conv2d(5, 4, 3))
    wide = integers(2, 5, 12, 28)
    x = wide[..., ::2]
    fast = optimized(module, x)
    calls.clear()
    equal(fast, module, x)
    assert calls


# --- parameters


def test_state_dict_is_the_modules_own() -> None:
    module = with_integers(Residual())
    fast = optimized(module)
    mine, theirs = fast.state_dict(keep_vars=True), module.state_dict(keep_vars=True)
    assert list(mine) == list(theirs) and all(mine[name] is theirs[name] for name in theirs)
    assert [name for name, _ in fast.named_modules()] == [name for name, _ in module.named_modules()]


def test_changes_of_parameters_are_seen(calls: list[str]) -> None:
    """Loaded in place and by assignment, written by an optimizer's step, in buffers, and in a copy of the module."""
    module, other = with_integers(Residual()), with_integers(Residual())
    for parameter in other.parameters():
        parameter.data.neg_()
    fast = optimized(module)
    with torch.inference_mode():
        before = module(X)
    module.load_state_dict(copy.deepcopy(other.state_dict()))
    equal(fast, other)
    with torch.inference_mode():
        assert not torch.equal(fast(X), before)
    fast.load_state_dict({name: value * 1 for name, value in with_integers(Residual()).state_dict().items()}, assign=True)
    with torch.inference_mode():
        assert torch.equal(fast(X), before)
    with torch.no_grad():
        module.first.weight += 1
        module.second_norm.running_mean += 1
    equal(fast, module)
    twin = copy.deepcopy(fast)
    with torch.no_grad():
        twin.second.bias.fill_(3)
        module.second.bias.fill_(-1)
    equal(fast, module)
    plain = copy.deepcopy(module)
    with torch.no_grad():
        plain.second.bias.fill_(3)
    calls.clear()
    equal(twin, plain)
    assert len(calls) == 3


def test_what_pytorch_does_not_count_is_packed_on_demand() -> None:
    for module in (with_integers(Residual()), with_integers(Heads())):
        fast = optimized(nn.Sequential(module).eval() if isinstance(module, Heads) else module)
        for one in module.parameters():
            one.data.neg_()
        im2win.torch.repack(nn.ModuleList([fast]))
        with torch.inference_mode():
            y, expected = fast(X), module(X)
            assert all(map(torch.equal, y, expected))
    with pytest.raises(ValueError, match=r"`module` \(a Conv2d\) must be a result of im2win.torch.optimize"):
        im2win.torch.repack(nn.Conv2d(1, 1, 1))


def test_shared_modules_and_parameters() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Conv2d(5, 5, 3, padding=1), nn.Conv2d(5, 5, 3, padding=1)
            self.other.weight = self.one.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.other(self.one(self.one(x) * 0.125)[:, :, ::2] * 0.125)

    module = with_integers(Shared())
    fast = optimized(module)
    assert [layer.name for layer in fast.im2win_report.layers] == ["one", "one", "other"]
    equal(fast, module)
    with torch.no_grad():
        fast.one.weight.neg_()
    equal(fast, module)


# --- training, gradients, autocast


def test_training_is_pytorchs(calls: list[str]) -> None:
    module = Residual().eval()
    fast, alone = optimized(module), copy.deepcopy(module)
    calls.clear()
    fast.train()
    y, expected = fast(X), alone.train()(X)
    assert torch.equal(y, expected) and not calls
    assert torch.equal(module.first_norm.running_mean, alone.first_norm.running_mean)
    fast.eval()
    alone.eval()
    with torch.no_grad():
        torch.testing.assert_close(fast(X), alone(X), atol=1e-5, rtol=1e-5)
        assert len(calls) == 3
        fast.second_norm.train()
        alone.second_norm.train()
        torch.testing.assert_close(fast(X), alone(X), atol=1e-5, rtol=1e-5)
    assert len(calls) == 5
    torch.testing.assert_close(fast.second_norm.running_var, alone.second_norm.running_var)


@pytest.mark.parametrize("activation", [nn.ReLU(), nn.ReLU6(), nn.SiLU()], ids=["relu", "relu6", "silu"])
def test_gradients_are_pytorchs(activation: nn.Module, calls: list[str]) -> None:
    torch.manual_seed(0)
    module = Residual(activation=activation).eval()
    alone, x = copy.deepcopy(module), torch.randn(2, 5, 12, 14, requires_grad=True)
    fast = optimized(module, x.detach())
    calls.clear()
    y, expected = fast(x), alone(x)
    assert len(calls) == 3 and y.requires_grad
    grad = torch.randn_like(y)
    (of_x,) = torch.autograd.grad(y, x, grad, retain_graph=True)
    (wanted,) = torch.autograd.grad(expected, x, grad, retain_graph=True)
    torch.testing.assert_close(of_x, wanted, atol=1e-4, rtol=1e-4)
    y.backward(grad)
    expected.backward(grad)
    for (name, one), other in zip(fast.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, atol=1e-3, rtol=1e-4, msg=name)


def test_autocast_is_pytorchs(calls: list[str]) -> None:
    module = with_integers(Residual())
    fast = optimized(module)
    calls.clear()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(fast(X), module(X)) and not calls


# --- without a graph


class Heads(nn.Module):
    """Branches on values, which torch.fx cannot trace, and runs one convolution on several shapes, as detectors do."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Conv2d(5, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.head, self.never = nn.Conv2d(8, 4, 1), nn.Conv2d(8, 4, 1)
        self.levels = nn.ModuleList([nn.Identity(), nn.MaxPool2d(2)])

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        y = self.block(x)
        if x.sum() > 1e9:
            return [self.never(y)]
        return [self.head(level(y)) for level in self.levels]


def test_modules_that_cannot_be_traced_are_swapped_one_by_one(calls: list[str]) -> None:
    module = with_integers(Heads())
    fast = optimized(module)
    report = fast.im2win_report
    assert report.mode == "modules" and report.note.startswith("torch.fx cannot trace it (TraceError")
    assert [(one.name, one.algorithm, one.fused) for one in report.layers] == [
        ("block.0", "direct", ()), ("head", "direct", ()), ("head", "direct", ()), ("never", "", ()),
    ]  # fmt: skip
    assert "nothing fused: torch.fx cannot trace it" in str(report) and "the example did not reach it" in str(report)
    calls.clear()
    with torch.inference_mode():
        assert all(map(torch.equal, fast(X), module(X))) and len(calls) == 3
    assert list(fast.state_dict()) == list(module.state_dict()) and fast.head.weight is module.head.weight
    assert type(module.head) is nn.Conv2d and isinstance(fast.head, nn.Conv2d) and fast.never is module.never
    with torch.no_grad():
        module.head.weight.neg_()
        assert all(map(torch.equal, fast(X), module(X)))
    calls.clear()
    module.block[1].eps = 1.0  # of 0 training refuses
    alone = copy.deepcopy(module).train()
    fast.train()
    assert all(map(torch.equal, fast(X), alone(X))) and not calls
    assert not module.training and module.block.training is False


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
    done = command("tune", path, "--trials", 2, "--logs", logs, "--algorithm", "direct")
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


def test_the_next_process_compiles_nothing(tmp_path: Path) -> None:
    """Nor does one that loads an exported program, which never loads TVM's compiler."""
    module = with_integers(Residual())
    fast = optimized(module, cache=tmp_path)
    torch.save({"x": X, "state": module.state_dict()}, tmp_path / "saved.pt")
    torch.export.save(torch.export.export(fast, (X,)), tmp_path / "exported.pt2")
    program = """
import sys, torch, im2win.torch
from im2win.torch.bound import Bound
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
    environment = {**os.environ, "IM2WIN_CACHE": str(tmp_path), "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])}
    for path in tmp_path.glob("*/defaults"):
        raise AssertionError(f"{path}: the tests' choice is not the cache's")
    folder = tmp_path / host().name / "defaults"
    folder.mkdir()
    for layer in fast.im2win_report.layers:
        name, tile = default_tile(layer.conv, "direct", host())
        choice = json.dumps({"algorithm": name, "tile": tile.as_dict()})
        (folder / f"{layer.conv}.float32.{im2win.artefacts._package()}.json").write_text(choice)
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=200, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["1", "3", "0", "0", "1"], done.stderr


def test_bad_arguments() -> None:
    module = Residual()
    with pytest.raises(ValueError, match=r"`module` must be in eval mode, .*call module.eval\(\) first"):
        im2win.torch.optimize(module, X)
    with pytest.raises(TypeError, match=r"`module` \(a list\) must be a torch.nn.Module"):
        im2win.torch.optimize([], X)
    module.eval()
    for options, message in (
        ({"untuned": "skip"}, r"`untuned` \(='skip'\) must be one of default, keep"),
        ({"dynamic": "yes"}, r"`dynamic` \(='yes'\) must be one of fallback, build"),
        ({"accuracy": "high"}, r"`accuracy` \(='high'\) must be one of exact"),
        ({"threads": 10_000}, r"`threads` \(=10000\) must be an integer from 1"),
    ):
        with pytest.raises(ValueError, match=message):
            im2win.torch.optimize(module, X, **options)
    with pytest.raises(ValueError, match="`module` is a result of optimize already"):
        im2win.torch.optimize(im2win.torch.optimize(module, X, untuned="keep"), X)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch advises against what is refused here
        script = torch.jit.trace(module, X)
    with pytest.raises(ValueError, match="`module` is a ScriptModule"):
        im2win.torch.optimize(script, X)
    with pytest.raises(RuntimeError):  # PyTorch's own words
        im2win.torch.optimize(module, X[:, :3])


# --- what a call costs


def test_a_call_goes_past_the_dispatcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plain call runs the bound operator and a few dozen Python calls, whatever its layer: no dispatch, no packing, no look-up anew."""
    fast = optimized(with_integers(nn.Sequential(nn.Conv2d(5, 8, 3), nn.BatchNorm2d(8), nn.ReLU())))
    place = fast._im2win.site_0
    monkeypatch.setattr(conv_op, "conv2d", None)
    monkeypatch.setattr(Bound, "_bind", None)
    monkeypatch.setattr(site.Site, "_route", None)
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
    conv = Conv2d.parse("n1-c64x56x56-k64x3x3-p1-bias-add-relu")
    with pytest.raises(NoGpuError):
        Planner().decide(conv, "cuda")
    monkeypatch.setattr("im2win.backends.device_for", lambda target, threads=None: H200)
    monkeypatch.setattr(Artefacts, "get", lambda self, conv, algorithm, tile, device, tuned: (f"{device.name} {algorithm}", object()))
    for problem, reason in ((conv, "other epilogue"), (conv.with_(bias=False, residual=False, activation=None), "exact")):
        decision = Planner(untuned="keep").decide(problem, "cuda")
        assert (decision.reason, decision.target) == (reason, "cuda") and decision.name.startswith("nvidia-h200 ")
    other = Planner(untuned="keep").decide(conv.with_(kernel=(5, 5)), "cuda")
    assert other.op is None and other.reason == "no record of this layer on this device"


@pytest.mark.parametrize("algorithm", ["direct", "im2win"])
def test_a_gpus_layer_runs_and_packs_in_place(algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a call hands to the kernels, in their order; filters bound anew lie where the old ones were."""
    conv = Conv2d.parse("n1-c32x14x14-k64x3x3-bias-add-float16")
    row, backend = ALGORITHMS[algorithm], backend_for(H200)
    _, tile = backend.ranked(conv, row)[0]
    seen: list[Any] = []
    made = row.cuda.made_bytes(conv, tile) // conv.itemsize if row.cuda else 0
    manifest = SimpleNamespace(pack=backend.pack(conv, tile), made=made)
    op: Any = SimpleNamespace(conv=conv, manifest=manifest, kernels=lambda *tensors: seen.extend(tensors))
    monkeypatch.setattr(cuda_runtime, "_upload", lambda array, device: torch.from_numpy(array).clone())
    w, bias = integers(*conv.filter_shape).half(), integers(64).half()
    layer, other = cuda_runtime.CudaLayer(op, w, bias), cuda_runtime.CudaLayer(op, -w, -bias)
    x, residual, out = (torch.zeros(shape, dtype=torch.float16) for shape in (conv.input_shape, conv.output_shape, conv.output_shape))
    layer.run(x, residual, out)
    data, scratch, filters, biases, added, output = seen
    assert (data is x, added is residual, output is out) == (True, True, True)
    assert scratch is None if algorithm == "direct" else scratch.numel() == made > 0
    address = filters.data_ptr()
    layer.rebind(-w, -bias)
    assert filters.data_ptr() == address and torch.equal(filters, other._packed[0]) and torch.equal(biases, -bias)
