"""The thesis' GPU ladder on the emulator: every rung, and Alg. 9 without each technique, is exact, and is what it is called."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from emulated import MARK, Emulated, Made, combined, differences, expected, typed
from oracle import exact_tensors
from paths import ROOT

from im2win.bench import cuda_builds, cuda_harness
from im2win.bench.cuda_harness import Subject
from im2win.bench.results import Result, Row, Spread
from im2win.codegen import cuda as cuda_codegen
from im2win.codegen.llvm import TileError, ToolchainError
from im2win.device.gpu import H200
from im2win.emulator import EmulationError
from im2win.reports import ladder as ladder_report
from im2win.reports.tables import fill
from im2win.schedules.studies import cuda_ladder as ladder
from im2win.schedules.studies import cuda_ladder_schedule as steps
from im2win.schedules.studies.cuda_ladder import ALGORITHM_9, RUNGS, WITHOUT, CudaRung
from im2win.spec.conv2d import Conv2d
from im2win.spec.suites import Layer
from im2win.studies import cuda_ladder as cuda_ablation

THESIS = {name: rung for name, rung in {**RUNGS, **WITHOUT}.items() if not rung.production and name != "without_prefetch"}
PROBLEMS = {
    "n2-c5x11x13-k80x3x3-p1": "windows and terms leave a rest; an odd number of windows: stores are single; two channels a thread",
    "n1-c4x10x13-k64x3x3-p0.1.2.0-bias-relu": "four sides all different, stores of four",
    "n3-c3x23x27-k96x7x7-s4-p3-add": "a first layer with twelve channels a thread; stores of two; blocks end inside an image",
    "n2-c8x9x10-k16x4x4": "an even kernel: a window's terms are loaded four at a time, and fill whole steps",
    "n1-c6x9x12-k32x2x3-s1x2-p1x2-d1x2": "horizontal dilation: a window is a run by columns only, which are loaded two at a time",
    "n1-c6x9x11-k96x3x3-p2-d2-g2-bias-add-relu6": "groups, dilation, and the whole epilogue",
    "n2-c6x7x9-k64x1x1-s2": "1x1: a sum shorter than a step",
}  # fmt: skip


@functools.cache
def made(conv: Conv2d, name: str) -> Made:
    """A rung's kernel for an H200."""
    rung = THESIS[name]
    source = cuda_codegen.generate_source(cuda_ablation.rung_module(conv, rung, H200), H200)
    return Made(name, source, ladder.pack_of(conv, rung), ladder.workspace_bytes(conv) // conv.itemsize)


def body(conv: Conv2d, name: str) -> str:
    """The text of a rung's product kernel."""
    source = made(conv, name).generated.source
    return source[source.index("conv2d_kernel_1(") :].split(MARK)[0]


# --- exact


@pytest.mark.sampled(3)
@pytest.mark.parametrize("key", PROBLEMS)
def test_every_rung_is_exact(key: str) -> None:
    conv = Conv2d.parse(key)
    kernels = [made(conv, name) for name in THESIS]
    tensors = typed(conv, exact_tensors(conv))
    emulated = Emulated(conv, kernels)
    for seed in (0, 1):
        wrong = differences(conv, kernels, emulated(tensors, seed), expected(conv, tensors))
        assert not wrong, f"{conv}, seed {seed}:\n" + "\n".join(wrong)


@pytest.mark.parametrize("name, barriers", [("shared", 2), ("prefetch", 2)])
def test_every_barrier_is_needed(name: str, barriers: int) -> None:
    """One buffer: operands have been put down, and have been read. Two: the first has been filled, and, once a step, both of these."""
    conv = Conv2d.parse("n1-c4x6x9-k16x3x3")
    barrier, tensors = "__syncthreads();", typed(conv, exact_tensors(conv))
    assert body(conv, name).count(barrier) == barriers

    def without(number: int) -> Callable[[str], str]:
        return lambda source: barrier.join(source.split(barrier)[: number + 1]) + barrier.join(source.split(barrier)[number + 1 :])

    for number in range(barriers):
        emulated = Emulated(conv, [made(conv, name)], without(number))

        def wrong(seed: int, run: Emulated = emulated) -> bool:
            try:
                return bool(differences(conv, run.kernels, run(tensors, seed), expected(conv, tensors)))
            except EmulationError:
                return True

        assert any(map(wrong, range(12))), f"{name} is right without its barrier {number}"


# --- what they are called


@pytest.mark.parametrize("name", THESIS)
def test_a_rung_has_its_techniques_and_no_other(name: str) -> None:
    conv, rung = Conv2d.parse("n2-c5x11x13-k64x3x3-p1"), THESIS[name]
    text, sizes = body(conv, name), ladder.sizes_of(conv, rung)
    [launch] = [launch for launch in made(conv, name).generated.launches if launch.kernel == "conv2d_kernel_1"]
    assert launch.block[0] == sizes.threads == (128 if rung.blocks else 1024)
    arrays = {found[2]: int(found[3]) * int(found[1] or 1) for found in re.finditer(r"float(\d?) (\w+)_ptr\[(\d+)\];", text)}
    [sums] = [size for array, size in arrays.items() if array.startswith("conv") and "local" in array]
    assert sums == sizes.thread_m * sizes.thread_n
    assert ("__shared__" in text) == rung.shared == ("__syncthreads" in text)
    buffers = 2 if rung.prefetch else 1
    if rung.micro_kernel:
        operands = [size for array, size in arrays.items() if array.endswith("reindex_local") and size == buffers * 8]
        assert len(operands) == 2, "of channels and of windows"
    elif rung.blocks:
        assert "#pragma unroll 1\n" in text, "the loop over terms is left to the compiler"
    assert ("float4" in text) == rung.vectorized
    if rung.shared:
        shared = re.findall(r"__shared__ alignas\(64\) float(\d?) \w+_ptr\[(\d+)\]", text)
        placed = sum(int(width or 1) * int(size) for width, size in shared)
        rows = sizes.block_k * (sizes.block_m + sizes.block_n + steps.SPARE)
        assert placed == buffers * rows
        assert text.count("__syncthreads") == 2, "a step waits once where buffers are double, else twice"


@pytest.mark.parametrize("name", ["prefetch", "without_micro_kernel", "without_vectorized"])
def test_double_buffers_need_one_barrier_a_step(name: str) -> None:
    text = body(Conv2d.parse("n1-c16x6x9-k64x3x3"), name)
    [loop] = re.findall(r"\n  for \(int \w+ = 0; \w+ < 17; .*?\n  }\n", text, re.DOTALL)
    assert loop.count("__syncthreads();") == 1


@pytest.mark.parametrize(
    "key, whole, rest",
    [("n128-c3x224x224-k64x3x3", 3, 3), ("n128-c3x227x227-k96x11x11-s4", 45, 3), ("n128-c8x9x9-k64x3x3", 9, 0)],
)
def test_blocks_test_no_term_of_a_whole_step(key: str, whole: int, rest: int) -> None:
    """Loads stand in loops without a condition; terms behind the last whole step are a step of their own."""
    text = body(Conv2d.parse(key), "blocks")
    steps = re.findall(r"(?<!unroll)\n  for \(int \w+ = 0; \w+ < (\d+); ", text)
    assert steps == [str(whole)]
    tests = re.findall(r"if \(\w+ < (\d+)\)", text)
    assert tests == ([str(rest)] if rest else []) and "condval" not in text
    assert text.count("#pragma unroll 1\n") == 1 + bool(rest)


def test_vectors_are_where_they_can_be() -> None:
    """Loads of filters and of a micro-kernel's operands are float4; stores and loads of windows as wide as the problem lets them be."""
    odd, even = Conv2d.parse("n1-c4x10x13-k64x3x3-p0.1.2.0-bias-relu"), Conv2d.parse("n2-c8x9x10-k16x4x4")
    text = body(odd, "prefetch")
    assert re.search(r"\*\(float4\*\)\(im2win\w*_local_ptr \+ [^;]* = \*\(float4\*\)\(im2win\w*_shared_ptr", text)
    assert re.search(r"= \*\(float4\*\)\(filter_ptr", text)
    assert re.search(r"\*\(float4\*\)\(output_ptr \+", text)
    assert "*)(im2win_ptr" not in text and "*(float4*)(im2win_ptr" in body(even, "prefetch")
    assert "*(float2*)(output_ptr" in body(even, "prefetch"), "42 windows an image are runs of two"


def test_each_rung_switches_on_one_technique() -> None:
    techniques = [field.name for field in fields(CudaRung) if field.name not in ("title", "source")]
    thesis = [rung for rung in RUNGS.values() if not rung.production]
    assert [rung.techniques for rung in thesis] == [tuple(techniques[:count]) for count in range(len(techniques))]
    assert thesis[-1] == ALGORITHM_9 and list(RUNGS)[-1] == "production"
    assert {name: set(ALGORITHM_9.techniques) - set(rung.techniques) for name, rung in WITHOUT.items()} == {
        f"without_{name}": {name} for name in ("micro_kernel", "shared", "vectorized", "prefetch")
    }


@pytest.mark.parametrize(
    "switched, message",
    [
        ({"shared": True}, r"`shared` \(=True\) needs `blocks`"),
        ({"micro_kernel": True}, r"`micro_kernel` \(=True\) needs `blocks`"),
        ({"vectorized": True}, r"`vectorized` \(=True\) needs `blocks`"),
        ({"blocks": True, "prefetch": True}, r"`prefetch` \(=True\) needs `shared` or `micro_kernel`"),
        ({"blocks": True, "production": True}, r"`production` \(=True\) stands alone"),
    ],
)
def test_a_rung_that_makes_no_sense_is_refused(switched: dict[str, bool], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CudaRung("", "", **switched)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "key, reason",
    [
        ("n1-c4x9x9-k8x3x3-float16", "computes float32, not float16"),
        ("n1-c4x9x9-k8x3x3-NHWC", "is written for NCHW, not NHWC"),
        ("n1-c4x9x9-k24x3x3", "have a multiple of 16 channels of one group, which has 24"),
        ("n128-c64x224x224-k16x9x9", "its transformed tensor would have"),
    ],
)
def test_what_the_ladder_cannot_compute_has_a_reason(key: str, reason: str) -> None:
    with pytest.raises(TileError, match=reason):
        cuda_ablation.rung_module(Conv2d.parse(key), ALGORITHM_9, H200)


def test_machine_code_of_every_rung() -> None:
    try:
        cuda_codegen.compiler()
    except ToolchainError as error:
        pytest.skip(str(error))
    conv = Conv2d.parse("n8-c64x56x56-k64x3x3")
    code = cuda_codegen.cubin(combined(conv, [made(conv, name) for name in THESIS])[0], H200)
    assert code.startswith(b"\x7fELF") and all(f"conv2d_{i}_kernel".encode() in code for i in range(len(THESIS)))


# --- the measurement, on a device that is none


class FakeBench:
    """A bench without tensors: outputs are always right."""

    def __init__(self, conv: Conv2d, seed: int) -> None:
        self.conv, self.seed = conv, seed


TIMES = {"plain": 0.9, "blocks": 0.4, "vectorized": 2e-3, "prefetch": 1e-3, "production": 5e-4, "without_micro_kernel": 4e-3}
LAYER = Layer("conv9", Conv2d.parse("n128-c64x56x56-k64x3x3"))


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """A GPU on which a call of a rung takes what `TIMES` says; how often each was called."""
    calls = dict.fromkeys((*RUNGS, *WITHOUT, "transform"), 0)

    @contextlib.contextmanager
    def built(builders: Any, recipes: dict[Any, Any], folder: Path) -> Iterator[dict[Any, Any]]:
        assert all(isinstance(one, cuda_builds.TileRecipe) == (name == "production") for (_, name), one in recipes.items())
        yield {key: "nvcc: it does not compile" if key[1] == "blocks" else key[1] for key in recipes}

    def subject(bench: Any, built: str) -> Subject:
        if built.startswith("nvcc"):
            raise RuntimeError(built)
        return Subject(lambda: built, 64, 1e-7, "im2win/stored", False)

    def sample(bench: Any, call: Callable[[], str]) -> float:
        calls[call()] += 1
        return TIMES.get(call(), 1e-3)

    monkeypatch.setattr(cuda_ablation, "device_gpu", lambda: H200)
    monkeypatch.setattr(cuda_ablation, "Bench", FakeBench)
    monkeypatch.setattr(cuda_builds.Builders, "begun", built)
    monkeypatch.setattr(cuda_ablation, "measure_ceilings", lambda: {"fma_gflops": 51000.0, "copy_gbs": 4200.0})
    monkeypatch.setattr(cuda_ablation, "_subject", subject)
    monkeypatch.setattr(cuda_ablation, "_transform", lambda bench, built: {"transform": Subject(lambda: "transform", 64, 0.0)})
    monkeypatch.setattr(cuda_ablation, "verify", lambda bench, call, allowed: ("error 1 exceeds 0" if call() == "shared" else "", 0.0))
    monkeypatch.setattr(cuda_ablation.backend_for(H200).__class__, "check_tools", lambda self: None)
    monkeypatch.setattr(cuda_harness, "sample", sample)
    return calls


def test_command_measures_and_reports(fake_gpu: dict[str, int], command: Callable[..., Any], tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("matplotlib")
    file, picture = tmp_path / "gpu" / "ladder.json", tmp_path / "gpu" / "ladder.png"
    done = command("ablation", "--target", "cuda", "--layers", "conv9,conv12", "--rounds", 5, "--json", file, "--plot", picture)
    assert done.status == 0, done.err
    assert "it does not compile" in done.out and "without vector loads" in done.out and picture.read_bytes().startswith(b"\x89PNG")
    result = Result.load(file)
    assert (result.suite, result.batch, result.device, result.threads) == ("ladder-papers12", 128, "nvidia-h200", 1)
    row = result.layers[0]
    assert row.layer == "conv9" and row.conv.startswith("n128-c64x56x56")
    assert row.ours_ms == pytest.approx(0.5) and row.peers["prefetch"] == pytest.approx(1.0) and row.failed is None
    assert row.peers_failed == {"blocks": "nvcc: it does not compile", "shared": "after timing: error 1 exceeds 0"}
    assert row.spread["without_prefetch"] == row.spread["vectorized"], "the same kernel, timed once"
    assert fake_gpu["without_prefetch"] == 0 and row.spread["plain"].samples == 1 and row.spread["prefetch"].samples == 5
    text = fill("<!-- table?:gpu/ladder -->\n<!-- /table -->", {"gpu/ladder": result})
    assert "| `production` | the project's kernel |" in text and "| `without_micro_kernel` | without micro-kernel | 25 % |" in text
    assert "The transform alone takes 100 % of Alg. 9's time" in text and "NVIDIA H200 (`nvidia-h200`)" in text


def test_losses_by_hand() -> None:
    def row(number: int, **times: float) -> Row:
        return Row(f"layer{number}", "n1-c1x1x1-k1x1x1", spread={name: Spread(ms, ms, ms, 5) for name, ms in times.items()})

    rows = [row(0, prefetch=1.0, without_vectorized=2.0), row(1, prefetch=1.0, without_vectorized=8.0), row(2, without_vectorized=1.0)]
    result = Result("ladder-made", "float32", 1, "gpu", "A GPU", 1, {"cuda": "13"}, "", "2026-01-01", {}, rows)
    assert ladder_report.losses(result) == [("without_vectorized", pytest.approx(0.25), pytest.approx(0.125), pytest.approx(0.5))]


def test_what_the_command_refuses(command: Callable[..., Any]) -> None:
    for words, message in (
        (("--target", "cuda", "--threads", "2"), "`--threads` is for target cpu"),
        (("--target", "cuda", "--rungs", "plain,unrolled"), "without_micro_kernel"),
        (("--target", "tpu"), "`target` (='tpu') must be one of cpu, cuda"),
    ):
        done = command("ablation", *words)
        assert done.status == 2 and message in done.err, done.err


def test_bad_arguments_are_named(fake_gpu: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="`layers` and `rungs`"):
        cuda_ablation.run([])
    with pytest.raises(ValueError, match=r"`seconds` \(=0\)"):
        cuda_ablation.run([LAYER], seconds=0)


@pytest.mark.slow
def test_libraries_are_built_by_other_processes(tmp_path: Path) -> None:
    """A rung, an algorithm's default tile, and a problem that the ladder has no kernel for."""
    try:
        cuda_codegen.compiler()
    except ToolchainError as error:
        pytest.skip(str(error))
    conv = Conv2d.parse("n1-c8x9x9-k16x3x3")
    recipes = {
        "rung": cuda_ablation.recipe(conv, ALGORITHM_9, H200),
        "refused": cuda_ablation.recipe(conv.with_(layout="NHWC"), ALGORITHM_9, H200),
        "production": cuda_ablation.recipe(conv, RUNGS["production"], H200),
    }
    with cuda_builds.Builders(2) as builders, builders.begun(recipes, tmp_path) as begun:
        built = {name: begun[name] for name in recipes}
    assert built["refused"] == f"the ladder on {conv}-NHWC: the GPU's ladder is written for NCHW, not NHWC."
    rung, production = built["rung"], built["production"]
    for library in (rung, production):
        assert isinstance(library, cuda_builds.Library), library
        assert library.path.stat().st_size > 1000
    assert (rung.manifest.made, rung.manifest.threads) == (ladder.workspace_bytes(conv) // 4, 128)
    assert production.manifest.tile["product"] == "fma"
    with pytest.raises(cuda_builds.BuildError, match="written for NCHW"):
        cuda_builds.load(built["refused"])


def test_the_text_names_every_rung() -> None:
    text = (ROOT / "docs" / "papers.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in text for name in (*RUNGS, *WITHOUT))
    tiled = ladder.TILED
    assert f"a block has {tiled.block_m} x {tiled.block_n} outputs and takes {tiled.block_k} terms" in text
