"""`im2win reconstruct`: files in, files out, and every decision with its reason."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import fusable
import pytest
import winograd_pair
from winograd_pair import Pair

from im2win.reconstruct.parse.unit import read


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """The Winograd pair, as TVM generates it."""
    path = tmp_path / "in.cu"
    path.write_text(winograd_pair.unit(Pair(private=True)).annotated())
    return path


def test_barriers_and_fusion_are_explained(source: Path, command: Callable[..., Any]) -> None:
    out = source.with_name("out.cu")
    done = command("reconstruct", source, "-o", out, "--rules", "barriers,pkf-shmem", "--explain")
    assert done.status == 0 and not done.err
    for line in (
        "barriers: drops or weakens barriers that an argument about indices shows to be needless; 2 matches",
        "pkf-shmem: fuses a kernel with the one that reads its result, held in shared memory; 1 matches",
        "-      __syncthreads();", "+      __syncwarp();", "-// workspace: V float32 8192", f"{out}: 1 kernel, 1 launch.",
    ):  # fmt: skip
        assert line in done.out, line
    assert "only threads of one warp conflict: thread" in done.out and "weakened to __syncwarp" in done.out
    result = read(out.read_text())
    assert list(result.kernels) == ["winograd_kernel_1_pkf_shmem"] and result.launches[0].dynamic_bytes == 8192


def test_the_diff_has_colours(source: Path, command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    done = command("reconstruct", source, "-o", source.with_name("out.cu"), "--explain")
    assert "\x1b[31m-      __syncthreads();" in done.out and "\x1b[32m+      __syncwarp();" in done.out


def test_kernels_are_split_into_files(source: Path, command: Callable[..., Any]) -> None:
    done = command("reconstruct", source, "--out", source.with_name("out.cu"), "--rules", "hip,split")
    assert done.status == 0
    for name in ("winograd_kernel", "winograd_kernel_1"):
        part = read(source.with_name(f"out.{name}.cu").read_text())
        assert list(part.kernels) == [name] and "hip/hip_runtime.h" in part.source


def test_a_rule_that_does_not_fit_is_said(source: Path, command: Callable[..., Any]) -> None:
    out = source.with_name("out.cu")
    done = command("reconstruct", source, "-o", out, "--rules", "pkf-shmem", "--shared", 1024)
    assert done.status == 0 and "pkf-shmem does not apply: V takes 8192 bytes of a block's shared memory" in done.out
    assert read(out.read_text()) == read(source.read_text())


def test_validated_and_tried(tmp_path: Path, command: Callable[..., Any]) -> None:
    path = tmp_path / "in.cu"
    path.write_text(fusable.unit("a barrier, fewer threads").annotated())
    done = command("reconstruct", path, "-o", tmp_path / "out.cu", "--rules", "pkf-llc", "--validate", "--trial")
    assert done.status == 0, done.err
    assert "trial and error would delete 0 of 1 barriers, 0 of them needed." in done.out
    assert "a block of consume waits for the 1 block(s) of produce whose V it reads" in done.out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("{source}", "Missing option '--out'"),
        ("{source} -o {source}", "must not be the source itself"),
        ("{source} -o {out} --rules nothing", r"`rules` (='nothing') must be among barriers, pipelines, copies, wide, bounds, unroll, pkf"),
        ("{source} -o {out} --rules split,barriers", "and split only as the last"),
        ("{source} -o {out} --rules ,", "must name a rule set"),
        ("{folder}/none.cu -o {out}", "No such file"),
        ("{bare} -o {out}", "has no launches; barriers needs them"),
        ("{product} -o {out} --rules hip", "`im2win::product_f16` is a matrix product of tensor cores"),
    ],
)
def test_bad_input_is_one_line(words: str, message: str, source: Path, command: Callable[..., Any]) -> None:
    bare, product = source.with_name("bare.cu"), source.with_name("product.cu")
    bare.write_text('extern "C" __global__ void k(float* x) {\n  __syncthreads();\n}\n')
    product.write_text('extern "C" __global__ void k(float* x) {\n  im2win::product_f16(x, x, x);\n}\n')
    places = {"source": source, "out": source.with_name("out.cu"), "folder": source.parent, "bare": bare, "product": product}
    done = command("reconstruct", *words.format(**places).split())
    assert done.status == 2 and done.err.count("\n") == 1 and message in done.err, done.err
