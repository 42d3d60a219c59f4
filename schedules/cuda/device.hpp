// Device functions that every generated kernel may call: asynchronous copies to shared memory, and tensor-core products.
//
// On the device each function is a few PTX instructions. With IM2WIN_EMULATOR defined the same file compiles for the host, on emulator.hpp.
//
// Tensor cores work on *words* of 4 bytes: 1 float, 2 halves or 4 int8. One `mma.sync` multiplies 16 rows of A, 8 words each, by 8 columns
// of B, 8 words each: m16n8k8 for TF32, m16n8k16 for FP16 and BF16, m16n8k32 for INT8. Lane 4*g + t holds words t and t+4 of rows g and g+8
// of A and of column g of B, and the accumulators of rows g and g+8 at columns 2*t and 2*t+1.
#pragma once

namespace im2win {

#ifndef IM2WIN_EMULATOR

__device__ __forceinline__ unsigned shared_address(const void* pointer) { return static_cast<unsigned>(__cvta_generic_to_shared(pointer)); }

// Copies `bytes` (4, 8 or 16) from global to shared memory; zeros where `inside` is false.
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
// Waits until at most the newest `left` groups of this thread's copies are in flight.
template <int left>
__device__ __forceinline__ void wait_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(left) : "memory"); }

__device__ __forceinline__ void product_f16(float* c, const unsigned* a, const unsigned* b) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
__device__ __forceinline__ void product_bf16(float* c, const unsigned* a, const unsigned* b) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
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

// Bulk copies: one thread issues the copy of `bytes` (a multiple of 16), and the data arrives at a full barrier (mbarrier) in shared
// memory. Phases of a barrier alternate; a phase ends when all bytes expected in it have arrived. Only `wgmma`, which reads shared memory
// itself, needs no fence then.
__device__ __forceinline__ void init_full_barrier(void* phases) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;\nfence.mbarrier_init.release.cluster;" ::"r"(shared_address(phases)) : "memory");
}
__device__ __forceinline__ void copy_bulk(void* to, const void* from, int bytes, void* phases) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(phases)), "r"(bytes) : "memory");
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared_address(to)), "l"(from),
               "r"(bytes), "r"(shared_address(phases)) : "memory");
}
__device__ __forceinline__ void wait_full_barrier(void* phases, int phase) {
  unsigned done;
  do {
    asm volatile("{\n.reg .pred done;\nmbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\nselp.u32 %0, 1, 0, done;\n}"
                 : "=r"(done) : "r"(shared_address(phases)), "r"(phase) : "memory");
  } while (!done);
}

// `wgmma`: a warpgroup of four warps multiplies 64 rows of A by up to 256 columns of B. A comes from registers: warp w has rows 16*w to
// 16*w+15, and a lane holds the words named above (`upper`: of row g, `lower`: of row g+8). B lies in shared memory as 16 bytes of every
// column, side by side; the next 16 bytes follow `leading` bytes behind. Tensor cores read both operands and add to the accumulators
// asynchronously, until a wait.
template <int columns>
__device__ __forceinline__ void wgmma_f16(float* c, const unsigned* upper, const unsigned* lower, const void* b, int leading);
template <int columns>
__device__ __forceinline__ void wgmma_bf16(float* c, const unsigned* upper, const unsigned* lower, const void* b, int leading);
template <int columns>
__device__ __forceinline__ void wgmma_tf32(float* c, const unsigned* upper, const unsigned* lower, const void* b, int leading);
template <int columns>
__device__ __forceinline__ void wgmma_s8(int* c, const unsigned* upper, const unsigned* lower, const void* b, int leading);

// The matrix descriptor of B: no swizzle, groups of eight columns 128 bytes apart.
__device__ __forceinline__ unsigned long long matrix_descriptor(const void* b, int leading) {
  return (shared_address(b) & 0x3ffffull) >> 4 | static_cast<unsigned long long>(leading >> 4) << 16 | 128ull >> 4 << 32;
}
// Orders earlier writes of registers before the reads of later `wgmma`.
__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most the newest `left` groups of products are in flight.
template <int left>
__device__ __forceinline__ void wait_products() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(left) : "memory"); }
// Waits for all products. Within one basic block ptxas 13.0 may move conversions of accumulators before such a wait. A condition that
// always holds, and that ptxas cannot evaluate, keeps them apart.
__device__ __forceinline__ void finish_products() {
  unsigned depth;
  asm volatile("mov.u32 %0, %%nctaid.z;" : "=r"(depth));
  if (depth) wait_products<0>();
}
// Accumulators are read behind this, which the compiler cannot move.
__device__ __forceinline__ void hold(float* sum) { asm volatile("" : "+f"(*sum)::"memory"); }
__device__ __forceinline__ void hold(int* sum) { asm volatile("" : "+r"(*sum)::"memory"); }

// Adds and subtracts four words of two halves each.
__device__ __forceinline__ void add_f16(unsigned* to, const unsigned* a, const unsigned* b) {
  for (int i = 0; i < 4; ++i) asm("add.rn.f16x2 %0, %1, %2;" : "=r"(to[i]) : "r"(a[i]), "r"(b[i]));
}
__device__ __forceinline__ void subtract_f16(unsigned* to, const unsigned* a, const unsigned* b) {
  for (int i = 0; i < 4; ++i) asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(to[i]) : "r"(a[i]), "r"(b[i]));
}
__device__ __forceinline__ void add_bf16(unsigned* to, const unsigned* a, const unsigned* b) {
  for (int i = 0; i < 4; ++i) asm("add.rn.bf16x2 %0, %1, %2;" : "=r"(to[i]) : "r"(a[i]), "r"(b[i]));
}
__device__ __forceinline__ void subtract_bf16(unsigned* to, const unsigned* a, const unsigned* b) {
  for (int i = 0; i < 4; ++i) asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(to[i]) : "r"(a[i]), "r"(b[i]));
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

template <typename Half>
struct WordOf {
  static constexpr int values = 2;
  static float get(unsigned word, int i) {
    Half value;
    value.bits = uint16_t(word >> 16 * i);
    return float(value);
  }
};
using HalfWord = WordOf<half>;
using Bfloat16Word = WordOf<nv_bfloat16>;
struct Tf32Word {  // tensor cores read 8 bits of exponent and 10 of fraction, and ignore the rest
  static constexpr int values = 1;
  static float get(unsigned word, int) { return __int_as_float(int(word & 0xffffe000u)); }
};
struct Int8Word {
  static constexpr int values = 4;
  static int get(unsigned word, int i) { return int8_t(word >> 8 * i); }
};

// Products are exact. Of an accumulator the hardware keeps 24 bits and truncates the others (measured: errors of long sums grow
// accordingly).
inline float cut_off(double sum) {
  const float near = float(sum);
  return std::fabs(double(near)) > std::fabs(sum) ? std::nextafter(near, 0.0f) : near;
}
inline int cut_off(long long sum) { return int(sum); }

template <typename Sum>
using Exact = std::conditional_t<std::is_same_v<Sum, float>, double, long long>;

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
        Exact<Sum> sum = at(row % 8 * 4 + col / 2).c[row / 8 * 2 + col % 2];
        for (int word = 0; word < 8; ++word)
          for (int i = 0; i < Word::values; ++i)
            sum += Exact<Sum>(Word::get(at(row % 8 * 4 + word % 4).a[row / 8 + word / 4 * 2], i)) *
                   Word::get(at(col * 4 + word % 4).b[word / 4], i);
        sums[row][col] = cut_off(sum);
      }
    for (int row = 0; row < 16; ++row)
      for (int col = 0; col < 8; ++col) at(row % 8 * 4 + col / 2).c[row / 8 * 2 + col % 2] = sums[row][col];
  });
}
inline void product_f16(float* c, const unsigned* a, const unsigned* b) { product<HalfWord>(c, a, b); }
inline void product_bf16(float* c, const unsigned* a, const unsigned* b) { product<Bfloat16Word>(c, a, b); }
inline void product_tf32(float* c, const unsigned* a, const unsigned* b) { product<Tf32Word>(c, a, b); }
inline void product_s8(int* c, const unsigned* a, const unsigned* b) { product<Int8Word>(c, a, b); }

// Each warp computes its own 16 rows of a warpgroup's product, at some time before the wait.
template <typename Word, int columns, typename Sum>
void warpgroup_product(Sum* c, const unsigned* upper, const unsigned* lower, const void* b, int leading) {
  struct Lane {
    Sum* c;
    const unsigned *upper, *lower;
  } lane{c, upper, lower};
  emulator::warp_operation(-1, 0xffffffffu, &lane, [=](void* lanes[32]) {
    std::vector<Lane> all;
    for (int i = 0; i < 32; ++i) all.push_back(*static_cast<Lane*>(lanes[i]));
    emulator::later([=] {
      for (int col = 0; col < columns; ++col) {
        const unsigned* parts[2];
        for (int half = 0; half < 2; ++half) {
          parts[half] = reinterpret_cast<const unsigned*>(static_cast<const char*>(b) + half * leading + col * 16);
          emulator::check_fenced(parts[half]);
        }
        for (int row = 0; row < 16; ++row) {
          Sum& held = all[row % 8 * 4 + col % 8 / 2].c[col / 8 * 4 + row / 8 * 2 + col % 2];
          Exact<Sum> sum = held;
          for (int word = 0; word < 8; ++word) {
            const Lane& from = all[row % 8 * 4 + word % 4];
            const unsigned a = (row < 8 ? from.upper : from.lower)[word / 4];
            for (int i = 0; i < Word::values; ++i) sum += Exact<Sum>(Word::get(a, i)) * Word::get(parts[word / 4][word % 4], i);
          }
          held = cut_off(sum);
        }
      }
    });
  });
}
template <int columns>
void wgmma_f16(float* c, const unsigned* upper, const unsigned* lower, const void* b, int leading) {
  warpgroup_product<HalfWord, columns>(c, upper, lower, b, leading);
}
template <int columns>
void wgmma_bf16(float* c, const unsigned* upper, const unsigned* lower, const void* b, int leading) {
  warpgroup_product<Bfloat16Word, columns>(c, upper, lower, b, leading);
}
template <int columns>
void wgmma_tf32(float* c, const unsigned* upper, const unsigned* lower, const void* b, int leading) {
  warpgroup_product<Tf32Word, columns>(c, upper, lower, b, leading);
}
template <int columns>
void wgmma_s8(int* c, const unsigned* upper, const unsigned* lower, const void* b, int leading) {
  warpgroup_product<Int8Word, columns>(c, upper, lower, b, leading);
}
inline void init_full_barrier(void* phases) { emulator::init_full_barrier(phases); }
inline void copy_bulk(void* to, const void* from, int bytes, void* phases) {
  if (bytes % 16 || reinterpret_cast<uintptr_t>(to) % 16 || reinterpret_cast<uintptr_t>(from) % 16)
    emulator::fail("a bulk copy that is not aligned to 16 bytes");
  emulator::copy_bulk(to, from, size_t(bytes), phases);
}
inline void wait_full_barrier(void* phases, int phase) { emulator::wait_full_barrier(phases, phase); }
inline void begin_products() {}
inline void commit_products() { emulator::commit_products(); }
template <int left>
void wait_products() { emulator::wait_products(left); }
inline void finish_products() { emulator::wait_products(0); }
template <typename Sum>
void hold(Sum*) {}

template <typename Half, typename Operation>
void with_halves(unsigned* to, const unsigned* a, const unsigned* b, Operation operation) {
  using Word = WordOf<Half>;
  for (int i = 0; i < 4; ++i) {
    unsigned word = 0;
    for (int j = 0; j < Word::values; ++j) word |= unsigned(Half(operation(Word::get(a[i], j), Word::get(b[i], j))).bits) << 16 * j;
    to[i] = word;
  }
}
inline void add_f16(unsigned* to, const unsigned* a, const unsigned* b) {
  with_halves<half>(to, a, b, [](float x, float y) { return x + y; });
}
inline void subtract_f16(unsigned* to, const unsigned* a, const unsigned* b) {
  with_halves<half>(to, a, b, [](float x, float y) { return x - y; });
}
inline void add_bf16(unsigned* to, const unsigned* a, const unsigned* b) {
  with_halves<nv_bfloat16>(to, a, b, [](float x, float y) { return x + y; });
}
inline void subtract_bf16(unsigned* to, const unsigned* a, const unsigned* b) {
  with_halves<nv_bfloat16>(to, a, b, [](float x, float y) { return x - y; });
}
#endif

// Adds and subtracts four words of a float each.
__device__ __forceinline__ void add_f32(unsigned* to, const unsigned* a, const unsigned* b) {
  for (int i = 0; i < 4; ++i) to[i] = unsigned(__float_as_int(__int_as_float(int(a[i])) + __int_as_float(int(b[i]))));
}
__device__ __forceinline__ void subtract_f32(unsigned* to, const unsigned* a, const unsigned* b) {
  for (int i = 0; i < 4; ++i) to[i] = unsigned(__float_as_int(__int_as_float(int(a[i])) - __int_as_float(int(b[i]))));
}

// Loads 16 aligned bytes as four words.
__device__ __forceinline__ void load_words(unsigned* to, const void* from) {
  const uint4 words = *static_cast<const uint4*>(from);
  to[0] = words.x, to[1] = words.y, to[2] = words.z, to[3] = words.w;
}

// Rounds to the nearest TF32, of 10 bits of fraction; infinities and NaN stay (adding half a unit would carry into and out of them).
__device__ __forceinline__ unsigned rounded_tf32(unsigned word) {
  return (word & 0x7f800000u) == 0x7f800000u ? word | (word & 0x1fffu ? 0x400000u : 0u) : word + 0x1000u;
}

// Splits a float32 into two TF32: the part that tensor cores read, and the remainder, of which they read 11 bits more. NaN stays NaN.
__device__ __forceinline__ unsigned high_part(unsigned word) { return word & 0xffffe000u; }
__device__ __forceinline__ unsigned low_part(unsigned word, unsigned high) {
  return static_cast<unsigned>(__float_as_int(__int_as_float(static_cast<int>(word)) - __int_as_float(static_cast<int>(high))));
}

}  // namespace im2win
