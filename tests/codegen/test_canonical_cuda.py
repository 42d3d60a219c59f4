"""The canonical form of CUDA: what a kernel computes changes it, how it is written does not."""

from __future__ import annotations

import pytest

from im2win.codegen.canonical_cuda import canonical, for_device, items, reached

SOURCE = """
#include <cuda_fp16.h>
namespace im2win {
#ifndef IM2WIN_EMULATOR
// Copies eight elements.
__device__ __forceinline__ void copy_eight(float* to, const float* from) {
  for (int lane = 0; lane < 8; ++lane) to[lane] = from[lane];
}
template <int count>
__device__ void wait_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(count) : "memory"); }
template <>
__device__ void wait_copies<0>() { asm volatile("cp.async.wait_all;" ::: "memory"); }
#else
inline void copy_eight(float* to, const float* from) { emulator::copy(to, from); }
#endif
__device__ float unused(float a) { return a + 1; }
}  // namespace im2win
extern "C" __global__ void __launch_bounds__(256) conv2d_kernel(float* __restrict__ data_ptr, float* __restrict__ output_ptr);
extern "C" __global__ void __launch_bounds__(256) conv2d_kernel(float* __restrict__ data_ptr, float* __restrict__ output_ptr) {
  float sums[8];
  for (int v = 0; v < 4; ++v) {
    im2win::wait_copies<0>();
    im2win::copy_eight(sums, data_ptr + v * 8);
    output_ptr[((int)threadIdx.x) * 4 + v] = max(sums[v], 0x0p+0f/*0.0*/);
  }
}
"""


@pytest.mark.parametrize(
    "same",
    [
        SOURCE.replace("copy_eight", "move_lanes"),
        SOURCE.replace("sums", "accumulators"),
        SOURCE.replace("// Copies eight elements.", "/* Another\n text */"),
        SOURCE.replace("/*0.0*/", ""),
        SOURCE.replace("    im2win::wait", "im2win  ::  wait"),
        SOURCE.replace("__device__ float unused(float a) { return a + 1; }\n", ""),
        SOURCE.replace("unused(float a) { return a + 1; }", "unused(float a) { return a + 2; }\n__device__ int more() { return 3; }"),
        SOURCE.replace("emulator::copy(to, from)", "emulator::copy_checked(to, from)"),
        SOURCE.replace("conv2d_kernel", "conv2d_kernel_2"),
        SOURCE.replace("#include <cuda_fp16.h>", "#include <cuda_bf16.h>"),
    ],
)
def test_names_layout_comments_and_unused_functions_do_not_count(same: str) -> None:
    assert same != SOURCE and canonical(same) == canonical(SOURCE)


def test_the_order_of_device_functions_does_not_count() -> None:
    first, second = "__device__ int one() { return 1; }\n", "__device__ int two() { return 2; }\n"
    kernel = 'extern "C" __global__ void kernel(int* out) { out[0] = im2win::two() + im2win::one(); }\n'
    forms = [f"namespace im2win {{\n{a}{b}}}\n{kernel}" for a, b in ((first, second), (second, first))]
    assert canonical(forms[0]) == canonical(forms[1])


@pytest.mark.parametrize(
    "other",
    [
        SOURCE.replace("v < 4", "v < 5"),
        SOURCE.replace("max(", "min("),
        SOURCE.replace("v * 8", "v + 8"),
        SOURCE.replace("* 4 + v]", "* 4]"),
        SOURCE.replace("threadIdx.x", "threadIdx.y"),
        SOURCE.replace("__launch_bounds__(256)", "__launch_bounds__(128)"),
        SOURCE.replace("cp.async.wait_all", "cp.async.wait_any"),
        SOURCE.replace("lane < 8", "lane < 7"),
        SOURCE.replace("float sums[8]", "half sums[8]"),
        SOURCE.replace("im2win::wait_copies<0>();\n", ""),
        SOURCE.replace("wait_copies<0>();", "wait_copies<1>();"),
        SOURCE.replace("__restrict__ ", ""),
        SOURCE.replace("output_ptr[((", "data_ptr[(("),
    ],
)
def test_what_is_computed_counts(other: str) -> None:
    assert other != SOURCE and canonical(other) != canonical(SOURCE)


def test_only_the_device_s_branch_is_read() -> None:
    text = for_device("a\n#ifdef IM2WIN_EMULATOR\nb\n#if X\nc\n#endif\n#else\nd\n#ifdef Y\ne\n#endif\n#endif\nf")
    assert text.split() == ["a", "d", "#ifdef", "Y", "e", "#endif", "f"]


def test_definitions_have_their_names() -> None:
    named = [item.name for item in items(for_device(SOURCE))]
    assert named == ["copy_eight", "wait_copies", "wait_copies", "unused", "conv2d_kernel", "conv2d_kernel"]
    others = items(
        "struct alignas(64) Map { char opaque[128]; };\nusing Half = __half;\nconstexpr int many = 4;\n"
        "template <typename T, int n = (1 > 0)>\n__device__ T add(T a) { return a + n; }\nstatic int table[] = {1, 2};\n"
    )
    assert [item.name for item in others] == ["Map", "Half", "many", "add", "table"]
    assert [item.name for item in reached(items(for_device(SOURCE)))][2:] == ["wait_copies", "wait_copies", "copy_eight"]
