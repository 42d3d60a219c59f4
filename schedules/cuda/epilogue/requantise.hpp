// What kernels call whose int8 sums become outputs of another type: operations on float32 that are rounded by themselves, to nearest even,
// and never contracted to one; and stores of int8.

namespace im2win {

__device__ __forceinline__ float scaled(int sum, float scale) { return __fmul_rn(__int2float_rn(sum), scale); }
__device__ __forceinline__ float added(float value, float residual) { return __fadd_rn(value, residual); }

// A value as int8 in the lowest byte, rounded to nearest even, saturated. Behind 1.5 * 2^23, a float32's last place is 1: the sum's low bits are
// the integer, in two's complement.
__device__ __forceinline__ unsigned int8_bits(float value) {
  return __float_as_uint(__fadd_rn(fminf(fmaxf(value, -128.0f), 127.0f), 12582912.0f));
}
__device__ __forceinline__ unsigned two_int8(float first, float second) { return __byte_perm(int8_bits(first), int8_bits(second), 0x0040); }
__device__ __forceinline__ unsigned four_int8(const float* values) {
  return __byte_perm(two_int8(values[0], values[1]), two_int8(values[2], values[3]), 0x5410);
}

// `count` neighbouring outputs, aligned to their number.
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

// Two lanes of a warp whose numbers differ in `bit` hold four neighbours of two windows, two of either each: the lower lane gets the first
// window's four, the upper one the second's. first, second: this lane's two of either window, in the low bytes. All lanes must come here.
template <int bit>
__device__ __forceinline__ unsigned exchanged(unsigned first, unsigned second) {
  const bool upper = threadIdx.x & bit;
  const unsigned other = __shfl_xor_sync(0xffffffffu, upper ? first : second, bit);
  return upper ? __byte_perm(other, second, 0x5410) : __byte_perm(first, other, 0x5410);
}

}  // namespace im2win
