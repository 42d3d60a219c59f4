// Epilogue of float8_e4m3fn layers: the scale of float32 sums, and conversions from and to float8_e4m3fn, of which kernels see the bytes.

namespace im2win {

__device__ __forceinline__ float multiplied(float value, float scale) { return __fmul_rn(value, scale); }

#ifndef IM2WIN_EMULATOR

__device__ __forceinline__ float float8_value(signed char stored) {
  float value;
  asm("{\n.reg .b16 low, high;\n.reg .b32 both;\ncvt.rn.f16x2.e4m3x2 both, %1;\nmov.b32 {low, high}, both;\ncvt.f32.f16 %0, low;\n}"
      : "=f"(value) : "h"(static_cast<unsigned short>(static_cast<unsigned char>(stored))));
  return value;
}
// Two values as float8_e4m3fn in the low bytes, the first one lowest: rounded to nearest even and saturated; NaN stays NaN.
__device__ __forceinline__ unsigned two_float8(float first, float second) {
  unsigned short both;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(both) : "f"(second), "f"(first));
  return both;
}

#else

inline float float8_value(signed char stored) {
  const int exponent = stored >> 3 & 15, fraction = stored & 7;
  if ((stored & 127) == 127) return NAN;
  const float size = exponent ? std::ldexp(8.0f + fraction, exponent - 10) : std::ldexp(float(fraction), -9);
  return stored & 128 ? -size : size;
}
inline unsigned float8_bits(float value) {
  const unsigned sign = std::signbit(value) ? 128 : 0;
  if (std::isnan(value)) return 127;
  const float size = std::min(std::fabs(value), 448.0f);
  const int place = size < std::ldexp(1.0f, -6) ? -9 : std::ilogb(size) - 3;  // exponent of the last place
  const unsigned units = unsigned(std::nearbyint(std::ldexp(size, -place)));
  return sign | std::min(units + 8 * unsigned(place + 9), 126u);
}
inline unsigned two_float8(float first, float second) { return float8_bits(first) | float8_bits(second) << 8; }

#endif

__device__ __forceinline__ unsigned four_float8(const float* values) {
  return __byte_perm(two_float8(values[0], values[1]), two_float8(values[2], values[3]), 0x5410);
}

// Stores `count` neighbouring outputs; the address is a multiple of `count`.
template <int count>
__device__ __forceinline__ void store_float8(signed char* to, const float* values) {
  if constexpr (count == 1)
    *to = static_cast<signed char>(two_float8(values[0], 0.0f));
  else if constexpr (count == 2)
    *reinterpret_cast<unsigned short*>(to) = static_cast<unsigned short>(two_float8(values[0], values[1]));
  else if constexpr (count == 4)
    *reinterpret_cast<unsigned*>(to) = four_float8(values);
  else if constexpr (count == 8)
    *reinterpret_cast<uint2*>(to) = make_uint2(four_float8(values), four_float8(values + 4));
  else
    *reinterpret_cast<uint4*>(to) =
        make_uint4(four_float8(values), four_float8(values + 4), four_float8(values + 8), four_float8(values + 12));
}

}  // namespace im2win
