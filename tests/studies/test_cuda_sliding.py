"""The sliding-window study: both kernels exact on the emulator, what cannot be launched an error and no time, its table as measured."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from emulated import Emulated, Made, combined, differences, expected, typed
from oracle import exact_tensors
from scripts import script

from im2win.bench import cuda_builds, cuda_harness
from im2win.bench.cuda_harness import Subject
from im2win.codegen import cuda as cuda_codegen
from im2win.codegen.llvm import TileError, ToolchainError
from im2win.device.gpu import H200
from im2win.emulator import EmulationError
from im2win.reports import studies
from im2win.reports.tables import ReportError, fill
from im2win.schedules.studies import sliding
from im2win.spec.conv2d import Conv2d
from im2win.spec.suites import suite
from im2win.studies import sliding as cuda_sliding
from im2win.studies.sliding import SlidingRecipe

BLOCKS = (4, 8, 16, 32)


def made(conv: Conv2d, form: str, block: int) -> Made:
    """A form's kernel for an H200."""
    assert sliding.violations(conv, form, block, H200) == []
    module = cuda_codegen.kernel_module({"conv2d": sliding.sliding_kernel(conv, form, block)})
    return Made(f"{form} {block}x{block}", cuda_codegen.generate_source(module, H200), sliding.PACK)


def kernels(conv: Conv2d, blocks: tuple[int, ...] = BLOCKS) -> list[Made]:
    return [made(conv, form, block) for form in sliding.FORMS for block in blocks]


# --- the kernels


@pytest.mark.parametrize(
    "key",
    [
        "n1-c3x16x16-k3x3x3-p1",  # every block but the largest divides
        "n1-c3x23x21-k3x3x3-s2-p1",  # blocks reach beyond the output and the input
        "n2-c3x32x35-k3x3x3-s3-p1",  # stride 3, two images
        "n2-c2x17x15-k5x4x3-s1x2-p0.1.2.0-d2x1",  # four sides, an even kernel, dilation, other channels
        "n1-c1x9x7-k2x3x3",  # no padding: no test is left in the global form
    ],
)
def test_both_forms_are_exact(key: str) -> None:
    conv = Conv2d.parse(key)
    tensors, run = typed(conv, exact_tensors(conv)), Emulated(conv, made_ := kernels(conv))
    for seed in (0, 1):
        wrong = differences(conv, made_, run(tensors, seed), expected(conv, tensors))
        assert not wrong, f"{conv}, seed {seed}:\n" + "\n".join(wrong)


def test_the_barrier_is_needed() -> None:
    conv = Conv2d.parse("n1-c3x9x9-k3x3x3-p1")
    tensors, [one] = typed(conv, exact_tensors(conv)), kernels(conv, (4,))[1:]
    assert one.generated.source.count("__syncthreads();") == 1
    run = Emulated(conv, [one], lambda source: source.replace("__syncthreads();", ""))

    def wrong(seed: int) -> bool:
        with contextlib.suppress(EmulationError):
            return bool(differences(conv, [one], run(tensors, seed), expected(conv, tensors)))
        return True

    assert any(map(wrong, range(12)))


def test_forms_are_what_they_are_called() -> None:
    """One thread a pixel, block x block of them; the halo tile with its rim in shared memory, or none."""
    conv = Conv2d.parse("n1-c3x64x64-k3x3x3-s2-p1")
    for one, (form, block) in zip(kernels(conv, (8, 16)), [(f, b) for f in sliding.FORMS for b in (8, 16)], strict=True):
        [launch] = one.generated.launches
        assert launch.block == (block, block, 1) and launch.grid == (32 // block, 32 // block, 1)
        assert ("shared_ptr" in one.generated.source) == (form == "shared")
        rim = 2 * (block - 1) + 3
        assert (launch.dynamic_bytes >= 3 * rim * rim * 4) if form == "shared" else launch.dynamic_bytes == 0


def test_machine_code() -> None:
    _compiler()
    conv = Conv2d.parse("n1-c3x8192x8192-k3x3x3-s3-p1")
    code = cuda_codegen.cubin(combined(conv, kernels(conv, (4, 32)))[0], H200)
    assert code.startswith(b"\x7fELF") and all(f"conv2d_{i}_kernel".encode() in code for i in range(4))


def _compiler() -> None:
    try:
        cuda_codegen.compiler()
    except ToolchainError as error:
        pytest.skip(str(error))


# --- what is refused

UNLAUNCHABLE = "a block of 64x64 has 4096 threads; at most 1024 can be launched"


@pytest.mark.parametrize(
    "key, form, block, rule",
    [
        ("n1-c3x128x128-k3x3x3-p1", "global", 64, UNLAUNCHABLE),
        ("n1-c3x128x128-k3x3x3-p1", "shared", 64, UNLAUNCHABLE),
        ("n1-c3x128x128-k3x3x3-p1", "texture", 8, "`form` (=texture) must be one of global, shared"),
        ("n1-c3x128x128-k3x3x3-p1", "global", 0, "`block` (=0) must be at least 1"),
        ("n1-c8x128x128-k3x3x3-s3-p1", "shared", 32, "takes 294912 bytes of shared memory; it may have 232448"),
        ("n1-c3x128x128-k3x3x3-p1-NHWC", "global", 8, "float32 in NCHW, without groups"),
        ("n1-c3x128x128-k3x3x3-p1-relu", "global", 8, "have no epilogue"),
        ("n70000-c1x1x1-k1x1x1", "global", 1, "70000 images must be at most 65535"),
    ],
)
def test_what_cannot_be_launched_has_a_reason(key: str, form: str, block: int, rule: str) -> None:
    conv = Conv2d.parse(key)
    assert any(rule in reason for reason in sliding.violations(conv, form, block, H200))
    with pytest.raises(TileError) as refused:
        SlidingRecipe(conv, form, block, H200).compile(Path("/nowhere.so"))
    assert rule in str(refused.value)


def test_every_block_of_the_study_but_the_largest_can_be_launched() -> None:
    for layer in suite("sliding"):
        for form in sliding.FORMS:
            legal = [block for block in cuda_sliding.BLOCKS if not sliding.violations(layer.conv, form, block, H200)]
            assert legal == [4, 8, 16, 32], layer.name


def test_the_emulator_launches_no_such_block_either() -> None:
    """That the rule is CUDA's and not only ours: a kernel made in spite of it does not run."""
    conv = Conv2d.parse("n1-c3x9x9-k3x3x3-p1")
    module = cuda_codegen.kernel_module({"conv2d": sliding.sliding_kernel(conv, "global", 64)})
    one = Made("64x64", cuda_codegen.generate_source(module, H200), sliding.PACK)
    with pytest.raises(EmulationError, match="more than 1024 threads a block"):
        Emulated(conv, [one])(typed(conv, exact_tensors(conv)))


# --- the study, on a device that is none


class FakeBench:
    """A bench without tensors: outputs are always right."""

    def __init__(self, conv: Conv2d, seed: int) -> None:
        self.conv = conv


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU on which a form with block b takes b ms (shared: half), im2col 9, the default 1 and cuDNN 3; PyTorch has none in NHWC."""

    def build_all(recipes: dict[Any, Any], folder: Path) -> dict[Any, Any]:
        broken = {
            key: sliding.violations(one.conv, one.form, one.block, H200) for key, one in recipes.items() if isinstance(one, SlidingRecipe)
        }
        return {key: "; ".join(broken[key]) + "." if broken.get(key) else key[1] for key in recipes}

    def subject(bench: Any, built: Any, allowed: float) -> Subject:
        if isinstance(built, str):
            raise cuda_builds.BuildError(built)
        form, block = built
        seconds = 1e-3 * ({"im2col": 9, "default": 1}.get(form) or block * (0.5 if form == "shared" else 1))
        return Subject(lambda: seconds, 0, 1e-7, "implicit_gemm/tiled" if form == "default" else form)

    def no_nhwc() -> Subject:
        raise cuda_harness.WrongError("PyTorch has no such convolution.")

    @contextlib.contextmanager
    def peers(bench: Any) -> Iterator[list[tuple[str, Callable[[], Subject]]]]:
        yield [("cudnn_implicit_gemm", lambda: Subject(lambda: 3e-3, 0, 1e-7)), ("torch_nhwc", no_nhwc)]

    monkeypatch.setattr(cuda_sliding, "device_gpu", lambda: H200)
    monkeypatch.setattr(cuda_sliding.backend_for(H200).__class__, "check_tools", lambda self: None)
    monkeypatch.setattr(cuda_sliding, "set_up_peers", lambda accuracy: None)
    monkeypatch.setattr(cuda_sliding, "Bench", FakeBench)
    monkeypatch.setattr(cuda_sliding, "build_all", build_all)
    monkeypatch.setattr(cuda_sliding, "kernel_subject", subject)
    monkeypatch.setattr(cuda_sliding, "every_peer", peers)
    monkeypatch.setattr(cuda_sliding, "verify", lambda bench, call, allowed: ("", 0.0))
    monkeypatch.setattr(cuda_harness, "sample", lambda bench, call: call())


def test_the_script_writes_what_the_table_shows(fake_gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    study = script("benchmarks/sliding_window.py")
    file = tmp_path / "studies" / "nvidia-h200" / "sliding-window.json"
    monkeypatch.setattr(sys, "argv", ["sliding_window.py", "--json", str(file), "--layers", "image128_s1,image128_s3", "--rounds", "3"])
    study.main()
    study = json.loads(file.read_text())
    entries = {(entry["stride"], entry["form"], entry["block"]): entry for entry in study["entries"]}
    assert len(entries) == len(study["entries"]) == 2 * (2 * 5 + 2 + 2)
    for stride in (1, 3):
        for form in sliding.FORMS:
            none = entries[stride, form, 64]
            assert none["ms"] is None and none["samples"] == 0 and UNLAUNCHABLE in none["failed"]
            assert entries[stride, form, 4]["ms"] is not None and entries[stride, form, 4]["failed"] is None
        assert entries[stride, "torch_nhwc", None]["failed"] == "PyTorch has no such convolution."
    text = fill("<!-- table:sliding-window -->\n<!-- /table -->", {}, studies.load_all(tmp_path / "results"))
    assert "| 128x128 | 1 | 4.000 (4x4) | 2.000 (4x4) | 9.000 | 1.000 | implicit_gemm / tiled | 3.000 | 3.00 |" in text
    assert "| 64x64 | failed | failed | failed | failed |" in text and f"Failed: {UNLAUNCHABLE}." in text
    assert "| 8x8 | 8.000 | 8.000 | 4.000 | 4.000 |" in text and "NVIDIA H200 (`nvidia-h200`)" in text


def test_without_a_study_a_text_keeps_what_it_says_if_it_may() -> None:
    text = "<!-- table?:sliding-window -->\nNot measured yet.\n<!-- /table -->"
    assert fill(text, {}) == text
    with pytest.raises(ReportError, match="'sliding-window'"):
        fill(text.replace("?", ""), {})


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="`layers` and `blocks`"):
        cuda_sliding.run([])
    with pytest.raises(ValueError, match=r"`rounds` \(=0\)"):
        cuda_sliding.run(list(suite("sliding"))[:1], rounds=0)
