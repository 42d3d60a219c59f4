"""CUTLASS as a peer: which layers it is asked for, what is passed to its library, and that its source compiles where the headers are."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from paths import ROOT

from im2win.bench.peers.subject import PeerError
from im2win.spec.conv2d import Conv2d

pytest.importorskip("torch")

LAYER = Conv2d.parse("n2-c16x9x11-k24x3x5-s1x2-p0.1.2.3-d2x1-float16-NHWC")
HEADERS = "IM2WIN_CUTLASS"  # an environment variable: a folder with CUTLASS's include/ and tools/util/include/


@pytest.fixture
def peer(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "gpu" / "cutlass_peer"))
    sys.modules.pop("cutlass_peer", None)
    import cutlass_peer

    yield cutlass_peer
    sys.modules.pop("cutlass_peer", None)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"layout": "NCHW"}, "must be float16 and NHWC"),
        ({"dtype": "bfloat16"}, "must be float16 and NHWC"),
        ({"groups": 2}, "`groups` (=2) must be 1"),
        ({"bias": True}, "it has an epilogue"),
        ({"in_channels": 12}, "`in_channels` (=12)"),
        ({"out_channels": 4}, "`out_channels` (=4) must be multiples of 8"),
    ],
)
def test_layers_that_it_does_not_compute(peer: ModuleType, change: dict[str, Any], reason: str) -> None:
    assert peer.unsupported(LAYER) is None
    assert reason in peer.unsupported(LAYER.with_(**change))
    with pytest.raises(PeerError, match=r"^cutlass: "):
        peer.subject(SimpleNamespace(conv=LAYER.with_(**change)), {})


def test_a_tile_fits_the_registers_of_a_warp_group(peer: ModuleType) -> None:
    assert len(set(peer.VARIANTS)) == 8
    for variant in peer.VARIANTS:
        assert variant.tile_m % 64 == 0 and variant.tile_n % 8 == 0 and variant.tile_m * variant.tile_n <= 24576


def test_headers_are_asked_for(peer: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"`--cutlass` \(=.*\) must be a folder with CUTLASS's include/cutlass/cutlass.h"):
        peer.includes(tmp_path)
    for name in ("include/cutlass/cutlass.h", "tools/util/include/cutlass/util/packed_stride.hpp"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).touch()
    words = peer.command(peer.VARIANTS[0], tmp_path, tmp_path / "x.so")
    assert {"-DTILE_M=128", "-DCLUSTER_M=2", "-shared", str(tmp_path / "tools/util/include")} <= set(words)


def test_a_variant_that_does_not_compile_has_the_error_in_its_place(
    peer: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nvcc(words: list[str], **_: Any) -> Any:
        if "-DTILE_N=192" in words:
            return SimpleNamespace(returncode=1, stderr="note\nconv.cu(3): error: no such tile\n")
        Path(words[words.index("-o") + 1]).touch()
        return SimpleNamespace(returncode=0, stderr="")

    monkeypatch.setattr(peer.subprocess, "run", nvcc)
    monkeypatch.setattr(peer.shutil, "which", lambda name: "/bin/nvcc")
    monkeypatch.setattr(peer, "includes", lambda cutlass: [])
    built = peer.build_all(tmp_path, tmp_path / "built")
    failed = {variant.tile_n: library for variant, library in built.items() if isinstance(library, str)}
    assert failed == {192: "conv.cu(3): error: no such tile"} and sum(isinstance(one, Path) and one.exists() for one in built.values()) == 7


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
def test_what_is_passed_to_a_library(peer: ModuleType, tmp_path: Path) -> None:
    """The fields are in the order of conv.cu, and a refusal and a failed launch have CUTLASS's words."""
    fields = peer.SOURCE.read_text().split("struct Sizes {")[1].split("}")[0].replace("int ", "").replace(";", ",").split(",")
    assert [name.strip() for name in fields if name.strip()] == [name for name, _ in peer.Sizes._fields_]
    sizes = peer.Sizes.of(LAYER)
    assert [getattr(sizes, name) for name, _ in peer.Sizes._fields_] == [2, 9, 11, 16, 24, 3, 5, 0, 1, 2, 3, 1, 2, 2, 1]
    code = """
    static long runs;
    void *cutlass_conv_prepare(const int *s, void *x, void *w, void *y, const char **why) {
      if (s[0] == 1) { *why = "one image"; return 0; }
      return (long)x + (long)w + (long)y == 6000000006 ? &runs : 0;
    }
    const char *cutlass_conv_run(void *conv, void *stream) { return (*(long *)conv)++ ? "second call" : (long)stream == 7 ? 0 : "stream"; }
    void cutlass_conv_free(void *conv) { *(long *)conv = -1; }
    """
    library = tmp_path / "variant.so"
    subprocess.run(["cc", "-w", "-shared", "-fPIC", "-x", "c", "-o", str(library), "-"], input=code, text=True, check=True)
    addresses = (1000000001, 2000000002, 3000000003)
    call = peer.runner(library, LAYER, *addresses, 7)
    call()
    with pytest.raises(PeerError, match=r"^CUTLASS: second call$"):
        call()
    with pytest.raises(PeerError, match=r"^one image$"):
        peer.runner(library, LAYER.with_(batch=1), *addresses, 7)
    with pytest.raises(PeerError, match="gave no reason"):
        peer.runner(library, LAYER, 1, 2, 3, 7)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(HEADERS not in os.environ, reason=f"CUTLASS's headers are not in the folder {HEADERS}")
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="there is no nvcc")
def test_its_source_compiles(peer: ModuleType, tmp_path: Path) -> None:
    assert peer.build(peer.VARIANTS[0], Path(os.environ[HEADERS]), tmp_path / "variant.o") == ""
