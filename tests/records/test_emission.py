"""What a candidate emits: the same on every machine and however the generator is written; other where the kernel is."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import tvm
from ops import host

import im2win
from im2win.codegen import llvm as codegen
from im2win.common.torch_import import BEGIN
from im2win.records.emission import EmissionError, emitted, emitted_now
from im2win.records.log import Log
from im2win.records.lookup import PACKAGED
from im2win.records.record import Record
from im2win.registry.cpu_lowering import lower
from im2win.registry.ranking import default_tile
from im2win.registry.schedules import SCHEDULES, schedule_of
from im2win.spec.conv2d import Conv2d

CONV = Conv2d.parse("n1-c8x14x14-k16x3x3-p1-bias-relu")
HALF = Conv2d.parse("n1-c64x16x16-k64x3x3-p1-float16-NHWC")
CUDA_TILE = {
    "product": "f16", "block_m": 64, "block_n": 64, "warp_m": 32, "warp_n": 32, "slabs": 2, "stages": 3, "order": "uvc", "images": 0,
    "rows": 0, "cols": 0, "outputs": 0, "band": 0,
}  # fmt: skip


def cpu_tile(name: str) -> dict[str, int | str | bool]:
    return default_tile(CONV, name, host())[1].as_dict()  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", [name for name, row in SCHEDULES.items() if row.supports(CONV) is None])
def test_compiling_gives_the_fingerprint_that_emitting_gives(name: str) -> None:
    """Though one is for this CPU, and the other for none."""
    _, tile = default_tile(CONV, name, host())
    compiled = codegen.compile_module(lower(CONV, schedule_of(name), tile, host()), host())
    assert re.fullmatch(r"[0-9a-f]{16}", compiled.fingerprint) and compiled.fingerprint == emitted(CONV, name, tile.as_dict(), "cpu")


def test_candidates_have_fingerprints_of_their_own() -> None:
    tile = cpu_tile("direct/tiled")
    found = {
        emitted(CONV, "direct/tiled", tile, "cpu"),
        emitted(CONV, "direct/tiled", {**tile, "unroll": 2 if tile["unroll"] == 1 else 1}, "cpu"),
        emitted(CONV.with_(activation=None), "direct/tiled", tile, "cpu"),
        emitted(CONV, "im2col/tiled", cpu_tile("im2col/tiled"), "cpu"),
        emitted(HALF, "implicit_gemm/tiled", CUDA_TILE, "cuda"),
        emitted(HALF, "implicit_gemm/tiled", {**CUDA_TILE, "stages": 4}, "cuda"),
        emitted(HALF.with_(bias=True), "implicit_gemm/tiled", CUDA_TILE, "cuda"),
    }
    assert len(found) == 7


def test_what_makes_no_kernel_says_why() -> None:
    with pytest.raises(EmissionError, match=r"`algorithm` \(='fft'\) must be auto, one of direct, "):
        emitted(CONV, "fft", {}, "cpu")
    with pytest.raises(EmissionError, match="its tile makes no kernel any more: "):
        emitted(CONV, "direct/tiled", {"rows": 4}, "cpu")
    with pytest.raises(EmissionError, match="its tile makes no kernel any more: "):
        emitted(HALF, "implicit_gemm/tiled", {**CUDA_TILE, "product": "f8"}, "cuda")


def test_tuning_records_what_was_timed(tmp_path: Path) -> None:
    record = im2win.tune(CONV, algorithm="direct/tiled", trials=2, logs=tmp_path)
    assert record.fingerprint == emitted_now(record) and record.generator


_PRINT = """
import json, sys
from dataclasses import replace
from pathlib import Path
import im2win
from im2win.records.emission import emitted_now
from im2win.records.record import Record
assert Path(im2win.__file__).is_relative_to(sys.argv[1]), im2win.__file__
for line in sys.stdin:
    print(emitted_now(Record.from_line(line)))
"""


def emitted_by(package: Path, records: list[Record]) -> list[str]:
    """Fingerprints that a copy of the package emits, in a process of its own."""
    lines = "".join(record.to_line() + "\n" for record in records)
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(package.parent)!r})\n{BEGIN}\n{_PRINT}", str(package.parent)]
    return subprocess.run(command, input=lines, capture_output=True, text=True, check=True).stdout.split()


def recorded(target: str, method: str) -> Record:
    """A committed record whose kernel has a register tile that does not divide its loop, on a CPU."""
    found = (one for one in Log(PACKAGED) if (one.target, one.method) == (target, method) and one.tvm == tvm.__version__)
    return next(one for one in found if target == "cuda" or one.conv2d.output_size[1] % int(one.tile["cols"]))


@pytest.fixture(scope="module")
def records() -> list[Record]:
    found = [recorded("cpu", "direct/tiled"), recorded("cuda", "implicit_gemm/tiled")]
    return [replace(record, fingerprint=emitted_now(record)) for record in found]


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A copy of the package, whose files a test may change."""
    source, copied = Path(im2win.__file__).parent, tmp_path / "im2win"
    shutil.copytree(source, copied, ignore=shutil.ignore_patterns("tuning_logs", "__pycache__"))
    return copied


def edit(package: Path, name: str, old: str, new: str) -> None:
    path = package / name
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_moving_and_renaming_changes_no_verdict(package: Path, records: list[Record]) -> None:
    """Modules under other names, functions and variables of the generated kernels, too."""
    moved = (("schedules/cpu", "loop_peeling", "tails"), ("schedules/cuda/loaders", "im2col_taps", "gather"))
    for folder, old, new in moved:
        (package / folder / f"{old}.py").rename(package / folder / f"{new}.py")
    for path in [*package.rglob("*.py"), *package.rglob("*.hpp")]:
        text = re.sub(r"\bcopy_async\b", "begin_copy", path.read_text())
        for folder, old, new in moved:
            room = f"im2win.{folder.replace('/', '.')}"
            text = text.replace(f"{room}.{old} ", f"{room}.{new} ")
            text = re.sub(rf"(from {room} import .*)\b{old}\b", rf"\1{new} as {old}", text)
        path.write_text(text.replace('local("sums"', 'local("accumulators"'))
    assert emitted_by(package, records) == [record.fingerprint for record in records]


def test_a_changed_store_changes_the_verdict_of_its_kernels_alone(package: Path, records: list[Record]) -> None:
    cpu, cuda = (record.fingerprint for record in records)
    edit(package, "schedules/cpu/loop_peeling.py", "else tirx.likely(predicate)", "else predicate")
    now = emitted_by(package, records)
    assert now[0] != cpu and now[1] == cuda
    edit(package, "schedules/cuda/device.hpp", "cp.async.commit_group;", "cp.async.wait_all;")
    now = emitted_by(package, records)
    assert now[0] != cpu and now[1] != cuda
