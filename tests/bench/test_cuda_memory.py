"""Device memory: formulas by hand for every algorithm, what a run notes of ours and of peers, and its tables. Measuring is faked here."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from memory_formulas import FORMULAS, letters

import im2win
from im2win.bench import cuda_memory
from im2win.bench.cuda_memory import ALLOCATOR_BYTES, judge
from im2win.bench.memory_result import LayerMemory, MemoryResult
from im2win.bench.peers.cudnn import CudnnError, Forward
from im2win.bench.results import ResultError
from im2win.device import gpu
from im2win.numerics.winograd_tiling import ALIGNMENT, FORMS
from im2win.registry.schedules import SCHEDULES, schedule_of
from im2win.reports import memory as memory_report
from im2win.reports import tables as report
from im2win.reports.memory import mebibytes
from im2win.schedules.cuda.families.multistage import OutputParts
from im2win.spec.conv2d import Conv2d
from im2win.spec.suites import Layer, suite

STORED = (  # as whole tensors
    "im2win/stored", "im2col/tiled", "mec/tiled", "winograd/tensor_cores", "im2win/scheduled", "im2col/scheduled", "mec/scheduled",
)  # fmt: skip


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
@pytest.mark.parametrize("name", [name for name, row in SCHEDULES.items() if row.cuda is not None])
def test_formulas(name: str, dtype: str, layout: str) -> None:
    """The papers', whatever the layout; MCFA's is im2col's of a part, and of the whole where that is one part; Winograd's a row of tiles.

    Winograd's transformed tensor has the tile's inputs for every channel, what the products make of it, aligned, as many for every filter.
    """
    for layer in suite("papers12", 128):
        conv = layer.conv.with_(dtype=dtype, layout=layout)
        if name == "winograd/tiled" and conv.kernel[0] not in FORMS:
            continue
        schedule, stored = schedule_of(name).on_gpu, schedule_of(name).stored_bytes(conv, "cuda")
        whole = FORMULAS["im2col/tiled"](**letters(conv)) * conv.itemsize
        if isinstance(schedule, OutputParts):
            parts = schedule.windows.parts(conv)
            assert stored * parts.count >= whole and stored * (parts.count - 1) < whole
        elif name == "winograd/tiled":
            taps, width, channels = conv.kernel[0], conv.output_size[1], conv.in_channels + conv.out_channels
            least = conv.itemsize * min(math.ceil(width / m) * (m + taps - 1) ** 2 * channels for m in FORMS[taps])
            assert least <= stored < least + ALIGNMENT
        elif name == "implicit_gemm/split_k":
            assert stored == 4 * FORMULAS[name](**letters(conv)), "sums take four bytes, whatever the element type"
        elif name == "winograd/tensor_cores" and dtype == "int8":
            tiles = conv.batch * math.prod(-(-extent // 2) for extent in conv.output_size)
            assert stored == 16 * tiles * conv.in_channels, "tiles of int8 have two outputs along a side"
        else:
            assert stored == (FORMULAS[name](**letters(conv)) * conv.itemsize if name in STORED else 0)


def test_a_measured_peak_is_held_against_the_formula() -> None:
    assert judge(0, 0) is None and judge(1000, 1024) is None and judge(5 << 20, (5 << 20) + ALLOCATOR_BYTES) is None
    assert judge(0, 512) == "measured 512 bytes, where the formula says 0"
    assert judge(5 << 20, (5 << 20) + ALLOCATOR_BYTES + 1) is not None and judge(1024, 1023) is not None


# --- a run


class Torch:
    """Stands in for PyTorch's statistics: a call's result says how much it held."""

    version = SimpleNamespace(cuda="13.0")
    backends = SimpleNamespace(cudnn=SimpleNamespace(), cuda=SimpleNamespace(matmul=SimpleNamespace()))
    cuda = SimpleNamespace(empty_cache=lambda: None)


class Library:
    """Stands in for cuDNN."""

    def __enter__(self) -> Library:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def plans(self, conv: Conv2d, math: str) -> list[Forward]:
        assert math == "fma"
        return [Forward("IMPLICIT_GEMM", "FMA", 0), Forward("FFT", "FMA", 3 << 20)]

    def choice(self, conv: Conv2d, math: str) -> Forward:
        return self.plans(conv, math)[1]


@pytest.fixture
def faked(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """A machine on which calls hold what the formula says, and by algorithm what is put into the result instead."""
    other: dict[str, int] = {}

    def build(conv: Conv2d, target: str, *, algorithm: str, **_: Any) -> Any:
        assert target == "cuda"
        if algorithm == "mec/tiled":
            raise RuntimeError("first line\nit does not build")
        formula = schedule_of(algorithm).stored_bytes(conv, "cuda")
        held = other.get(algorithm, formula)

        def bind(w: Any, bias: Any = None) -> Callable[..., Any]:
            assert w.shape == conv.filter_shape and (bias is not None) == conv.bias
            return lambda x, residual, out: held

        return SimpleNamespace(bind=bind, extra_bytes=formula)

    def torch_call(conv: Conv2d, tensors: dict[str, Any], layout: str) -> Callable[[], Any]:
        if layout == "NHWC":
            raise RuntimeError("PyTorch has no such convolution.")
        return lambda: tensors["output"]

    def call_bytes(call: Callable[[], Any]) -> tuple[int, Any]:
        result = call()
        return (result, result) if isinstance(result, int) else ((7 << 20) + result.numel() * result.element_size(), result)

    def zeros(conv: Conv2d) -> dict[str, Any]:
        output = SimpleNamespace(numel=lambda: math.prod(conv.output_shape), element_size=lambda: conv.itemsize)
        return {name: np.zeros(1) for name in conv.arguments} | {"output": output}

    monkeypatch.setitem(sys.modules, "torch", Torch)
    monkeypatch.setattr(im2win, "build", build)
    monkeypatch.setattr(cuda_memory, "Cudnn", Library)
    monkeypatch.setattr(cuda_memory, "device_gpu", lambda: gpu.H200)
    monkeypatch.setattr(cuda_memory, "torch_call", torch_call)
    monkeypatch.setattr(cuda_memory, "call_bytes", call_bytes)
    monkeypatch.setattr(cuda_memory, "device_zeros", zeros)
    monkeypatch.setattr(cuda_memory, "versions", lambda: {"torch": "2.11"})
    return other


def test_what_a_run_notes(faked: dict[str, int], tmp_path: Path) -> None:
    faked["direct/tiled"] = 4096
    layers, seen = [Layer("plain", Conv2d(4, 64, 30, 30, 64, 3)), Layer("one", Conv2d(4, 64, 30, 30, 64, 1, bias=True))], list[int]()
    result = cuda_memory.measure(layers, suite="demo", progress=lambda done, total, row: seen.append(done))
    plain, one = result.layers
    assert seen == [1, 2] and (result.device, result.batch, result.dtype) == ("nvidia-h200", 4, "float32")
    able = [name for name, row in SCHEDULES.items() if row.supports(layers[0].conv, "cuda") is None]
    assert plain.formula_bytes == {name: schedule_of(name).stored_bytes(layers[0].conv, "cuda") for name in able}
    measured = {name: plain.formula_bytes[name] for name in able if name != "mec/tiled"}
    assert plain.measured_bytes == measured | {"direct/tiled": 4096}
    assert plain.failed == {
        "direct/tiled": "measured 4096 bytes, where the formula says 0", "mec/tiled": "it does not build",
        "torch_nhwc": "PyTorch has no such convolution.",
        "direct/depthwise": "it is for depthwise layers, which have a group for every input channel",
        "direct/persistent": "persistent kernels multiply float16 or bfloat16 or int8, not float32",
        "direct/warp_specialized": "warp-specialized kernels multiply float16 or bfloat16 or int8 or float8_e4m3fn, not float32",
        "winograd/tensor_cores": "Winograd's form on tensor cores multiplies float16 or int8, not float32",
    }  # fmt: skip
    assert plain.torch_bytes == {"torch_nchw": 7 << 20}
    assert (plain.cudnn_bytes, plain.cudnn_choice) == ({"implicit_gemm": 0, "fft": 3 << 20}, "fft")
    assert "share no taps" in one.failed["direct/tiled"] and "direct/tiled" not in one.formula_bytes
    path = result.save(tmp_path / "nvidia-h200" / "memory-demo-b4.json")
    assert MemoryResult.load(path) == result == memory_report.load_all(tmp_path)["nvidia-h200/memory-demo-b4"]
    assert report.load_all(tmp_path) == {} and report.plot_all(tmp_path) == []


def test_what_cudnn_refuses_is_a_reason(faked: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: object) -> None:
        raise CudnnError("cuDNN: it has an epilogue.")

    monkeypatch.setattr(Library, "plans", refuses)
    row = cuda_memory.measure_layer(Layer("plain", Conv2d(4, 64, 30, 30, 64, 3)))
    assert row.failed["cudnn"] == "cuDNN: it has an epilogue." and row.cudnn_bytes == {} and row.cudnn_choice is None


def test_the_command(faked: dict[str, int], command: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "memory-small.json"
    done = command("layers", "n4-c64x30x30-k64x3x3", "--target", "cuda", "--memory", "--json", path)
    assert done.status == 0 and "1/1" in done.out and "cuDNN's choice fft" in done.out and "it does not build" in done.out
    assert MemoryResult.load(path).layers[0].conv == "n4-c64x30x30-k64x3x3"
    done = command("layers", "n4-c64x30x30-k64x3x3", "--target", "cuda", "--memory", "--json", tmp_path / "small.json")
    assert done.status == 2 and "must begin with 'memory-'" in done.err and "1/1" not in done.out


def test_the_commands_formulas_need_no_gpu(command: Callable[..., Any]) -> None:
    done = command("layers", "papers12", "--batch", 128, "--layers", "conv4", "--target", "cuda")
    assert done.status == 0 and "426.4 MiB" in done.out and "5.2 GiB" in done.out and "unsupported" in done.out
    assert "int8" in command("layers", "papers12", "--dtype", "int8", "--target", "cuda").out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--json", "memory-x.json"], "`--json` is for what `--memory --target cuda` measures."),
        (["--json", "memory-x.json", "--target", "cuda"], "`--json` is for what `--memory --target cuda` measures."),
        (["--target", "vulkan"], "`target` (='vulkan') must be one of cpu, cuda."),
    ],
)
def test_wrong_options(command: Callable[..., Any], words: list[str], message: str) -> None:
    done = command("layers", "papers12", *words)
    assert done.status == 2 and message in done.err


# --- tables


def test_numbers() -> None:
    assert [mebibytes(size) for size in (0, 1000, 1 << 20, 15 << 19, 345 << 19, None)] == ["0", "< 0.1", "1.0", "7.5", "172", "–"]  # noqa: RUF001


def result_of(*rows: LayerMemory) -> MemoryResult:
    versions, date = {"torch": "2.11", "python": "3.12"}, "2026-01-02T03:04:05+00:00"
    return MemoryResult("demo", "float32", 8, "nvidia-h200", "NVIDIA H200", versions, "abc", date, list(rows))


def table_of(*rows: LayerMemory) -> list[str]:
    return memory_report.tables(result_of(*rows)).splitlines()


def test_tables() -> None:
    mib = 1 << 20
    first = LayerMemory(
        "conv1", "n8-c3x8x8-k4x3x3", 30 * mib, {"direct/tiled": 0, "im2col/tiled": 12 * mib, "mec/tiled": 2 * mib},
        {"direct/tiled": 0, "im2col/tiled": 12 * mib + 512, "mec/tiled": 9 * mib}, {"torch_nchw": 5 * mib},
        {"implicit_gemm": 0, "fft": 40 * mib}, "fft", {"mec/tiled": "measured"},
    )  # fmt: skip
    lines = table_of(first, LayerMemory("conv2", "n8-c3x9x9-k4x3x3", mib, {"direct/tiled": 0}, {"direct/tiled": 0}, {}, {"gemm": mib}))
    assert lines[0] == "| layer | tensors | direct / tiled | im2col / tiled | mec / tiled |"
    assert lines[2:4] == ["| conv1 | 30 | 0 | 12 | 2.0 (measured 9.0) |", "| conv2 | 1.0 | 0 | – | – |"]  # noqa: RUF001
    assert lines[5] == "| layer | cuDNN's choice | its workspace | PyTorch NCHW | cuDNN implicit_gemm | cuDNN fft | cuDNN gemm |"
    assert lines[7:9] == ["| conv1 | fft | 40 | 5.0 | 0 | 40 | – |", "| conv2 | – | – | – | – | – | 1.0 |"]  # noqa: RUF001
    assert "batch 8" in lines[-1] and "at most 7.0 MiB" in lines[-1] and "2026-01-02" in lines[-1] and "torch 2.11" in lines[-1]


def test_a_marker_is_filled_where_the_result_is_there_and_else_left_empty() -> None:
    name = "nvidia-h200/memory-demo-b8"
    empty = f"a\n<!-- table?:{name} -->\n<!-- /table -->\nb\n"
    assert report.fill(empty, {}) == empty
    result = result_of(LayerMemory("conv1", "n1-c1x1x1-k1x1x1", 0, {"direct/tiled": 0}))
    filled = report.fill(empty, {}, memory={name: result})
    assert "| conv1 | 0 | 0 |" in filled and report.fill(filled, {}, memory={name: result}) == filled


def test_results_of_memory_of_the_first_schema_load_without_digests(tmp_path: Path) -> None:
    saved = result_of(LayerMemory("conv1", "n1-c1x1x1-k1x1x1", 0))
    saved.digests = {"target": "cuda", "kernels": "0"}
    path = saved.save(tmp_path / "memory-r.json")
    assert MemoryResult.load(path) == saved
    values = {**json.loads(path.read_text()), "schema": 1}
    del values["digests"]
    path.write_text(json.dumps(values))
    assert MemoryResult.load(path) == result_of(LayerMemory("conv1", "n1-c1x1x1-k1x1x1", 0))


FOREIGN = ["{", "[]", '{"schema": 3}', '{"schema": 2}', '{"schema": 1}', '{"schema": 1, "layers": [{"layer": "a"}]}']


@pytest.mark.parametrize("text", FOREIGN)
def test_foreign_results_are_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "memory-r.json"
    path.write_text(text)
    with pytest.raises(ResultError, match=r"memory-r\.json"):
        MemoryResult.load(path)
    with pytest.raises(ResultError, match="not a readable JSON"):
        MemoryResult.load(tmp_path / "memory-none.json")
