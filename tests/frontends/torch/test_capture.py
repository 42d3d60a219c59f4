"""Layers of running programs: what `im2win.capture` notes, the file it writes, and the command line that reads it."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from im2win.common.locking import LogError
from im2win.spec.captured_layers import LayerFileError, append_layers, read_layers
from im2win.spec.conv2d import Conv2d

A, B = Conv2d.parse("n1-c4x8x8-k4x3x3-p1"), Conv2d.parse("n2-c3x9x9-k4x3x3-s2-bias-NHWC")


# --- files


def test_counts_of_several_runs_add_up(tmp_path: Path) -> None:
    path = tmp_path / "new" / "layers.jsonl"
    append_layers(path, {(A, "cpu"): 2, (B, "cpu"): 1})
    append_layers(path, {(A, "cuda"): 3})
    layers, skipped = read_layers(path)
    assert [(layer.name, layer.conv, layer.count) for layer in layers] == [(str(A), A, 5), (str(B), B, 1)] and not skipped
    assert [layer.conv.batch for layer in read_layers(path, batch=8)[0]] == [8, 8]


def test_many_writers(tmp_path: Path) -> None:
    path = tmp_path / "layers.jsonl"
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: append_layers(path, {(A, "cpu"): 1, (B, "cpu"): 2}), range(40)))
    assert [layer.count for layer in read_layers(path)[0]] == [40, 80]


def test_a_broken_line_costs_that_line(tmp_path: Path) -> None:
    path = tmp_path / "layers.jsonl"
    append_layers(path, {(A, "cpu"): 1})
    rows: list[Any] = [{"schema": 2}, [], {"schema": 1, "conv": str(A), "count": 0}, {"schema": 1, "conv": "n1", "count": 1}]
    with path.open("a") as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows) + '{"schema": 1, "conv"')
    append_layers(path, {(A, "cpu"): 1})
    layers, skipped = read_layers(path)
    assert [layer.count for layer in layers] == [2] and len(skipped) == 5
    for line, words in zip(skipped, ("`schema` must be 1", "`schema`", "`count` (=0)", "key 'n1' must look", ""), strict=True):
        assert line.startswith(f"{path}, line ") and words in line


def test_what_is_no_file_of_layers(tmp_path: Path) -> None:
    with pytest.raises(LayerFileError, match=r"none.jsonl: cannot be read \(No such file"):
        read_layers(tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(LayerFileError, match=r"no layer in it; `im2win\.capture` writes such files"):
        read_layers(tmp_path / "empty.jsonl")
    with pytest.raises(LogError, match="choose another folder"):
        append_layers(tmp_path / "empty.jsonl" / "layers.jsonl", {(A, "cpu"): 1})


def test_the_command_line_reads_them(command: Callable[..., Any], tmp_path: Path) -> None:
    """`im2win tune` of such a file is in test_torch_layers.py."""
    path = tmp_path / "layers.jsonl"
    append_layers(path, {(A, "cpu"): 2, (B, "cpu"): 1})
    path.write_text(path.read_text() + "{}\n")
    done = command("layers", path)
    assert done.status == 0 and "2 layers, 3 convolutions" in done.out and f"skipped: {path}, line 3: `schema` must be 1" in done.out
    done = command("layers", path, "--layers", "none")
    assert done.status == 2 and f"must name layers of the workload: {A}, {B}" in done.err
    done = command("layers", tmp_path / "none.jsonl")
    assert done.status == 2 and "none.jsonl: cannot be read" in done.err


def test_the_package_does_not_need_pytorch() -> None:
    """Nor its part for PyTorch an import of its own."""
    program = "import sys, im2win, im2win.spec.captured_layers, im2win.cli.commands.workload; print('torch' in sys.modules)"
    program += "; im2win.torch.optimize" if importlib.util.find_spec("torch") else ""
    environment = {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, timeout=60)
    assert done.returncode == 0 and done.stdout.strip() == "False", done.stderr


# --- programs


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch")


@pytest.mark.parametrize("inference", [True, False])
def test_convolutions_of_a_program(torch: Any, inference: bool, tmp_path: Path) -> None:
    import im2win

    nn = torch.nn
    module = nn.Sequential(
        nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.ReLU(),
        nn.Conv2d(4, 6, (3, 2), (2, 1), (0, 1), (1, 2), 2), nn.Conv2d(6, 6, 3, padding="same"),
    )  # fmt: skip
    x, path = torch.randn(2, 4, 8, 9), tmp_path / "layers.jsonl"
    with torch.inference_mode(inference), im2win.capture(path) as captured:
        y = module(x)
        module(x.contiguous(memory_format=torch.channels_last))
    if not inference:
        with im2win.capture(path):
            y.sum().backward()  # backward passes are none
    keys = ["n2-c4x8x9-k4x3x3-p1", "n2-c4x8x9-k6x3x2-s2x1-p0x1-d1x2-g2-bias", "n2-c6x3x9-k6x3x3-p1-bias"]
    expected = [f"{key}" for key in keys] + [key.replace("-bias", "-NHWC-bias") if "bias" in key else f"{key}-NHWC" for key in keys]
    layers, skipped = read_layers(path)
    assert [(layer.name, layer.count) for layer in layers] == list(zip(expected, [2, 1, 1] * 2, strict=True)) and not skipped
    assert not captured.skipped and {target for _, target in captured.counts} == {"cpu"}


@pytest.mark.parametrize("inference", [False, True], ids=["no_grad", "inference_mode"])
def test_lines_are_images_of_one_row(torch: Any, tmp_path: Path, inference: bool) -> None:
    import im2win

    functional, path = torch.nn.functional, tmp_path / "layers.jsonl"
    with torch.inference_mode() if inference else torch.no_grad(), im2win.capture(path) as captured:
        functional.conv1d(torch.randn(2, 4, 9), torch.randn(6, 2, 3), torch.randn(6), stride=2, padding=1, dilation=2, groups=2)
        functional.conv1d(torch.randn(2, 4, 9), torch.randn(6, 4, 3), padding="same")
    keys = ["n2-c4x1x9-k6x1x3-s1x2-p0x1-d1x2-g2-bias", "n2-c4x1x9-k6x1x3-p0x1"]
    assert [layer.name for layer in read_layers(path)[0]] == keys and not captured.skipped


def test_what_is_not_captured_is_counted(torch: Any, tmp_path: Path) -> None:
    import im2win

    functional, path = torch.nn.functional, tmp_path / "layers.jsonl"
    with torch.no_grad(), im2win.capture(path) as captured:
        functional.conv2d(torch.randn(4, 8, 8), torch.randn(4, 4, 3, 3), padding=1)  # one image: PyTorch makes it a batch
        functional.conv3d(torch.randn(1, 4, 8, 8, 8), torch.randn(4, 4, 3, 3, 3))
        functional.conv_transpose2d(torch.randn(1, 4, 8, 8), torch.randn(4, 4, 3, 3))
        functional.conv2d(torch.randn(1, 4, 8, 8).double(), torch.randn(4, 4, 3, 3).double())
        functional.conv2d(torch.randn(1, 4, 9, 9).bfloat16(), torch.randn(4, 4, 3, 3).bfloat16())
    assert [layer.conv for layer in read_layers(path)[0]] == [A, im2win.Conv2d.parse("n1-c4x9x9-k4x3x3-bfloat16")]
    assert sorted(captured.skipped) == [
        "a convolution over 3 dimensions", "a transposed convolution",
        "input and filters are float64 and float64, not both float32 or float16 or bfloat16",
    ]  # fmt: skip


def test_what_a_failing_program_ran_is_kept(torch: Any, tmp_path: Path) -> None:
    import im2win

    path = tmp_path / "layers.jsonl"
    with pytest.raises(RuntimeError, match="channels"), im2win.capture(path):
        torch.nn.functional.conv2d(torch.randn(1, 4, 8, 8), torch.randn(4, 4, 3, 3), padding=1)
        torch.nn.functional.conv2d(torch.randn(1, 3, 8, 8), torch.randn(4, 4, 3, 3))
    assert [layer.conv for layer in read_layers(path)[0]] == [A]


def test_optimised_modules_show_what_is_fused(torch: Any, tmp_path: Path) -> None:
    import im2win.torch

    nn = torch.nn
    module, x = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.ReLU()).eval(), torch.randn(1, 4, 8, 8)
    fast = im2win.torch.optimize(module, x)
    with torch.inference_mode(), im2win.capture(tmp_path / "layers.jsonl") as captured:
        y = fast(x)
    assert [str(conv) for conv, _ in captured.counts] == ["n1-c4x8x8-k4x1x1-bias-relu"]
    torch.testing.assert_close(y, module(x))
