"""cuDNN by name: what is passed to the C functions, checked against a stand-in library; on a GPU, every plan against the oracle.

Numbers are written here as cuDNN's headers have them, not taken from the module.
"""

from __future__ import annotations

import ctypes
import gc
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from oracle import exact_tensors, oracle

from im2win.bench.peers import cudnn
from im2win.bench.peers.cuda import cudnn_math
from im2win.bench.peers.cudnn import MATHS, Algorithm, Cudnn, CudnnError, Forward, Math, arguments, find_library, output_dtype, supports
from im2win.spec.accuracy import Accuracy
from im2win.spec.conv2d import Conv2d

PLAIN = Conv2d.parse("n2-c8x9x11-k16x3x3-p1")
NAMES = ["IMPLICIT_GEMM", "IMPLICIT_PRECOMP_GEMM", "GEMM", "DIRECT", "FFT", "FFT_TILING", "WINOGRAD", "WINOGRAD_NONFUSED"]
QUERY = "cudnnGetConvolutionForwardWorkspaceSize"


def plain(value: Any) -> Any:
    """A number, out of what ctypes would pass: a pointer's address, or what a reference refers to."""
    value = getattr(value, "_obj", value)
    return getattr(value, "value", value)


class Library:
    """Stands in for libcudnn.so.9: records each call with its numbers, and answers with the status asked for.

    Args:
        algorithms: statuses of the workspace query by algorithm; otherwise it succeeds, and needs 100 bytes times the algorithm's number.
        statuses: statuses of other functions by name.
    """

    def __init__(self, algorithms: dict[int, int] | None = None, statuses: dict[str, int] | None = None) -> None:
        self.calls: list[tuple[str, list[Any]]] = []
        self.algorithms, self.statuses, self.made = algorithms or {}, statuses or {}, 0

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if not name.startswith("cudnn"):
            raise AttributeError(name)

        def function(*values: Any) -> Any:
            if name == "cudnnGetVersion":
                return 91902
            if name == "cudnnGetErrorString":
                return f"STATUS_{values[0]}".encode()
            if name.startswith("cudnnCreate"):
                self.made += 1
                values[0]._obj.value = self.made
            if name == QUERY:
                values[6]._obj.value = 100 * values[5]
            self.calls.append((name, [plain(value) for value in values]))
            return self.algorithms.get(values[5], 0) if name == QUERY else self.statuses.get(name, 0)

        return function

    def of(self, part: str) -> list[list[Any]]:
        """The numbers of every call of the functions whose name has `part`."""
        return [values for name, values in self.calls if part in name]

    def alive(self) -> int:
        """Descriptors made and not destroyed yet."""
        made = [values for name, values in self.calls if name.startswith("cudnnCreate") and name.endswith("Descriptor")]
        gone = [values for name, values in self.calls if name.startswith("cudnnDestroy") and name.endswith("Descriptor")]
        assert all(values in made for values in gone) and len({values[0] for values in gone}) == len(gone), "destroyed twice or never made"
        return len(made) - len(gone)


@pytest.mark.parametrize(
    ("key", "x", "w", "y", "convolution", "groups"),
    [
        # NCHW is 0 and NHWC 1; float32 0, float16 2, int8 3, int32 4; sizes are n, c, h, w whatever the layout; cross-correlation is 1
        ("n2-c5x11x13-k17x3x3-p1", (0, 0, 2, 5, 11, 13), (0, 0, 17, 5, 3, 3), (0, 0, 2, 17, 11, 13), (1, 1, 1, 1, 1, 1, 1, 0), 1),
        ("n1-c4x14x16-k8x3x5-s2x3-p1x2", (0, 0, 1, 4, 14, 16), (0, 0, 8, 4, 3, 5), (0, 0, 1, 8, 7, 6), (1, 2, 2, 3, 1, 1, 1, 0), 1),
        ("n3-c8x17x16-k8x3x2-d3x2-g4-NHWC", (1, 0, 3, 8, 17, 16), (0, 1, 8, 2, 3, 2), (1, 0, 3, 8, 11, 14), (0, 0, 1, 1, 3, 2, 1, 0), 4),
        ("n2-c6x9x11-k6x3x3-p1-g6", (0, 0, 2, 6, 9, 11), (0, 0, 6, 1, 3, 3), (0, 0, 2, 6, 9, 11), (1, 1, 1, 1, 1, 1, 1, 0), 6),
        ("n1-c8x7x7-k8x1x1-float16", (0, 2, 1, 8, 7, 7), (2, 0, 8, 8, 1, 1), (0, 2, 1, 8, 7, 7), (0, 0, 1, 1, 1, 1, 1, 0), 1),
        ("n1-c8x7x7-k8x1x1-float16-NHWC", (1, 2, 1, 8, 7, 7), (2, 1, 8, 8, 1, 1), (1, 2, 1, 8, 7, 7), (0, 0, 1, 1, 1, 1, 1, 0), 1),
        ("n1-c8x7x9-k4x3x3-int8-NHWC", (1, 3, 1, 8, 7, 9), (3, 1, 4, 8, 3, 3), (1, 0, 1, 4, 5, 7), (0, 0, 1, 1, 1, 1, 1, 4), 1),
        ("n1-c8x7x9-k4x3x3-int8-out.int8-NHWC", (1, 3, 1, 8, 7, 9), (3, 1, 4, 8, 3, 3), (1, 3, 1, 4, 5, 7), (0, 0, 1, 1, 1, 1, 1, 4), 1),
    ],
)
def test_arguments(key: str, x: tuple[int, ...], w: tuple[int, ...], y: tuple[int, ...], convolution: tuple[int, ...], groups: int) -> None:
    found = arguments(Conv2d.parse(key), Math.FMA)
    assert (found.x, found.w, found.y, found.convolution, found.groups, found.math) == (x, w, y, convolution, groups, 3)


@pytest.mark.parametrize(
    ("key", "math", "reason"),
    [
        ("n1-c4x9x11-k16x3x3-p0.1.2.0", "fma", "`padding` (=(0, 1, 2, 0)) must be the same on opposite sides"),
        ("n1-c4x9x11-k16x3x3-p1.1.1.2", "fma", "`padding` (=(1, 1, 1, 2)) must be the same on opposite sides"),
        ("n1-c4x9x11-k16x3x3-p1-bias", "fma", "it has an epilogue"),
        ("n1-c4x9x11-k16x3x3-p1-add", "fma", "it has an epilogue"),
        ("n1-c4x9x11-k16x3x3-p1-relu", "fma", "it has an epilogue"),
        ("n1-c4x9x11-k16x3x3-p1-int8", "tensor", "not in NCHW"),
        ("n1-c6x9x11-k16x3x3-p1-int8-NHWC", "tensor", "for int8 `in_channels` (=6) and `out_channels` (=16) must be multiples of 4"),
        ("n1-c8x9x11-k18x3x3-p1-int8-NHWC", "tensor", "for int8 `in_channels` (=8) and `out_channels` (=18) must be multiples of 4"),
        ("n1-c4x9x11-k16x3x3-p1", "tensor", "`math` (='tensor') must be one of fma, tf32 for float32"),
        ("n1-c4x9x11-k16x3x3-p1-float16", "tf32", "`math` (='tf32') must be one of fma, tensor for float16"),
        ("n1-c4x9x11-k16x3x3-p1", "ieee", "`math` (='ieee') must be one of fma, tf32 for float32"),
    ],
)
def test_what_cannot_be_expressed_is_refused_in_the_same_words_everywhere(key: str, math: str, reason: str) -> None:
    conv, library = Conv2d.parse(key), Library()
    assert reason in (supports(conv, math) or "")
    with pytest.raises(CudnnError) as refused:
        Cudnn(library).plans(conv, math)  # type: ignore[arg-type]
    assert reason in str(refused.value) and key in str(refused.value)
    if "`math`" not in reason:
        with pytest.raises(CudnnError) as refused:
            Cudnn(library).runner(conv, Forward("GEMM", "FMA", 0), 1, 2, 3)  # type: ignore[arg-type]
        assert reason in str(refused.value)
    assert library.alive() == 0


@pytest.mark.parametrize(
    ("key", "math", "name", "number"),
    [
        ("n1-c8x7x7-k8x1x1", "fma", "FMA", 3),
        ("n1-c8x7x7-k8x1x1", "tf32", "DEFAULT", 0),
        ("n1-c8x7x7-k8x1x1-float16", "fma", "FMA", 3),
        ("n1-c8x7x7-k8x1x1-float16-NHWC", "tensor", "TENSOR_OP", 1),
        ("n1-c8x7x7-k8x1x1-int8-NHWC", "tensor", "TENSOR_OP", 1),
    ],
)
def test_every_algorithm_is_asked_for_and_what_is_not_supported_left_out(key: str, math: str, name: str, number: int) -> None:
    library = Library({3: 3000, 4: 3002, 6: 3007})
    plans = Cudnn(library).plans(Conv2d.parse(key), math)  # type: ignore[arg-type]
    assert plans == [Forward(NAMES[i], name, 100 * i) for i in (0, 1, 2, 5, 7)]
    assert [values[5] for values in library.of(QUERY)] == list(range(8))
    assert [values[1] for values in library.of("SetConvolutionMathType")] == [number]
    assert library.alive() == 0


def test_the_choice_of_heuristics_is_the_first_that_works() -> None:
    """Rows of 48 bytes: algorithm, status, milliseconds, bytes, determinism, math, three words."""
    rows = [(6, 3000, -1.0, 7), (1, 0, 0.25, 1 << 33), (0, 0, 0.5, 0)]

    class Choosing(Library):
        def __getattr__(self, name: str) -> Callable[..., Any]:
            if name != "cudnnGetConvolutionForwardAlgorithm_v7":
                return super().__getattr__(name)

            def choose(*values: Any) -> int:
                handle, x, *others = (plain(value) for value in values[:6])
                assert handle == 1 and others == [x + 1, x + 2, x + 3, 8]
                values[6]._obj.value = len(rows)
                raw = b"".join(struct.pack("=iif4xQii3i4x", *row, 1, 3, 0, 0, 0) for row in rows)
                ctypes.memmove(values[7], raw, len(raw))
                return 0

            return choose

    library = Choosing()
    handle = Cudnn(library)  # type: ignore[arg-type]
    assert handle.choice(PLAIN, "fma") == Forward("IMPLICIT_PRECOMP_GEMM", "FMA", 1 << 33)
    rows[:] = rows[:1]
    assert handle.choice(PLAIN, "fma") is None
    assert library.alive() == 0
    with pytest.raises(CudnnError, match="`math`"):
        handle.choice(PLAIN, "tensor")


def test_other_failures_of_a_query_are_errors() -> None:
    library = Library({2: 2000})
    with pytest.raises(CudnnError, match=r"^cudnnGetConvolutionForwardWorkspaceSize of GEMM: STATUS_2000 \(2000\)\.$"):
        Cudnn(library).plans(PLAIN, "fma")  # type: ignore[arg-type]
    assert library.alive() == 0


@pytest.mark.parametrize("name", ["cudnnCreateFilterDescriptor", "cudnnSetFilter4dDescriptor", "cudnnSetConvolutionGroupCount"])
def test_a_descriptor_that_fails_is_named_and_leaves_none_behind(name: str) -> None:
    library = Library(statuses={name: 2000})
    handle = Cudnn(library)  # type: ignore[arg-type]
    for attempt in (lambda: handle.plans(PLAIN, "fma"), lambda: handle.runner(PLAIN, Forward("GEMM", "FMA", 0), 1, 2, 3)):
        with pytest.raises(CudnnError, match=rf"^{name}: STATUS_2000 \(2000\)\.$"):
            attempt()
    assert library.alive() == (2 if "Create" in name else 0)  # what was not created (the stand-in counts it) is not destroyed


def test_a_runner_describes_once_and_then_only_runs() -> None:
    library = Library()
    with Cudnn(library) as handle:  # type: ignore[arg-type]
        handle.set_stream(77)
        call = handle.runner(PLAIN, Forward("FFT_TILING", "FMA", 4096), 1000, 2000, 3000, 4000)
        assert library.of("cudnnSetStream") == [[1, 77]]
        x, w, convolution, y = 2, 3, 4, 5  # in the order they were made, after the handle
        assert library.of("SetTensor4d") == [[x, 0, 0, 2, 8, 9, 11], [y, 0, 0, 2, 16, 9, 11]]
        assert library.of("SetFilter4d") == [[w, 0, 0, 16, 8, 3, 3]]
        assert library.of("SetConvolution2d") == [[convolution, 1, 1, 1, 1, 1, 1, 1, 0]]
        assert library.of("SetConvolutionGroupCount") == [[convolution, 1]]
        before = len(library.calls)
        call()
        call()
        one_call = ("cudnnConvolutionForward", [1, 1.0, x, 1000, w, 2000, convolution, 5, 4000, 4096, 0.0, y, 3000])
        assert library.calls[before:] == [one_call, one_call]
        gc.collect()
        assert library.alive() == 4
        del call
        gc.collect()
        assert library.alive() == 0


def test_a_run_that_fails_is_an_error_each_time() -> None:
    call = Cudnn(Library(statuses={"cudnnConvolutionForward": 5003})).runner(PLAIN, Forward("GEMM", "FMA", 0), 1, 2, 3)  # type: ignore[arg-type]
    for _ in range(2):
        with pytest.raises(CudnnError, match=r"^cudnnConvolutionForward by GEMM: STATUS_5003 \(5003\)\.$"):
            call()


@pytest.mark.parametrize(
    ("pointers", "missing"),
    [((0, 2, 3, 4), "x_ptr"), ((1, 0, 3, 4), "w_ptr"), ((1, 2, 0, 4), "y_ptr"), ((1, 2, 3, 0), "workspace_ptr")],
)
def test_a_missing_address_is_named(pointers: tuple[int, int, int, int], missing: str) -> None:
    with pytest.raises(CudnnError, match=f"`{missing}` must be a device address, not 0"):
        Cudnn(Library()).runner(PLAIN, Forward("GEMM", "FMA", 64), *pointers)  # type: ignore[arg-type]


def test_the_handle_is_destroyed_once_and_not_used_after() -> None:
    library = Library()
    handle = Cudnn(library)  # type: ignore[arg-type]
    assert handle.version == "9.19.2"
    call = handle.runner(PLAIN, Forward("GEMM", "FMA", 0), 1, 2, 3)
    handle.close()
    handle.close()
    assert library.of("cudnnDestroy")[:1] == [[1]] and [name for name, _ in library.calls].count("cudnnDestroy") == 1
    call()
    assert library.of("cudnnConvolutionForward")[0][0] is None  # cuDNN answers BAD_PARAM to that


def test_without_the_library_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudnn, "find_library", lambda: None)
    with pytest.raises(CudnnError, match=r"libcudnn\.so\.9 is not there: pip install"):
        Cudnn()


@pytest.mark.skipif(sys.platform != "linux", reason="cuDNN 9 is looked for on Linux only")
def test_the_library_is_found_in_its_package_unless_one_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if (found := find_library()) is not None:
        assert found.cudnnGetVersion() >= 90000
        pytest.skip("cuDNN is installed here, and that one is found")
    path = tmp_path / "nvidia" / "cudnn" / "lib" / "libcudnn.so.9"
    path.parent.mkdir(parents=True)
    path.symlink_to(np._core._multiarray_umath.__file__)  # any library
    monkeypatch.syspath_prepend(tmp_path)
    found = find_library()
    assert found is not None and found._name == str(path)


def test_a_handle_that_cannot_be_made_is_an_error() -> None:
    with pytest.raises(CudnnError, match=r"^cudnnCreate: STATUS_1001 \(1001\)\.$"):
        Cudnn(Library(statuses={"cudnnCreate": 1001}))  # type: ignore[arg-type]


def test_names_of_algorithms_are_those_of_the_header() -> None:
    assert [algorithm.name for algorithm in sorted(Algorithm)] == NAMES and sorted(Algorithm) == list(range(8))


GPU_KEYS = (
    "n2-c8x12x14-k16x3x3-p1",
    "n2-c8x12x14-k16x3x3-p1-NHWC",
    "n3-c16x33x29-k32x5x3-s2x1-p2x1",
    "n2-c12x15x17-k24x3x3-p2-d2-g2-NHWC",
    "n1-c6x9x11-k6x3x3-p1-g6",
    "n2-c16x9x11-k32x1x1-float16-NHWC",
    "n2-c16x13x11-k32x3x3-p1-float16",
    "n2-c32x13x11-k32x3x3-p1-int8-NHWC",
    "n2-c32x13x11-k32x3x3-p1-int8-out.int8-NHWC",
)


@pytest.mark.parametrize("key", GPU_KEYS)
def test_every_plan_computes_the_convolution(key: str) -> None:
    """Small integers: exact in every type (float16 rounds the sum once), unless an algorithm transforms x and w and rounds on the way."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("cuDNN needs an NVIDIA GPU, and PyTorch sees none")
    if find_library() is None:
        pytest.skip("libcudnn.so.9 is not installed")
    conv = Conv2d.parse(key)
    tensors = exact_tensors(conv)
    expected = oracle(conv, tensors["data"], tensors["filter"], scale=np.ones(conv.out_channels) if conv.requantised else None)
    filters = tensors["filter"] if conv.layout == "NCHW" else tensors["filter"].transpose(0, 2, 3, 1)
    x, w = (torch.from_numpy(np.ascontiguousarray(a.astype(conv.dtype))).cuda() for a in (tensors["data"], filters))
    ran = 0
    with Cudnn() as handle:
        handle.set_stream(torch.cuda.current_stream().cuda_stream)
        for math in (name for name, dtypes in MATHS.items() if conv.dtype in dtypes):
            for plan in handle.plans(conv, math):
                y = torch.full(conv.output_shape, 99, dtype=getattr(torch, output_dtype(conv)), device="cuda")
                workspace = torch.empty(max(plan.workspace_bytes, 1), dtype=torch.uint8, device="cuda")
                try:
                    handle.runner(conv, plan, x.data_ptr(), w.data_ptr(), y.data_ptr(), workspace.data_ptr())()
                except CudnnError as error:
                    assert "NOT_SUPPORTED" in str(error)  # accepted by its description, refused when run
                    continue
                transformed = plan.algorithm.startswith(("FFT", "WINOGRAD"))
                tolerance = 5e-2 if transformed and plan.math != "FMA" else 1e-3
                wrong = np.abs(y.cpu().numpy().astype(np.float64) - expected).max() / np.abs(expected).max()
                assert wrong <= tolerance, f"{plan}: {wrong}"
                ran += 1
    assert ran or conv.dtype == "int8", "cuDNN accepts at least the implicit product of every such problem"


def test_what_an_accuracy_asks_of_cudnn() -> None:
    """Whoever accepts less than TF32 accepts TF32; halves have tensor cores with any."""
    whole, half = Conv2d.parse("n1-c8x7x7-k8x3x3"), Conv2d.parse("n1-c8x7x7-k8x3x3-float16")
    assert [cudnn_math(whole, accuracy) for accuracy in get_args(Accuracy)] == ["fma", "fma", "tf32", "tf32"]
    assert {cudnn_math(half, accuracy) for accuracy in get_args(Accuracy)} == {"tensor"}
