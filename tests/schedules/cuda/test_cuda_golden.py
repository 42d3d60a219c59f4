"""CUDA sources as they were when someone last looked at them: a change of a schedule, or of TVM, that changes them is seen.

`pytest tests/schedules/cuda/test_cuda_golden.py --update-golden` rewrites the files.
"""

from __future__ import annotations

import difflib

import pytest
from emulated import MARK, Kernel, generated
from paths import ROOT

from im2win.schedules.cuda.tiles.multistage import MultistageTile
from im2win.schedules.studies.winograd_tc.tile import TensorCoreTile
from im2win.spec.conv2d import Conv2d

FOLDER = ROOT / "tests" / "golden"
UPDATE = "--update-golden"

# One kernel of each kind, and among them every arithmetic on float32, tensor cores, a transform, and an epilogue.
KERNELS: dict[str, tuple[str, Kernel]] = {
    "gather": ("n8-c64x28x28-k64x3x3-p1", ("implicit_gemm/tiled", MultistageTile("tf32x3", 64, 64, 32, 32, 1, 3, "uvc"))),
    "gather_fetched": ("n8-c64x28x28-k64x3x3-p1-float16-bias-relu", ("im2win/stored", MultistageTile("f16", 64, 64, 32, 32, 1, 3, "uvc"))),
    "halo_tile": ("n8-c64x28x28-k64x3x3-p1-NHWC", ("im2win/fused", MultistageTile("tf32", 64, 64, 32, 32, 1, 2, "Cuvc", 1, 4, 14))),
    "fused": (
        "n1-c32x56x56-k32x3x3-p1-float16-NHWC-bias-relu",
        ("winograd/tensor_cores", TensorCoreTile(2, 16, 32, 16, "16x16x16", "sync_free", "shmem")),
    ),
    "planes": ("n8-c3x224x224-k64x7x7-s2-p3", ("direct/tiled", MultistageTile("fma", 16, 128, 16, 128, 1, 3, "cuv", 1, 8, 16))),
}


def kernels_of(source: str) -> str:
    """The generated kernels, without the device functions before them."""
    return source[source.index(MARK) :].rstrip() + "\n"


@pytest.mark.parametrize("name", KERNELS)
def test_source(name: str, request: pytest.FixtureRequest) -> None:
    key, (algorithm, tile) = KERNELS[name]
    path, source = FOLDER / f"{name}.cu", kernels_of(generated(Conv2d.parse(key), algorithm, tile).source)
    if request.config.getoption(UPDATE):
        path.parent.mkdir(exist_ok=True)
        path.write_text(source)
        return
    before = path.read_text() if path.exists() else ""
    if source != before:
        pytest.fail(
            f"{algorithm} {tile} of {key} is generated differently. If that is meant, run pytest {UPDATE} and read the change.\n"
            + difference(before, source, str(path.relative_to(ROOT))),
            pytrace=False,
        )


def difference(before: str, after: str, name: str, most: int = 40) -> str:
    """The first lines of what differs."""
    lines = list(difflib.unified_diff(before.splitlines(), after.splitlines(), name, "generated", lineterm="", n=1))
    return "\n".join([*lines[:most], *([f"... and {len(lines) - most} lines more"] if len(lines) > most else [])])


def test_every_file_is_compared() -> None:
    assert {path.name for path in FOLDER.iterdir()} == {f"{name}.cu" for name in KERNELS}


def test_generating_twice_gives_the_same() -> None:
    """Names that TVM numbers do not depend on what was generated before."""
    key, (algorithm, tile) = KERNELS["halo_tile"]
    generated.cache_clear()
    first = generated(Conv2d.parse(key), algorithm, tile).source
    generated.cache_clear()
    assert generated(Conv2d.parse(key), algorithm, tile).source == first
