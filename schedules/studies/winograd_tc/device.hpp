// A tile of int8 in the form of F(2x2, 3x3), four channels at a time: their transforms are whole numbers of at most 512, which halves hold.

namespace im2win {

// Of two words of two halves each: sum, difference, product and sum rounded once, the smaller ones; and bytes of both by number, a nibble each.
#ifndef IM2WIN_EMULATOR
__device__ __forceinline__ unsigned halves_sum(unsigned a, unsigned b) {
  unsigned to;
  asm("add.rn.f16x2 %0, %1, %2;" : "=r"(to) : "r"(a), "r"(b));
  return to;
}
__device__ __forceinline__ unsigned halves_difference(unsigned a, unsigned b) {
  unsigned to;
  asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(to) : "r"(a), "r"(b));
  return to;
}
__device__ __forceinline__ unsigned halves_fused(unsigned a, unsigned b, unsigned c) {
  unsigned to;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(to) : "r"(a), "r"(b), "r"(c));
  return to;
}
__device__ __forceinline__ unsigned halves_least(unsigned a, unsigned b) {
  unsigned to;
  asm("min.f16x2 %0, %1, %2;" : "=r"(to) : "r"(a), "r"(b));
  return to;
}
__device__ __forceinline__ unsigned bytes_of(unsigned a, unsigned b, unsigned numbers) { return __byte_perm(a, b, numbers); }
#else
template <typename Operation>
unsigned each_half(unsigned a, unsigned b, unsigned c, Operation operation) {
  unsigned to = 0;
  for (int place = 0; place < 32; place += 16) {
    half x, y, z;
    x.bits = uint16_t(a >> place), y.bits = uint16_t(b >> place), z.bits = uint16_t(c >> place);
    to |= unsigned(half(operation(float(x), float(y), float(z))).bits) << place;
  }
  return to;
}
inline unsigned halves_sum(unsigned a, unsigned b) {
  return each_half(a, b, 0, [](float x, float y, float) { return x + y; });
}
inline unsigned halves_difference(unsigned a, unsigned b) {
  return each_half(a, b, 0, [](float x, float y, float) { return x - y; });
}
inline unsigned halves_fused(unsigned a, unsigned b, unsigned c) {  // small numbers, of which a float rounds none
  return each_half(a, b, c, [](float x, float y, float z) { return x * y + z; });
}
inline unsigned halves_least(unsigned a, unsigned b) {
  return each_half(a, b, 0, [](float x, float y, float) { return std::min(x, y); });
}
inline unsigned bytes_of(unsigned a, unsigned b, unsigned numbers) {
  const unsigned long long both = static_cast<unsigned long long>(b) << 32 | a;
  unsigned to = 0;
  for (int i = 0; i < 4; ++i) to |= static_cast<unsigned>(both >> 8 * (numbers >> 4 * i & 7) & 255) << 8 * i;
  return to;
}
#endif

// Two of the four channels, of one row or column: B^T d. A sum of two inputs that are both 1024 + 128 too large takes `excess` away first.
__device__ __forceinline__ void transform_four(unsigned* to, const unsigned* d, unsigned excess) {
  to[0] = halves_difference(d[2], d[0]);
  to[1] = halves_sum(halves_difference(d[1], excess), d[2]);
  to[2] = halves_difference(d[2], d[1]);
  to[3] = halves_difference(d[3], d[1]);
}

// [4][4] words of four channels to as many of B^T d B / 4, to the nearest, ties to even, at most 127.
__device__ __forceinline__ void quantised_tile(int* to, const int* from) {
  unsigned found[2][16];
#pragma unroll
  for (int pair = 0; pair < 2; ++pair) {
    unsigned half_way[16];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      unsigned d[4], row[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)  // a byte of 128 more, behind the bits of 1024: a half
        d[i] = bytes_of(static_cast<unsigned>(from[i * 4 + j]) ^ 0x80808080u, 0x64646464u, pair ? 0x4342u : 0x4140u);
      transform_four(row, d, 0x68806880u);  // 2304
#pragma unroll
      for (int i = 0; i < 4; ++i) half_way[i * 4 + j] = row[i];
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      unsigned all[4];
      transform_four(all, half_way + i * 4, 0);
#pragma unroll
      for (int j = 0; j < 4; ++j)  // 1536 and more has units of one: the product with 1/4 is rounded to them, and they are the lowest byte
        found[pair][i * 4 + j] = halves_least(halves_fused(all[j], 0x34003400u, 0x66006600u), 0x667f667fu);
    }
  }
#pragma unroll
  for (int i = 0; i < 16; ++i) to[i] = static_cast<int>(bytes_of(found[0][i], found[1][i], 0x6420u));
}

}  // namespace im2win
