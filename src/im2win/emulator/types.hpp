// The scalar and vector types of CUDA, as far as generated code uses them.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#define VECTOR_TYPES(T, name)                                                    \
  struct name##1 { T x; };                                                       \
  struct alignas(2 * sizeof(T)) name##2 { T x, y; };                             \
  struct name##3 { T x, y, z; };                                                 \
  struct alignas(sizeof(T) < 8 ? 4 * sizeof(T) : 16) name##4 { T x, y, z, w; };  \
  inline name##1 make_##name##1(T x) { return {x}; }                             \
  inline name##2 make_##name##2(T x, T y) { return {x, y}; }                     \
  inline name##3 make_##name##3(T x, T y, T z) { return {x, y, z}; }             \
  inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
VECTOR_TYPES(signed char, char)
VECTOR_TYPES(unsigned char, uchar)
VECTOR_TYPES(short, short)
VECTOR_TYPES(unsigned short, ushort)
VECTOR_TYPES(int, int)
VECTOR_TYPES(unsigned int, uint)
VECTOR_TYPES(float, float)
VECTOR_TYPES(double, double)
VECTOR_TYPES(long long, longlong)
#undef VECTOR_TYPES

// The operators of a type of two bytes: arithmetic is that of float, rounded once, as on the device.
#define ARITHMETIC(T)                                                     \
  inline T operator+(T a, T b) { return T(float(a) + float(b)); }         \
  inline T operator-(T a, T b) { return T(float(a) - float(b)); }         \
  inline T operator*(T a, T b) { return T(float(a) * float(b)); }         \
  inline T operator/(T a, T b) { return T(float(a) / float(b)); }         \
  inline T operator-(T a) { return T(-float(a)); }                        \
  inline bool operator<(T a, T b) { return float(a) < float(b); }         \
  inline bool operator>(T a, T b) { return float(a) > float(b); }         \
  inline T __hmax(T a, T b) { return float(a) > float(b) ? a : b; }       \
  inline T __hmin(T a, T b) { return float(a) < float(b) ? a : b; }       \
  inline bool __hgt(T a, T b) { return float(a) > float(b); }             \
  inline bool __hlt(T a, T b) { return float(a) < float(b); }

// IEEE binary16, rounded to nearest even.
struct half {
  uint16_t bits;
  half() = default;
  half(float value) : bits(round(value)) {}
  half(double value) : half(float(value)) {}
  half(int value) : half(float(value)) {}
  operator float() const {
    const uint32_t sign = uint32_t(bits & 0x8000) << 16, exponent = bits >> 10 & 31, fraction = bits & 0x3ff;
    if (exponent == 0) return std::copysign(std::ldexp(float(fraction), -24), sign ? -1.0f : 1.0f);
    const uint32_t word = sign | (exponent == 31 ? 0xffu : exponent + 112) << 23 | fraction << 13;
    float value;
    std::memcpy(&value, &word, 4);
    return value;
  }
  half& operator+=(half other) { return *this = half(float(*this) + float(other)); }

 private:
  static uint16_t round(float value) {
    uint32_t word;
    std::memcpy(&word, &value, 4);
    const uint16_t sign = word >> 16 & 0x8000;
    const float size = std::fabs(value);
    if (std::isnan(value)) return sign | 0x7e00;
    if (size >= 65520.0f) return sign | 0x7c00;
    int exponent;
    std::frexp(size, &exponent);
    const int step = size == 0 || exponent < -13 ? -24 : exponent - 11;  // exponent of the last place
    const uint32_t units = uint32_t(std::nearbyint(std::ldexp(size, -step)));
    return sign | uint16_t(step == -24 ? units : (uint32_t(step + 24) << 10) + units);
  }
};
ARITHMETIC(half)
inline half __float2half_rn(float value) { return half(value); }
inline half __float2half(float value) { return half(value); }
inline float __half2float(half value) { return float(value); }
using __half = half;
struct alignas(4) half2 { half x, y; };
using __half2 = half2;
inline half2 __halves2half2(half x, half y) { return {x, y}; }
inline half2 make_half2(half x, half y) { return {x, y}; }

// The upper half of a float, rounded to nearest even.
struct nv_bfloat16 {
  uint16_t bits;
  nv_bfloat16() = default;
  nv_bfloat16(float value) {
    uint32_t word;
    std::memcpy(&word, &value, 4);
    bits = std::isnan(value) ? uint16_t(word >> 16 | 0x40) : uint16_t((word + 0x7fff + (word >> 16 & 1)) >> 16);
  }
  nv_bfloat16(double value) : nv_bfloat16(float(value)) {}
  nv_bfloat16(int value) : nv_bfloat16(float(value)) {}
  operator float() const {
    const uint32_t word = uint32_t(bits) << 16;
    float value;
    std::memcpy(&value, &word, 4);
    return value;
  }
  nv_bfloat16& operator+=(nv_bfloat16 other) { return *this = nv_bfloat16(float(*this) + float(other)); }
};
ARITHMETIC(nv_bfloat16)
inline nv_bfloat16 __float2bfloat16_rn(float value) { return nv_bfloat16(value); }
inline nv_bfloat16 __float2bfloat16(float value) { return nv_bfloat16(value); }
inline float __bfloat162float(nv_bfloat16 value) { return float(value); }
using __nv_bfloat16 = nv_bfloat16;
struct alignas(4) nv_bfloat162 {
  nv_bfloat16 x, y;
  nv_bfloat162() = default;
  nv_bfloat162(nv_bfloat16 x, nv_bfloat16 y) : x(x), y(y) {}
};
using __nv_bfloat162 = nv_bfloat162;
inline nv_bfloat162 __halves2bfloat162(nv_bfloat16 x, nv_bfloat16 y) { return {x, y}; }
#undef ARITHMETIC

using std::max;
using std::min;
inline float __expf(float value) { return std::exp(value); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
// No contraction: the compiler is given neither -mfma nor a GNU dialect.
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __int2float_rn(int value) { return float(value); }
inline int __float2int_rn(float value) { return int(std::nearbyint(value)); }
template <typename T>
T __ldg(const T* place) { return *place; }
inline void __threadfence() {}
inline void __threadfence_block() {}
inline int __float_as_int(float value) { int bits; std::memcpy(&bits, &value, 4); return bits; }
inline unsigned __float_as_uint(float value) { return unsigned(__float_as_int(value)); }
// Byte i of the result is the byte of {b, a} that nibble i of `selector` names, without the nibble's sign bit.
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const uint64_t bytes = uint64_t(b) << 32 | a;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) result |= unsigned(bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
  return result;
}
inline float __int_as_float(int bits) { float value; std::memcpy(&value, &bits, 4); return value; }
