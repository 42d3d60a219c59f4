// `wgmma` of float8_e4m3fn with both operands in shared memory, and the sums that take over its accumulators.

namespace im2win {

#ifndef IM2WIN_EMULATOR

// As `wgmma_shared_s8`, of which operands have the same layout. `first` overwrites the accumulators instead of adding to them.
template <int columns, int pitch>
__device__ __forceinline__ void wgmma_shared_e4m3(float* c, const void* a, int a_leading, const void* b, int b_leading);
template <int columns, int pitch>
__device__ __forceinline__ void wgmma_first_e4m3(float* c, const void* a, int a_leading, const void* b, int b_leading);

#else

// Four exponent bits with a bias of 7, three bits of fraction, no infinity.
inline double e4m3_value(unsigned byte) {
  const int exponent = int(byte >> 3 & 15), fraction = int(byte & 7);
  if ((byte & 127) == 127) return NAN;
  const double size = exponent ? std::ldexp(8.0 + fraction, exponent - 10) : std::ldexp(double(fraction), -9);
  return byte & 128 ? -size : size;
}
constexpr int kept_bits = 13;  // of fraction, of the largest of the terms of a sum; see `arithmetic.Multiplier`

// The sum of the terms, each cut off to the bits that are kept.
inline float aligned_sum(const double* terms, int count) {
  int largest = -1000;
  for (int i = 0; i < count; ++i) {
    if (std::isnan(terms[i])) return NAN;
    if (terms[i] != 0) largest = std::max(largest, std::ilogb(terms[i]));
  }
  double sum = 0;
  for (int i = 0; i < count; ++i) sum += std::ldexp(std::trunc(std::ldexp(terms[i], kept_bits - largest)), largest - kept_bits);
  return float(sum);
}
template <bool first, int columns, int pitch>
void product_e4m3(float* c, const void* a, int a_leading, const void* b, int b_leading) {
  const size_t top = size_t(threadIdx.x) / 32 % 4 * 16;  // this warp's first row
  emulator::warp_operation(-1, 0xffffffffu, c, [=](void* lanes[32]) {
    std::vector<float*> all;
    for (int i = 0; i < 32; ++i) all.push_back(static_cast<float*>(lanes[i]));
    emulator::later([=] {
      double rows[16][32], column[32], terms[33];
      for (int row = 0; row < 16; ++row)
        for (int i = 0; i < 32; ++i) rows[row][i] = e4m3_value(word_of(a, a_leading, top + row, i / 4, 16) >> 8 * (i % 4) & 255);
      for (int col = 0; col < columns; ++col) {
        for (int i = 0; i < 32; ++i) column[i] = e4m3_value(word_of(b, b_leading, col, i / 4, pitch) >> 8 * (i % 4) & 255);
        for (int row = 0; row < 16; ++row) {
          float& held = all[row % 8 * 4 + col % 8 / 2][col / 8 * 4 + row / 8 * 2 + col % 2];
          for (int i = 0; i < 32; ++i) terms[i] = rows[row][i] * column[i];
          terms[32] = first ? 0 : held;
          held = aligned_sum(terms, 33);
        }
      }
    });
  });
}
template <int columns, int pitch>
void wgmma_shared_e4m3(float* c, const void* a, int a_leading, const void* b, int b_leading) {
  product_e4m3<false, columns, pitch>(c, a, a_leading, b, b_leading);
}
template <int columns, int pitch>
void wgmma_first_e4m3(float* c, const void* a, int a_leading, const void* b, int b_leading) {
  product_e4m3<true, columns, pitch>(c, a, a_leading, b, b_leading);
}

#endif

// Adds `count` accumulators of finished products to float32 sums.
template <int count>
__device__ __forceinline__ void take_over(float* sums, const float* products) {
#pragma unroll
  for (int i = 0; i < count; ++i) sums[i] += products[i];
}

}  // namespace im2win
