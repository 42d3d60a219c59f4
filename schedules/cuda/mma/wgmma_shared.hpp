// `wgmma` with both operands in shared memory, TMA boxes, and barriers of single warpgroups.

#ifdef __CUDACC_RTC__
struct alignas(64) CUtensorMap {
  unsigned long long opaque[16];
};
#endif

namespace im2win {

#ifndef IM2WIN_EMULATOR

// 64 rows of A by up to 256 columns of B. A has 16 bytes of every row side by side, eight rows in 128 bytes; the next 16 bytes of the rows
// follow `a_leading` bytes behind. B is the same where `pitch` is 16. Otherwise columns are `pitch` bytes apart, and the 16-byte chunks of
// a column are swizzled as TMA boxes are (see `copy_box`).
template <int columns, int pitch>
__device__ __forceinline__ void wgmma_shared_f16(float* c, const void* a, int a_leading, const void* b, int b_leading);
template <int columns, int pitch>
__device__ __forceinline__ void wgmma_shared_bf16(float* c, const void* a, int a_leading, const void* b, int b_leading);
template <int columns, int pitch>
__device__ __forceinline__ void wgmma_shared_s8(int* c, const void* a, int a_leading, const void* b, int b_leading);

template <int pitch>
__device__ __forceinline__ unsigned long long column_descriptor(const void* b, int leading) {
  if constexpr (pitch == 16) return matrix_descriptor(b, leading);
  const unsigned long long order = pitch == 128 ? 1 : 2;
  return (shared_address(b) & 0x3ffffull) >> 4 | 1ull << 16 | static_cast<unsigned long long>(pitch * 8 >> 4) << 32 | order << 62;
}

// 64 rows of A by up to 256 columns of B, whose lines of 64 neighbouring columns, 128 bytes, lie one behind the other for every element of
// the sum (MN-major), swizzled as TMA boxes are. The next 64 columns follow `b_leading` bytes behind.
template <int columns>
__device__ __forceinline__ void wgmma_lines_f16(float* c, const void* a, int a_leading, const void* b, int b_leading);
template <int columns>
__device__ __forceinline__ void wgmma_lines_bf16(float* c, const void* a, int a_leading, const void* b, int b_leading);

__device__ __forceinline__ unsigned long long line_descriptor(const void* b, int leading) {
  const unsigned long long eights = 8 * 128 >> 4;
  return (shared_address(b) & 0x3ffffull) >> 4 | static_cast<unsigned long long>(leading >> 4) << 16 | eights << 32 | 1ull << 62;
}

// Arrives at a full barrier and expects so many bytes in its phase.
__device__ __forceinline__ void expect_bytes(void* phases, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(phases)), "r"(bytes) : "memory");
}

// Copies a TMA box of a tensor of four axes, from element (a, b, c, d) on, a innermost; zeros where it reaches beyond the tensor. Where the
// map sets a swizzle of 128 or 64 bytes, the 16 bytes of address x lie at x ^ (x >> 3 & 0x70), or x ^ (x >> 3 & 0x30).
__device__ __forceinline__ void copy_box(void* to, unsigned long long map, int a, int b, int c, int d, void* phases) {
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(
                   shared_address(to)), "l"(map), "r"(a), "r"(b), "r"(c), "r"(d), "r"(shared_address(phases)) : "memory");
}

// Makes this thread's stores to shared memory visible to products that are issued behind the next barrier.
__device__ __forceinline__ void fence_stores() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Waits for the 128 threads of a warpgroup.
__device__ __forceinline__ void group_barrier(int group) { asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory"); }

#else

// The i-th word of the elements of the sum of a row of A, or of a column of B.
inline unsigned word_of(const void* from, int leading, size_t at, int i, size_t apart) {
  auto address = reinterpret_cast<uintptr_t>(from) + i / 4 * (apart == 16 ? leading : 16) + at * apart;
  if (apart > 16) address ^= address >> 3 & (apart == 128 ? 0x70 : 0x30);
  if (i % 4 == 0) emulator::check_fenced(reinterpret_cast<const void*>(address));
  return reinterpret_cast<const unsigned*>(address)[i % 4];
}
// `column(col, words)` reads the elements of the sum of a column of B.
template <typename Word, int columns, typename Sum, typename Column>
void product_of_columns(Sum* c, const void* a, int a_leading, Column column) {
  const size_t first = size_t(threadIdx.x) / 32 % 4 * 16;  // this warp's first row
  emulator::warp_operation(-1, 0xffffffffu, c, [=](void* lanes[32]) {
    std::vector<Sum*> all;
    for (int i = 0; i < 32; ++i) all.push_back(static_cast<Sum*>(lanes[i]));
    emulator::later([=] {
      unsigned rows[16][8];
      for (int row = 0; row < 16; ++row)
        for (int i = 0; i < 8; ++i) rows[row][i] = word_of(a, a_leading, first + row, i, 16);
      for (int col = 0; col < columns; ++col) {
        unsigned words[8];
        column(col, words);
        for (int row = 0; row < 16; ++row) {
          Sum& held = all[row % 8 * 4 + col % 8 / 2][col / 8 * 4 + row / 8 * 2 + col % 2];
          Exact<Sum> sum = held;
          for (int i = 0; i < 8; ++i)
            for (int j = 0; j < Word::values; ++j) sum += Exact<Sum>(Word::get(rows[row][i], j)) * Word::get(words[i], j);
          held = cut_off(sum);
        }
      }
    });
  });
}
template <typename Word, int columns, int pitch, typename Sum>
void shared_product(Sum* c, const void* a, int a_leading, const void* b, int b_leading) {
  product_of_columns<Word, columns>(c, a, a_leading, [=](int col, unsigned* words) {
    for (int i = 0; i < 8; ++i) words[i] = word_of(b, b_leading, col, i, pitch);
  });
}
template <typename Word, int columns>
void lines_product(float* c, const void* a, int a_leading, const void* b, int b_leading) {
  product_of_columns<Word, columns>(c, a, a_leading, [=](int col, unsigned* words) {
    for (int k = 0; k < 16; ++k) {
      auto address = reinterpret_cast<uintptr_t>(b) + col / 64 * b_leading + k * 128 + col % 64 * 2;
      address ^= address >> 3 & 0x70;
      const unsigned value = *reinterpret_cast<const unsigned short*>(address);
      words[k / 2] = k % 2 ? words[k / 2] | value << 16 : value;
    }
  });
}
template <int columns>
void wgmma_lines_f16(float* c, const void* a, int a_leading, const void* b, int b_leading) {
  lines_product<HalfWord, columns>(c, a, a_leading, b, b_leading);
}
template <int columns>
void wgmma_lines_bf16(float* c, const void* a, int a_leading, const void* b, int b_leading) {
  lines_product<Bfloat16Word, columns>(c, a, a_leading, b, b_leading);
}
template <int columns, int pitch>
void wgmma_shared_f16(float* c, const void* a, int a_leading, const void* b, int b_leading) {
  shared_product<HalfWord, columns, pitch>(c, a, a_leading, b, b_leading);
}
template <int columns, int pitch>
void wgmma_shared_bf16(float* c, const void* a, int a_leading, const void* b, int b_leading) {
  shared_product<Bfloat16Word, columns, pitch>(c, a, a_leading, b, b_leading);
}
template <int columns, int pitch>
void wgmma_shared_s8(int* c, const void* a, int a_leading, const void* b, int b_leading) {
  shared_product<Int8Word, columns, pitch>(c, a, a_leading, b, b_leading);
}
inline void expect_bytes(void* phases, int bytes) { emulator::expect_bytes(phases, size_t(bytes)); }
inline void copy_box(void* to, unsigned long long map, int a, int b, int c, int d, void* phases) {
  emulator::copy_box(to, *reinterpret_cast<const CUtensorMap*>(map), {a, b, c, d}, phases);
}
inline void fence_stores() { emulator::fence_stores(); }
inline void group_barrier(int group) { emulator::group_barrier(group + 1, 128); }
#endif

// Gathers 16 bytes of a pixel from rows of eight two-byte channels, `stride` bytes apart; or of two neighbouring pixels where they are
// aligned to a word. Eight neighbouring threads store the first pixel first, the next eight the second, so that their stores have no bank
// conflict.
__device__ __forceinline__ void take_pixel(void* to, const void* from, int stride) {
  unsigned words[4];
  for (int i = 0; i < 4; ++i) {
    const char* row = static_cast<const char*>(from) + 2 * i * stride;
    words[i] = *reinterpret_cast<const unsigned short*>(row) | unsigned(*reinterpret_cast<const unsigned short*>(row + stride)) << 16;
  }
  *static_cast<uint4*>(to) = {words[0], words[1], words[2], words[3]};
}
__device__ __forceinline__ void take_pixels(void* to, const void* from, int stride) {
  const unsigned second = static_cast<unsigned>(reinterpret_cast<size_t>(to) >> 7) % 2, bytes = second ? 0x7632 : 0x5410;
  unsigned words[2][4];
  for (int i = 0; i < 4; ++i) {
    const char* row = static_cast<const char*>(from) + 2 * i * stride;
    const unsigned even = *reinterpret_cast<const unsigned*>(row), odd = *reinterpret_cast<const unsigned*>(row + stride);
    words[0][i] = __byte_perm(even, odd, bytes);
    words[1][i] = __byte_perm(even, odd, bytes ^ 0x2222);
  }
  static_cast<uint4*>(to)[second] = {words[0][0], words[0][1], words[0][2], words[0][3]};
  static_cast<uint4*>(to)[1 - second] = {words[1][0], words[1][1], words[1][2], words[1][3]};
}

// The same from rows of sixteen one-byte channels; or of four neighbouring pixels, aligned to a word. Neighbouring threads begin with
// different pixels, so that their stores have no bank conflict. Bytes of two pixels of two rows are put side by side, then those of four
// rows.
__device__ __forceinline__ void take_pixel_s8(void* to, const void* from, int stride) {
  unsigned words[4];
  for (int i = 0; i < 4; ++i) {
    const unsigned char* row = static_cast<const unsigned char*>(from) + 4 * i * stride;
    words[i] = row[0] | unsigned(row[stride]) << 8 | unsigned(row[2 * stride]) << 16 | unsigned(row[3 * stride]) << 24;
  }
  *static_cast<uint4*>(to) = {words[0], words[1], words[2], words[3]};
}
__device__ __forceinline__ void take_pixels_s8(void* to, const void* from, int stride) {
  unsigned rows[16];
  for (int i = 0; i < 16; ++i) rows[i] = *reinterpret_cast<const unsigned*>(static_cast<const char*>(from) + i * stride);
  const unsigned first = static_cast<unsigned>(reinterpret_cast<size_t>(to) >> 7);
  for (int i = 0; i < 4; i += 2) {
    const unsigned left = (first + i) % 4, right = (first + i + 1) % 4, bytes = 0x4040 + 0x0011 * left + 0x1100 * right;
    unsigned words[2][4];
    for (int j = 0; j < 4; ++j) {
      const unsigned upper = __byte_perm(rows[4 * j], rows[4 * j + 1], bytes), lower = __byte_perm(rows[4 * j + 2], rows[4 * j + 3], bytes);
      words[0][j] = __byte_perm(upper, lower, 0x5410);
      words[1][j] = __byte_perm(upper, lower, 0x7632);
    }
    static_cast<uint4*>(to)[left] = {words[0][0], words[0][1], words[0][2], words[0][3]};
    static_cast<uint4*>(to)[right] = {words[1][0], words[1][1], words[1][2], words[1][3]};
  }
}

// Lane exchange. `lanes` neighbouring lanes each hold pieces of `lanes` runs of eight bytes, 8 / lanes bytes of each, every piece in a word
// of its own. The first lane gets the first run, its pieces in the order of the lanes, and so on. All lanes of a warp must call it.
template <int lanes>
__device__ __forceinline__ void gather_eight(unsigned* eight, const unsigned* pieces) {
  const bool odd = threadIdx.x & 1;
  if constexpr (lanes == 2) {
    const unsigned other = __shfl_xor_sync(0xffffffffu, odd ? pieces[0] : pieces[1], 1);
    eight[0] = odd ? other : pieces[0];
    eight[1] = odd ? pieces[1] : other;
  } else {
    const bool last = threadIdx.x & 2;
    const unsigned low = __byte_perm(pieces[0], pieces[1], 0x5410), high = __byte_perm(pieces[2], pieces[3], 0x5410);
    const unsigned other = __shfl_xor_sync(0xffffffffu, last ? low : high, 2);  // of the two runs that this lane and its neighbour get
    const unsigned upper = last ? other : low, lower = last ? high : other;
    const unsigned mine = __byte_perm(upper, lower, odd ? 0x7632 : 0x5410);
    const unsigned next = __shfl_xor_sync(0xffffffffu, __byte_perm(upper, lower, odd ? 0x5410 : 0x7632), 1);
    eight[0] = __byte_perm(mine, next, odd ? 0x1054 : 0x5410);
    eight[1] = __byte_perm(mine, next, odd ? 0x3276 : 0x7632);
  }
}
// Adds the accumulators of `runs` runs of eight columns that begin `lead` columns before those of `sums`. All lanes of a warp must call it.
template <int runs, int lead>
__device__ __forceinline__ void add_shifted(float* sums, const float* shifted) {
  const int lane = threadIdx.x % 32, t = lane % 4;
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const int odd = (e + lead) % 2, lanes = (e + lead) / 2, from = lane - t + (t + lanes) % 4;
#pragma unroll
    for (int j = 0; j < runs; ++j)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        // The lane that takes this one's value is `lanes` before it, or `4 - lanes` behind it, and then has columns of the run before.
        const int next = j + 1 < runs ? j + 1 : j;  // columns behind the last run are no outputs
        const float here = shifted[j * 4 + half * 2 + odd], beside = shifted[next * 4 + half * 2 + odd];
        sums[j * 4 + half * 2 + e] += __shfl_sync(0xffffffffu, lanes > t ? beside : here, from);
      }
  }
}
__device__ __forceinline__ void store_eight(void* to, const unsigned* eight) { *static_cast<uint2*>(to) = make_uint2(eight[0], eight[1]); }

// Two values of two bytes as one word. A template, since not every kernel includes their type.
template <typename Half>
__device__ __forceinline__ unsigned two_f16(Half first, Half second) {
  return reinterpret_cast<const unsigned short&>(first) | unsigned(reinterpret_cast<const unsigned short&>(second)) << 16;
}

}  // namespace im2win
