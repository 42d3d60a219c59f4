// Products of a warpgroup whose operands both lie in shared memory, and what warpgroups of a block need that go their own ways.

#ifdef __CUDACC_RTC__
struct alignas(64) CUtensorMap {
  unsigned long long opaque[16];
};
#endif

namespace im2win {

#ifndef IM2WIN_EMULATOR

// 64 rows of A with up to 256 columns of B. A lies as 16 bytes of every row, side by side, eight of them 128 bytes apart; `a_leading` bytes
// behind them the next 16. So does B where `pitch` is 16. Else columns are `pitch` bytes apart, and where 16 bytes of one lie says the order
// in which boxes are copied (see `copy_box`).
template <int columns, int pitch>
__device__ __forceinline__ void wgmma_shared_f16(float* c, const void* a, int a_leading, const void* b, int b_leading);
template <int columns, int pitch>
__device__ __forceinline__ void wgmma_shared_s8(int* c, const void* a, int a_leading, const void* b, int b_leading);

template <int pitch>
__device__ __forceinline__ unsigned long long column_descriptor(const void* b, int leading) {
  if constexpr (pitch == 16) return matrix_descriptor(b, leading);
  const unsigned long long order = pitch == 128 ? 1 : 2;
  return (shared_address(b) & 0x3ffffull) >> 4 | 1ull << 16 | static_cast<unsigned long long>(pitch * 8 >> 4) << 32 | order << 62;
}

// In a new phase of a barrier so many bytes will land.
__device__ __forceinline__ void expect_bytes(void* phases, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(phases)), "r"(bytes) : "memory");
}

// A box of a tensor of four axes, from the element at (a, b, c, d) on, a the innermost; zeros where it reaches beyond the tensor. Where rows
// are 128 or 64 bytes and the map says so, 16 bytes with address x lie at x ^ (x >> 3 & 0x70), or x ^ (x >> 3 & 0x30).
__device__ __forceinline__ void copy_box(void* to, unsigned long long map, int a, int b, int c, int d, void* phases) {
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(
                   shared_address(to)), "l"(map), "r"(a), "r"(b), "r"(c), "r"(d), "r"(shared_address(phases)) : "memory");
}

// What this thread stored in shared memory may be read by products behind the next barrier.
__device__ __forceinline__ void fence_stores() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Waits for the 128 threads of a warpgroup.
__device__ __forceinline__ void group_barrier(int group) { asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory"); }

#else

template <typename Word, int columns, int pitch, typename Sum>
void shared_product(Sum* c, const void* a, int a_leading, const void* b, int b_leading) {
  const size_t first = size_t(threadIdx.x) / 32 % 4 * 16;  // of the rows, this warp's
  emulator::warp_operation(-1, 0xffffffffu, c, [=](void* lanes[32]) {
    std::vector<Sum*> all;
    for (int i = 0; i < 32; ++i) all.push_back(static_cast<Sum*>(lanes[i]));
    emulator::later([=] {
      auto word = [](const void* from, int leading, size_t at, int i, size_t apart) {
        auto address = reinterpret_cast<uintptr_t>(from) + i / 4 * (apart == 16 ? leading : 16) + at * apart;
        if (apart > 16) address ^= address >> 3 & (apart == 128 ? 0x70 : 0x30);
        if (i % 4 == 0) emulator::check_fenced(reinterpret_cast<const void*>(address));
        return reinterpret_cast<const unsigned*>(address)[i % 4];
      };
      unsigned rows[16][8];
      for (int row = 0; row < 16; ++row)
        for (int i = 0; i < 8; ++i) rows[row][i] = word(a, a_leading, first + row, i, 16);
      for (int col = 0; col < columns; ++col) {
        unsigned words[8];
        for (int i = 0; i < 8; ++i) words[i] = word(b, b_leading, col, i, pitch);
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
template <int columns, int pitch>
void wgmma_shared_f16(float* c, const void* a, int a_leading, const void* b, int b_leading) {
  shared_product<HalfWord, columns, pitch>(c, a, a_leading, b, b_leading);
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

// From rows of eight channels, `stride` bytes apart, 16 bytes of a pixel; or of two neighbours, where they are aligned to a word.
__device__ __forceinline__ void take_pixel(void* to, const void* from, int stride) {
  unsigned words[4];
  for (int i = 0; i < 4; ++i) {
    const char* row = static_cast<const char*>(from) + 2 * i * stride;
    words[i] = *reinterpret_cast<const unsigned short*>(row) | unsigned(*reinterpret_cast<const unsigned short*>(row + stride)) << 16;
  }
  *static_cast<uint4*>(to) = {words[0], words[1], words[2], words[3]};
}
__device__ __forceinline__ void take_pixels(void* to, const void* from, int stride) {
  unsigned left[4], right[4];
  for (int i = 0; i < 4; ++i) {
    const char* row = static_cast<const char*>(from) + 2 * i * stride;
    const unsigned even = *reinterpret_cast<const unsigned*>(row), odd = *reinterpret_cast<const unsigned*>(row + stride);
    left[i] = (even & 0xffffu) | odd << 16;
    right[i] = even >> 16 | (odd & 0xffff0000u);
  }
  static_cast<uint4*>(to)[0] = {left[0], left[1], left[2], left[3]};
  static_cast<uint4*>(to)[1] = {right[0], right[1], right[2], right[3]};
}

// The same from rows of sixteen channels of one byte; or of four neighbours, aligned to a word. Threads side by side begin with different ones
// of the four, so that their stores do not meet in a bank.
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
  for (int i = 0; i < 4; ++i) {
    const unsigned pixel = (first + i) % 4, bytes = 0x0040 + 0x0011 * pixel;
    unsigned words[4];
    for (int j = 0; j < 4; ++j) {
      const unsigned lower = __byte_perm(rows[4 * j], rows[4 * j + 1], bytes), upper = __byte_perm(rows[4 * j + 2], rows[4 * j + 3], bytes);
      words[j] = __byte_perm(lower, upper, 0x5410);
    }
    static_cast<uint4*>(to)[pixel] = {words[0], words[1], words[2], words[3]};
  }
}

}  // namespace im2win
