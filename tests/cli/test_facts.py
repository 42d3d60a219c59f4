"""What the command line says of itself, of algorithms and of devices, and what it loads for that."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import im2win
from im2win.cli.commands import facts, tables
from im2win.common.torch_import import needed
from im2win.device import gpu
from im2win.device.cpu import Machine
from im2win.registry.schedules import Schedule
from im2win.spec.conv2d import Conv2d
from im2win.spec.methods import shown
from im2win.spec.suites import suite

LOADED = """
import sys
from im2win.cli.main import main
try:
    main(sys.argv[1:])
except SystemExit as end:
    print(end.code, sorted({"tvm", "tvm_ffi", "torch"} & {*sys.modules}))
"""


def test_help_lists_the_verbs_and_does_not_load_the_compiler() -> None:
    done = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, timeout=60, check=True)
    for verb in ("tune", "build", "bench", "layers", "logs", "algorithms", "device", "demo"):
        assert f" {verb} " in done.stdout
    assert done.stdout.splitlines()[-1] == "0 []"


@pytest.mark.skipif(needed(), reason="with NVIDIA's driver PyTorch is loaded, as it brings CUDA's libraries")
def test_commands_load_the_compiler_without_pytorch() -> None:
    done = subprocess.run([sys.executable, "-c", LOADED, "device"], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "0 ['tvm', 'tvm_ffi']"


def test_version(command: Callable[..., Any]) -> None:
    assert command("--version").out == f"im2win {im2win.__version__}\n"


def test_algorithms_are_those_of_the_registry(command: Callable[..., Any]) -> None:
    from im2win.registry.schedules import SCHEDULES

    first, second, _ = command("algorithms").out.split("\n\n")
    for lines in (first.splitlines(), second.splitlines()):
        assert [line.split("  ")[0] for line in lines] == ["algorithm / schedule", *map(shown, SCHEDULES)]


def test_tables_of_algorithms_say_where(monkeypatch: pytest.MonkeyPatch) -> None:
    """yes, no, or the targets; and the layouts of each target and element type."""
    from im2win.registry.schedules import SCHEDULES, Schedule

    def named(columns: list[str], rows: list[list[str]], name: str) -> dict[str, str]:
        return dict(zip(columns, next(row for row in rows if row[0] == name), strict=True))

    monkeypatch.setitem(SCHEDULES, "mec/tiled", dataclasses.replace(SCHEDULES["mec/tiled"], cuda=None))
    assert named(*facts.properties(), "direct / tiled")["1x1"] == "cpu" and named(*facts.properties(), "im2col / tiled")["1x1"] == "yes"
    assert named(*facts.properties(), "mec / tiled")["stride"] == "cpu"

    def first_only(row: Schedule, conv: Conv2d, target: str, accuracy: str) -> str | None:
        return "it is last" if conv.layout == "NHWC" or conv.groups > 1 else None

    monkeypatch.setattr(Schedule, "supports", first_only)
    assert named(*facts.properties(), "mec / tiled")["groups"] == "no" and named(*facts.types(), "mec / tiled")["cuda int8"] == "NCHW"
    monkeypatch.undo()
    assert "no" not in named(*facts.properties(), "implicit_gemm / split_k")["stride"], "sums in parts compute what has channels enough"
    types = named(*facts.types(), "direct / tiled")
    assert types == {
        "algorithm / schedule": "direct / tiled", "cpu float32": "NCHW, NHWC", "cpu float16": "no", "cpu bfloat16": "no",
        "cpu int8": "no", "cpu uint8": "no", "cuda uint8": "no", "cpu float8_e4m3fn": "no", "cuda float8_e4m3fn": "no",
        "cuda float32": "NCHW, NHWC", "cuda float16": "NCHW, NHWC", "cuda bfloat16": "NCHW, NHWC",
        "cuda int8": "NCHW, NHWC",
    }  # fmt: skip


def test_tables_of_algorithms_leave_out_no_layer_of_a_suite() -> None:
    """Whatever layer of a network a schedule computes, the tables say that it computes such layers."""
    from im2win.registry.backends import TARGETS
    from im2win.registry.schedules import SCHEDULES

    columns, rows = facts.properties()
    said = {row[0]: dict(zip(columns, row, strict=True)) for row in rows}
    has = {
        "1x1": lambda conv: conv.kernel == (1, 1) and conv.stride == (1, 1), "stride": lambda conv: conv.stride == (2, 2),
        "depthwise": lambda conv: conv.groups == conv.in_channels > 1,
    }  # fmt: skip
    for conv in {layer.conv for name in ("resnet50", "mobilenet_v2") for layer in suite(name)}:
        kinds = [conv.with_(dtype=dtype, layout=layout) for dtype in ("float32", "float16") for layout in ("NCHW", "NHWC")]
        for column in (name for name, holds in has.items() if holds(conv)):
            for name, row in SCHEDULES.items():
                for target in TARGETS:
                    if any(row.supports(kind, target, "winograd") is None for kind in kinds):
                        assert said[shown(name)][column] in ("yes", target), f"{name} computes {conv} on {target}"


def test_device_is_the_name_of_the_logs_folder(command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the CPU, and of the GPU where there is one."""
    monkeypatch.setattr(facts, "device_gpu", lambda: gpu.H200)
    both = command("device").out
    assert Machine.host().name in both and "nvidia-h200" in both and "no GPU" not in both
    only = command("device", "--target", "cuda").out
    assert Machine.host().name not in only
    for fact, value in (
        ("compute capability", "9.0"), ("multiprocessors", "132"), ("shared memory per block", "227.0 KiB"),
        ("clock under load", "1.75 GHz"), ("memory bandwidth, measured", "4200 GB/s"), ("level-2 bandwidth, measured", "5500 GB/s"),
    ):  # fmt: skip
        assert re.search(rf"^{fact} +{re.escape(value)} *$", only, re.MULTILINE), only
    assert "nvidia-h200" not in command("device", "--target", "cpu").out
    other = dataclasses.replace(gpu.H200, brand="NVIDIA Another", arch="sm_120a")
    monkeypatch.setattr(facts, "device_gpu", lambda: other)
    assert "memory bandwidth, estimated" in command("device").out and "12.0" in command("device").out


def test_device_without_a_gpu(command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> None:
        raise gpu.NoGpuError("there is no CUDA device 0 on this machine.")

    monkeypatch.setattr(facts, "device_gpu", none)
    done = command("device")
    assert done.status == 0 and "no GPU: there is no CUDA device 0" in done.out and Machine.host().name in done.out
    done = command("device", "--target", "cuda")
    assert (done.status, done.out, done.err) == (2, "", "im2win: there is no CUDA device 0 on this machine.\n")
    done = command("device", "--target", "vulkan")
    assert done.status == 2 and "`target` (='vulkan') must be one of cpu, cuda." in done.err


def test_layers_of_a_suite(command: Callable[..., Any]) -> None:
    out = command("layers", "papers12", "--batch", 1, "--layers", "conv9,conv12", "--memory").out
    assert "n1-c64x56x56-k64x3x3 " in out and "2 layers, 2 convolutions, 0.33 GFLOP" in out
    conv = Conv2d.parse("n1-c64x56x56-k64x3x3")
    assert tables.bytes_text(4 * 64 * 54 * 3 * 56) in out  # the im2win tensor: Ci * Ho * Hf * Wi
    assert tables.bytes_text(4 * 64 * 9 * 54 * 54) in out  # the im2col matrix: Ci * Hf * Wf * Ho * Wo
    assert tables.bytes_text(conv.bytes_moved) in out


def test_layers_of_a_model(command: Callable[..., Any], resnet50_onnx: Path) -> None:
    assert "53 convolutions" in command("layers", resnet50_onnx).out


def test_unsupported_algorithms_are_marked(command: Callable[..., Any]) -> None:
    assert "unsupported" in command("layers", "n1-c8x10x10-k16x3x3-p1-float16").out
