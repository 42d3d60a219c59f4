// Requantisation of int32 accumulators of int8 products: float32 operations that are each rounded to nearest even and never contracted to a
// fused multiply-add, and stores of int8.

namespace im2win {

__device__ __forceinline__ float scaled(int sum, float scale) { return __fmul_rn(__int2float_rn(sum), scale); }
__device__ __forceinline__ float added(float value, float residual) { return __fadd_rn(value, residual); }

// A value as int8 in the lowest byte, rounded to nearest even and saturated. Added to 1.5 * 2^23, whose last place is 1, it leaves the
// integer in the low bits, in two's complement.
__device__ __forceinline__ unsigned int8_bits(float value) {
  return __float_as_uint(__fadd_rn(fminf(fmaxf(value, -128.0f), 127.0f), 12582912.0f));
}
__device__ __forceinline__ unsigned two_int8(float first, float second) { return __byte_perm(int8_bits(first), int8_bits(second), 0x0040); }
__device__ __forceinline__ unsigned four_int8(const float* values) {
  return __byte_perm(two_int8(values[0], values[1]), two_int8(values[2], values[3]), 0x5410);
}

// Stores `count` neighbouring outputs; the address is a multiple of `count`.
template <int count>
__device__ __forceinline__ void store_int8(signed char* to, const float* values) {
  if constexpr (count == 1)
    *to = static_cast<signed char>(int8_bits(values[0]));
  else if constexpr (count == 2)
    *reinterpret_cast<unsigned short*>(to) = static_cast<unsigned short>(two_int8(values[0], values[1]));
  else if constexpr (count == 4)
    *reinterpret_cast<unsigned*>(to) = four_int8(values);
  else if constexpr (count == 8)
    *reinterpret_cast<uint2*>(to) = make_uint2(four_int8(values), four_int8(values + 4));
  else
    *reinterpret_cast<uint4*>(to) = make_uint4(four_int8(values), four_int8(values + 4), four_int8(values + 8), four_int8(values + 12));
}

__device__ __forceinline__ void store_word(signed char* to, unsigned word) { *reinterpret_cast<unsigned*>(to) = word; }

// Lane exchange. Two lanes whose numbers differ in `bit` hold two of four neighbours each, of two windows. The lower lane gets the first
// window's four, the upper lane the second's. first, second: this lane's two of either window, in the low bytes. All lanes of a warp must
// call it.
template <int bit>
__device__ __forceinline__ unsigned exchanged(unsigned first, unsigned second) {
  const bool upper = threadIdx.x & bit;
  const unsigned other = __shfl_xor_sync(0xffffffffu, upper ? first : second, bit);
  return upper ? __byte_perm(other, second, 0x5410) : __byte_perm(first, other, 0x5410);
}

}  // namespace im2win
