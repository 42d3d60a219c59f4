"""Generated CUDA as HIP: what changes, what is refused, and machine code where Debian's hipcc is installed."""

from __future__ import annotations

from dataclasses import replace

import fusable
import pytest
import winograd_pair
from emulated import generated
from winograd_pair import TENSOR_CORES, Pair

from im2win.device.gpu import H200
from im2win.emulator import Launch
from im2win.reconstruct import ReconstructError
from im2win.reconstruct.fusion import llc, shmem
from im2win.reconstruct.parse.unit import Unit
from im2win.reconstruct.rules import hip
from im2win.reconstruct.rules.barriers import weakened
from im2win.schedules.cuda.tiles.multistage import MultistageTile
from im2win.spec.conv2d import Conv2d

HEAD = "#include <cuda.h>\n#include <cuda_fp16.h>\n"


def unit(body: str, dynamic: int = 0) -> Unit:
    source = f'{HEAD}extern "C" __global__ void __launch_bounds__(64) k(float* __restrict__ x, float* __restrict__ y) {{\n{body}\n}}\n'
    return Unit(source, (Launch("k", ("x", "y"), (1, 1, 1), (64, 1, 1), dynamic),))


def ours(key: str, algorithm: str, tile: MultistageTile) -> Unit:
    made = generated(Conv2d.parse(key), algorithm, tile)
    return Unit(made.source, made.launches, made.workspace)


PRODUCT = MultistageTile("f16", 32, 32, 16, 16, 1, 3, "uvc")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("__syncwarp();", "im2win::wavefront_barrier();"),
        ("x[0] = __shfl_xor_sync(0xffffffff, x[1], 4);", "x[0] = __shfl_xor(x[1], 4, 32);"),
        ("x[0] = __shfl_sync(0xffffffffu, x[1], 7);", "x[0] = __shfl(x[1], 7, 32);"),
        ("extern __shared__ __align__(128) float s[];", "extern __shared__ __attribute__((aligned(128))) float s[];"),
        ("__shared__ alignas(64) float s[8];", "__shared__ __attribute__((aligned(64))) float s[8];"),
        ("__nanosleep(64);", "__builtin_amdgcn_s_sleep(1);"),
        ("__syncthreads();", "__syncthreads();"),
    ],
)
def test_what_changes(before: str, after: str) -> None:
    translated, matches = hip.translate(unit(before))
    assert after in translated.source and (before == after or before not in translated.source)
    assert "hip/hip_fp16.h" in translated.source and "cuda" not in translated.source
    assert all(match.why for match in matches)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("im2win::product_f16(x, y, y);", "kernel k, line 4: `im2win::product_f16` is a matrix product of tensor cores; use a tile"),
        ("nvcuda::wmma::mma_sync(a, b, c, a);", "WMMA, which only NVIDIA has"),
        ('asm volatile("bar.sync 0;");', "inline PTX"),
        ("__shfl_sync(0xffff, x[0], 1);", "a shuffle of a part of a warp"),
        ("__syncwarp(0xff);", "a barrier of a part of a warp"),
        ("x[0] = __reduce_add_sync(0xffffffff, 1);", "a built-in that HIP does not have"),
    ],
)
def test_what_is_refused(body: str, message: str) -> None:
    with pytest.raises(ReconstructError, match=message):
        hip.translate(unit(body))


def test_shared_memory_has_the_accelerators_limit() -> None:
    with pytest.raises(ReconstructError, match="kernel k takes 65540 bytes of shared memory; there are 65536"):
        hip.translate(unit("__shared__ float s[1];", 65536))


def test_our_kernels_of_cuda_cores_translate_and_those_of_tensor_cores_do_not() -> None:
    tile = MultistageTile("fma", 32, 32, 16, 16, 1, 3, "uvc")
    translated, matches = hip.translate(ours("n1-c20x5x6-k32x3x3-p1", "implicit_gemm/tiled", tile))
    assert "cp.async" not in translated.source and "words[i] = inside ? source[i] : 0u" in translated.source
    assert {match.rule for match in matches} >= {"hip-copies", "hip-align", "hip-runtime-header"}
    with pytest.raises(ReconstructError, match="WMMA, which only NVIDIA has"):
        hip.translate(winograd_pair.unit(TENSOR_CORES))
    with pytest.raises(ReconstructError, match="product_f16"):
        hip.translate(ours("n1-c20x5x6-k32x3x3-p1-float16-NHWC", "implicit_gemm/tiled", PRODUCT))


def sources() -> dict[str, Unit]:
    """Everything that is to become machine code: our kernels, TVM's, and what fusion and the barriers' rules make of them."""
    pair = winograd_pair.unit(Pair(private=True))
    parts = [shmem.fuse(weakened(pair)[0], hip.SHARED_LIMIT)[0], llc.fuse(fusable.unit("two barriers"), hip.SHARED_LIMIT)[0]]
    whole = fusable.together(parts)
    return {
        "gather": ours("n1-c20x5x6-k32x3x3-p1", "implicit_gemm/tiled", MultistageTile("fma", 32, 32, 16, 16, 1, 3, "uvc")),
        "halo tile": ours("n1-c60x5x6-k32x3x3-p1", "direct/tiled", MultistageTile("fma", 32, 32, 16, 16, 1, 3, "Cuvc", 1, 5, 6)),
        "fused": replace(whole, source=llc.SIGNALS + whole.source.replace(llc.SIGNALS, "")),
    }


@pytest.mark.sampled(1)
@pytest.mark.parametrize("arch", hip.ARCHITECTURES)
def test_machine_code(arch: str) -> None:
    missing = hip.missing()
    if missing:
        pytest.skip(missing)
    for name, one in sources().items():
        code = hip.compile_hip(hip.translate(one)[0].source, arch)
        assert arch.encode() in code and all(kernel.encode() in code for kernel in one.kernels), name


def test_source_that_does_not_compile() -> None:
    missing = hip.missing()
    if missing:
        with pytest.raises(ReconstructError, match="HIP cannot be compiled"):
            hip.compile_hip("nonsense;", "gfx906")
    else:
        with pytest.raises(ReconstructError, match="nonsense"):
            hip.compile_hip("nonsense;", "gfx906")


def test_limits_of_a_gpu_are_not_those_of_the_accelerator() -> None:
    """A fusion that fits a GPU's shared memory may not fit here, and says so."""
    big = winograd_pair.unit(Pair(channels=64, filters=16, size=10))
    fused = shmem.fuse(big, H200.block_shared)[0]
    with pytest.raises(ReconstructError, match="bytes of shared memory; there are 65536"):
        hip.translate(fused)
