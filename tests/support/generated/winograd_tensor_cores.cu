// launch: winograd_kernel(V, data) grid 4 1 1 block 512 1 1 dynamic 0
// launch: winograd_kernel_1(V, filter, output) grid 4 2 1 block 32 4 1 dynamic 0
// workspace: V float16 32768

#ifdef __CUDACC_RTC__
  #include <cuda/std/cstdint>
  using cuda::std::uint8_t;
  using cuda::std::uint16_t;
  using cuda::std::uint32_t;
  using cuda::std::uint64_t;
  using cuda::std::int8_t;
  using cuda::std::int16_t;
  using cuda::std::int32_t;
  using cuda::std::int64_t;

  #include <cuda/std/type_traits>
  namespace std {
    using cuda::std::is_same;
    using cuda::std::is_same_v;
    using cuda::std::is_integral;
    using cuda::std::is_signed;
    using cuda::std::is_unsigned;
    using cuda::std::is_floating_point;
    using cuda::std::enable_if;
    using cuda::std::conditional;
  }

  // NVRTC uses asm/volatile instead of __asm__/__volatile__ (gcc extension).
  #ifndef __asm__
  #define __asm__ asm
  #endif
  #ifndef __volatile__
  #define __volatile__ volatile
  #endif
#else
  #include <cstdint>
  #include <type_traits>
  #include <cuda.h>
#endif

#if !defined(__CUDA_ARCH__) || (__CUDA_ARCH__ >= 530)
#include <cuda_fp16.h>
__device__ half max(half a, half b)
{
  return __hgt(__half(a), __half(b)) ? a : b;
}
__device__ half min(half a, half b)
{
  return __hlt(__half(a), __half(b)) ? a : b;
}
#endif // __CUDA_ARCH__ >= 530

// Pack two half values.
static inline __device__ __host__ unsigned
__pack_half2(const half x, const half y) {
  unsigned v0 = *((unsigned short *)&x);
  unsigned v1 = *((unsigned short *)&y);
  return (v1 << 16) | v0;
}

#define CUDA_UNSUPPORTED_HALF_MATH_BINARY(HALF_MATH_NAME, FP32_MATH_NAME) \
static inline __device__ __host__ half HALF_MATH_NAME(half x, half y) {   \
  float tmp_x = __half2float(x);                                          \
  float tmp_y = __half2float(y);                                          \
  float result = FP32_MATH_NAME(tmp_x, tmp_y);                            \
  return __float2half(result);                                            \
}

#define CUDA_UNSUPPORTED_HALF_MATH_UNARY(HALF_MATH_NAME, FP32_MATH_NAME) \
static inline __device__ __host__ half HALF_MATH_NAME(half x) {          \
  float tmp_x = __half2float(x);                                         \
  float result = FP32_MATH_NAME(tmp_x);                                  \
  return __float2half(result);                                           \
}

// Some fp16 math functions are not supported in cuda_fp16.h,
// so we define them here to make sure the generated CUDA code
// is valid.
#if defined(__CUDA_ARCH__)
#if (__CUDA_ARCH__ >= 530)
CUDA_UNSUPPORTED_HALF_MATH_BINARY(hpow, powf)
#if ((__CUDACC_VER_MAJOR__ < 12) || ((__CUDACC_VER_MAJOR__ == 12) && (__CUDACC_VER_MINOR__ < 8)))
CUDA_UNSUPPORTED_HALF_MATH_UNARY(htanh, tanhf)
#endif
CUDA_UNSUPPORTED_HALF_MATH_UNARY(htan, tanf)
CUDA_UNSUPPORTED_HALF_MATH_UNARY(hatan, atanf)
CUDA_UNSUPPORTED_HALF_MATH_UNARY(herf, erf)
#else
CUDA_UNSUPPORTED_HALF_MATH_UNARY(hexp, exp)
#endif
#endif

#undef CUDA_UNSUPPORTED_HALF_MATH_BINARY
#undef CUDA_UNSUPPORTED_HALF_MATH_UNARY

template <typename T, typename TVec2>
struct __align__(8) half4_bfloat164 {
  T x, y, z, w;
  __host__ __device__ half4_bfloat164() : x(T(0)), y(T(0)), z(T(0)), w(T(0)) {}
  __host__ __device__ half4_bfloat164(T x, T y, T z, T w) : x(x), y(y), z(z), w(w) {}

};

using half4 = half4_bfloat164<__half, __half2>;
__host__ __device__ half4 make_half4(__half x, __half y, __half z, __half w) {
    return half4(x, y, z, w);
}

#include <mma.h>

#if (((__CUDACC_VER_MAJOR__ == 11) && (__CUDACC_VER_MINOR__ >= 4)) || \
     (__CUDACC_VER_MAJOR__ > 11))
#define TVM_ENABLE_L2_PREFETCH 1
#else
#define TVM_ENABLE_L2_PREFETCH 0
#endif

#ifdef _WIN32
  using uint = unsigned int;
  using uchar = unsigned char;
  using ushort = unsigned short;
  using int64_t = long long;
  using uint64_t = unsigned long long;
#else
  #define uint unsigned int
  #define uchar unsigned char
  #define ushort unsigned short
#endif
// What generated kernels call: copies to shared memory that do not wait, and matrix products of a warp.
//
// On the device each function is a few PTX instructions. With IM2WIN_EMULATOR defined the same file compiles for the host, on emulator.hpp.
//
// A matrix product works on *words* of 4 bytes: 1 float, 2 halves or 4 int8. One step multiplies 16 rows of A, 8 words each, with 8 columns
// of B, 8 words each: m16n8k8 for TF32, m16n8k16 for FP16, m16n8k32 for INT8. Lane 4*g + t holds, of A, rows g and g+8 and of B, column g, at
// words t and t+4; of the sums, rows g and g+8 at columns 2*t and 2*t+1.

namespace im2win {

#ifndef IM2WIN_EMULATOR

__device__ __forceinline__ unsigned shared_address(const void* pointer) { return static_cast<unsigned>(__cvta_generic_to_shared(pointer)); }

// `bytes` (4, 8 or 16) from global to shared memory; zeros where `inside` is false.
template <int bytes>
__device__ __forceinline__ void copy_async(void* to, const void* from, bool inside) {
  const int read = inside ? bytes : 0;
  if constexpr (bytes == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(read) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared_address(to)), "l"(from), "n"(bytes), "r"(read) : "memory");
}
template <int bytes>
__device__ __forceinline__ void copy_async(void* to, const void* from) {
  if constexpr (bytes == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared_address(to)), "l"(from), "n"(bytes) : "memory");
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most the newest `left` groups of this thread are under way.
template <int left>
__device__ __forceinline__ void wait_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(left) : "memory"); }

__device__ __forceinline__ void product_f16(float* c, const unsigned* a, const unsigned* b) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
__device__ __forceinline__ void product_tf32(float* c, const unsigned* a, const unsigned* b) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
__device__ __forceinline__ void product_s8(int* c, const unsigned* a, const unsigned* b) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

#else

template <int bytes>
void copy_async(void* to, const void* from, bool inside = true) {
  if (reinterpret_cast<uintptr_t>(to) % bytes) emulator::fail("an asynchronous copy to an address that is not aligned");
  if (inside && reinterpret_cast<uintptr_t>(from) % bytes) emulator::fail("an asynchronous copy from an address that is not aligned");
  emulator::copy_async(to, from, bytes, inside ? bytes : 0);
}
inline void commit_copies() { emulator::commit_copies(); }
template <int left>
void wait_copies() { emulator::wait_copies(left); }

struct HalfWord {
  static constexpr int values = 2;
  static float get(unsigned word, int i) {
    half value;
    value.bits = uint16_t(word >> 16 * i);
    return float(value);
  }
};
struct Tf32Word {  // the unit reads 8 bits of exponent and 10 of fraction, and drops the rest
  static constexpr int values = 1;
  static float get(unsigned word, int) { return __int_as_float(int(word & 0xffffe000u)); }
};
struct Int8Word {
  static constexpr int values = 4;
  static int get(unsigned word, int i) { return int8_t(word >> 8 * i); }
};

template <typename Word, typename Sum>
void product(Sum* c, const unsigned* a, const unsigned* b) {
  struct Lane {
    Sum* c;
    const unsigned *a, *b;
  } lane{c, a, b};
  emulator::warp_operation(0, 0xffffffffu, &lane, [](void* lanes[32]) {
    auto at = [&](int i) -> Lane& { return *static_cast<Lane*>(lanes[i]); };
    Sum sums[16][8];
    for (int row = 0; row < 16; ++row)
      for (int col = 0; col < 8; ++col) {
        Sum& sum = sums[row][col] = at(row % 8 * 4 + col / 2).c[row / 8 * 2 + col % 2];
        for (int word = 0; word < 8; ++word)
          for (int i = 0; i < Word::values; ++i)
            sum += Word::get(at(row % 8 * 4 + word % 4).a[row / 8 + word / 4 * 2], i) * Word::get(at(col * 4 + word % 4).b[word / 4], i);
      }
    for (int row = 0; row < 16; ++row)
      for (int col = 0; col < 8; ++col) at(row % 8 * 4 + col / 2).c[row / 8 * 2 + col % 2] = sums[row][col];
  });
}
inline void product_f16(float* c, const unsigned* a, const unsigned* b) { product<HalfWord>(c, a, b); }
inline void product_tf32(float* c, const unsigned* a, const unsigned* b) { product<Tf32Word>(c, a, b); }
inline void product_s8(int* c, const unsigned* a, const unsigned* b) { product<Int8Word>(c, a, b); }

#endif

// 16 aligned bytes, as four words.
__device__ __forceinline__ void load_words(unsigned* to, const void* from) {
  const uint4 words = *static_cast<const uint4*>(from);
  to[0] = words.x, to[1] = words.y, to[2] = words.z, to[3] = words.w;
}

// To the nearest of 10 bits of fraction; infinities and NaN as they are (half a unit more would carry into them, and out).
__device__ __forceinline__ unsigned rounded_tf32(unsigned word) {
  return (word & 0x7f800000u) == 0x7f800000u ? word | (word & 0x1fffu ? 0x400000u : 0u) : word + 0x1000u;
}

// A float32 as the sum of two TF32: what the unit reads of it, and what that leaves, of which the unit reads 11 bits more. NaN stays NaN.
__device__ __forceinline__ unsigned high_part(unsigned word) { return word & 0xffffe000u; }
__device__ __forceinline__ unsigned low_part(unsigned word, unsigned high) {
  return static_cast<unsigned>(__float_as_int(__int_as_float(static_cast<int>(word)) - __int_as_float(static_cast<int>(high))));
}

}  // namespace im2win

extern "C" __global__ void __launch_bounds__(512) winograd_kernel(half* __restrict__ V_ptr, half* __restrict__ data_ptr);
extern "C" __global__ void __launch_bounds__(128) winograd_kernel_1(half* __restrict__ V_ptr, half* __restrict__ filter_ptr, float* __restrict__ output_ptr);
extern "C" __global__ void __launch_bounds__(512) winograd_kernel(half* __restrict__ V_ptr, half* __restrict__ data_ptr) {
  for (int e = 0; e < 16; ++e) {
    int cse_v1 = (((int)threadIdx.x) & 15);
    int cse_v2 = (((int)threadIdx.x) >> 4);
    int cse_v11 = ((((e * 2048) + (((int)blockIdx.x) * 512)) + ((((int)threadIdx.x) & 15) * 32)) + (((int)threadIdx.x) >> 4));
    V_ptr[((((e * 2048) + (((int)blockIdx.x) * 512)) + ((((int)threadIdx.x) & 15) * 32)) + (((int)threadIdx.x) >> 4))] = __float2half_rn(0x0p+0f/*0.000000e+00*/);
    for (int u = 0; u < 4; ++u) {
      for (int v = 0; v < 4; ++v) {
        int cse_v3 = (e >> 2);
        int cse_v4 = (e & 3);
        V_ptr[((((e * 2048) + (((int)blockIdx.x) * 512)) + ((((int)threadIdx.x) & 15) * 32)) + (((int)threadIdx.x) >> 4))] = (V_ptr[((((e * 2048) + (((int)blockIdx.x) * 512)) + ((((int)threadIdx.x) & 15) * 32)) + (((int)threadIdx.x) >> 4))] + ((data_ptr[(((((((((int)threadIdx.x) >> 4) * 324) + (((int)blockIdx.x) * 72)) + (((((int)threadIdx.x) & 15) >> 3) * 36)) + (u * 18)) + ((((int)threadIdx.x) & 7) * 2)) + v)] * (((u == 3) && ((e >> 2) == 3)) ? __float2half_rn(-0x1p+0f/*-1.000000e+00*/) : (((u == 2) && ((e >> 2) == 2)) ? __float2half_rn(0x1p+0f/*1.000000e+00*/) : (((u == 2) && ((e >> 2) == 1)) ? __float2half_rn(0x1p+0f/*1.000000e+00*/) : (((u == 2) && ((e >> 2) == 0)) ? __float2half_rn(-0x1p+0f/*-1.000000e+00*/) : (((u == 1) && ((e >> 2) == 3)) ? __float2half_rn(0x1p+0f/*1.000000e+00*/) : (((u == 1) && ((e >> 2) == 2)) ? __float2half_rn(-0x1p+0f/*-1.000000e+00*/) : (((u == 1) && ((e >> 2) == 1)) ? __float2half_rn(0x1p+0f/*1.000000e+00*/) : (((u == 0) && ((e >> 2) == 0)) ? __float2half_rn(0x1p+0f/*1.000000e+00*/) : __float2half_rn(0x0p+0f/*0.000000e+00*/)))))))))) * (((v == 3) && ((e & 3) == 3)) ? __float2half_rn(-0x1p+0f/*-1.000000e+00*/) : (((v == 2) && ((e & 3) == 2)) ? __float2half_rn(0x1p+0f/*1.000000e+00*/) : (((v == 2) && ((e & 3) == 1)) ? __float2half_rn(0x1p+0f/*1.000000e+00*/) : (((v == 2) && ((e % 4) == 0)) ? __float2half_rn(-0x1p+0f/*-1.000000e+00*/) : (((v == 1) && ((e & 3) == 3)) ? __float2half_rn(0x1p+0f/*1.000000e+00*/) : (((v == 1) && ((e & 3) == 2)) ? __float2half_rn(-0x1p+0f/*-1.000000e+00*/) : (((v == 1) && ((e & 3) == 1)) ? __float2half_rn(0x1p+0f/*1.000000e+00*/) : (((v == 0) && ((e % 4) == 0)) ? __float2half_rn(0x1p+0f/*1.000000e+00*/) : __float2half_rn(0x0p+0f/*0.000000e+00*/)))))))))));
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(128) winograd_kernel_1(half* __restrict__ V_ptr, half* __restrict__ filter_ptr, float* __restrict__ output_ptr) {
  nvcuda::wmma::fragment<nvcuda::wmma::accumulator, 16, 16, 16, float> output_wmma_accumulator_ptr[1];
  __shared__ alignas(64) half V_shared_ptr[1024];
  nvcuda::wmma::fragment<nvcuda::wmma::matrix_a, 16, 16, 16, half, nvcuda::wmma::row_major> V_shared_wmma_matrix_a_ptr[1];
  nvcuda::wmma::fragment<nvcuda::wmma::matrix_b, 16, 16, 16, half, nvcuda::wmma::row_major> filter_shared_wmma_matrix_b_ptr[1];
  for (int e_0 = 0; e_0 < 4; ++e_0) {
    nvcuda::wmma::fill_fragment(output_wmma_accumulator_ptr[0], 0x0p+0f/*0.000000e+00*/);
    int cse_v7 = (((int)blockIdx.y) * 16);
    int cse_v10 = (((e_0 * 8192) + (((int)threadIdx.y) * 2048)) + (((int)blockIdx.x) * 512));
    for (int c_0 = 0; c_0 < 2; ++c_0) {
      int cse_v5 = (((int)threadIdx.y) * 256);
      int cse_v6 = (((int)threadIdx.x) * 4);
      int cse_v8 = ((((int)threadIdx.x) >> 2) * 32);
      int cse_v9 = ((((int)threadIdx.x) & 3) * 4);
      __syncthreads();
      for (int ax1_ax2_fused_0 = 0; ax1_ax2_fused_0 < 2; ++ax1_ax2_fused_0) {
        *(half4*)(V_shared_ptr + (((((int)threadIdx.y) * 256) + (ax1_ax2_fused_0 * 128)) + (((int)threadIdx.x) * 4))) = *(half4*)(V_ptr + (((((((e_0 * 8192) + (((int)threadIdx.y) * 2048)) + (((int)blockIdx.x) * 512)) + (ax1_ax2_fused_0 * 256)) + ((((int)threadIdx.x) >> 2) * 32)) + (c_0 * 16)) + ((((int)threadIdx.x) & 3) * 4)));
      }
      __syncthreads();
      nvcuda::wmma::load_matrix_sync(V_shared_wmma_matrix_a_ptr[0], (&(V_shared_ptr[(((int)threadIdx.y) * 256)])), 16);
      __syncthreads();
      for (int ax1_ax2_fused_0_1 = 0; ax1_ax2_fused_0_1 < 2; ++ax1_ax2_fused_0_1) {
        *(half4*)(V_shared_ptr + (((((int)threadIdx.y) * 256) + (ax1_ax2_fused_0_1 * 128)) + (((int)threadIdx.x) * 4))) = *(half4*)(filter_ptr + (((((((e_0 * 4096) + (((int)threadIdx.y) * 1024)) + (c_0 * 512)) + (ax1_ax2_fused_0_1 * 256)) + ((((int)threadIdx.x) >> 2) * 32)) + (((int)blockIdx.y) * 16)) + ((((int)threadIdx.x) & 3) * 4)));
      }
      __syncthreads();
      nvcuda::wmma::load_matrix_sync(filter_shared_wmma_matrix_b_ptr[0], (&(V_shared_ptr[(((int)threadIdx.y) * 256)])), 16);
      nvcuda::wmma::mma_sync(output_wmma_accumulator_ptr[0], V_shared_wmma_matrix_a_ptr[0], filter_shared_wmma_matrix_b_ptr[0], output_wmma_accumulator_ptr[0]);
    }
    nvcuda::wmma::store_matrix_sync((&(output_ptr[((((e_0 * 8192) + (((int)threadIdx.y) * 2048)) + (((int)blockIdx.x) * 512)) + (((int)blockIdx.y) * 16))])), output_wmma_accumulator_ptr[0], 32, nvcuda::wmma::mem_row_major);
  }
}

