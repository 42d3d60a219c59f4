// Products of a warpgroup whose operands both lie in shared memory, and what warpgroups of a block need that go their own ways.

namespace im2win {

#ifndef IM2WIN_EMULATOR

// 64 rows of A with up to 256 columns of B. Both lie as 16 bytes of every row or column, side by side, eight of them 128 bytes apart; so many
// bytes behind them the next 16.
template <int columns>
__device__ __forceinline__ void wgmma_shared_f16(float* c, const void* a, int a_leading, const void* b, int b_leading);
template <int columns>
__device__ __forceinline__ void wgmma_shared_s8(int* c, const void* a, int a_leading, const void* b, int b_leading);

// What this thread's copies and stores left in shared memory may be read by products behind the next barrier.
__device__ __forceinline__ void fence_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Waits for the 128 threads of a warpgroup.
__device__ __forceinline__ void group_barrier(int group) { asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory"); }

#else

template <typename Word, int columns, typename Sum>
void shared_product(Sum* c, const void* a, int a_leading, const void* b, int b_leading) {
  const size_t first = size_t(threadIdx.x) / 32 % 4 * 16;  // of the rows, this warp's
  emulator::warp_operation(-1, 0xffffffffu, c, [=](void* lanes[32]) {
    std::vector<Sum*> all;
    for (int i = 0; i < 32; ++i) all.push_back(static_cast<Sum*>(lanes[i]));
    emulator::later([=] {
      auto word = [](const void* from, int leading, size_t at, int i) {
        const char* row = static_cast<const char*>(from) + i / 4 * leading + at * 16;
        if (i % 4 == 0) emulator::check_fenced(row);
        return reinterpret_cast<const unsigned*>(row)[i % 4];
      };
      unsigned rows[16][8];
      for (int row = 0; row < 16; ++row)
        for (int i = 0; i < 8; ++i) rows[row][i] = word(a, a_leading, first + row, i);
      for (int col = 0; col < columns; ++col) {
        unsigned words[8];
        for (int i = 0; i < 8; ++i) words[i] = word(b, b_leading, col, i);
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
template <int columns>
void wgmma_shared_f16(float* c, const void* a, int a_leading, const void* b, int b_leading) {
  shared_product<HalfWord, columns>(c, a, a_leading, b, b_leading);
}
template <int columns>
void wgmma_shared_s8(int* c, const void* a, int a_leading, const void* b, int b_leading) {
  shared_product<Int8Word, columns>(c, a, a_leading, b, b_leading);
}
inline void fence_copies() { emulator::fence_copies(); }
inline void group_barrier(int group) { emulator::group_barrier(group + 1, 128); }
#endif

}  // namespace im2win
