// Products of 16 rows by 16 columns with operands in lines along the sum: `ldmatrix` from shared memory, and two `mma.sync`.
//
// A lane holds four words of either operand. Of rows these are the words of `product_*`; of columns they are the two words of columns 0 to 7,
// then those of columns 8 to 15.

// TVM writes a vector of 16 int8 as an int4 of its elements.
__device__ __forceinline__ int4 make_int4(
    signed char b0, signed char b1, signed char b2, signed char b3, signed char b4, signed char b5, signed char b6, signed char b7,
    signed char b8, signed char b9, signed char b10, signed char b11, signed char b12, signed char b13, signed char b14, signed char b15) {
  const auto word = [](signed char first, signed char second, signed char third, signed char fourth) {
    return static_cast<int>((first & 0xff) | (second & 0xff) << 8 | (third & 0xff) << 16 | static_cast<unsigned>(fourth & 0xff) << 24);
  };
  return make_int4(word(b0, b1, b2, b3), word(b4, b5, b6, b7), word(b8, b9, b10, b11), word(b12, b13, b14, b15));
}

namespace im2win {

// Loads four matrices of 8 lines by 16 bytes. Lane 8*m + l passes the address of line l of matrix m, and gets word t of line g of every
// matrix, where its number is 4*g + t. All lanes of a warp must call it. Returns the first element: TVM learns from a store which elements of
// a warp's registers a lane has.
template <typename T>
__device__ __forceinline__ T load_matrices(T* to, const T* from) {
  unsigned* words = reinterpret_cast<unsigned*>(to);
#ifndef IM2WIN_EMULATOR
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3]) : "r"(shared_address(from)) : "memory");
#else
  if (reinterpret_cast<uintptr_t>(from) % 16) emulator::fail("ldmatrix from an address that is not aligned to 16 bytes");
  struct Lane {
    unsigned* words;
    const void* from;
  } lane{words, from};
  emulator::warp_operation(-5, 0xffffffffu, &lane, [](void* lanes[32]) {
    for (int own = 0; own < 32; ++own)
      for (int matrix = 0; matrix < 4; ++matrix) {
        const void* line = static_cast<Lane*>(lanes[matrix * 8 + own / 4])->from;
        std::memcpy(static_cast<Lane*>(lanes[own])->words + matrix, static_cast<const char*>(line) + own % 4 * 4, 4);
      }
  });
#endif
  return *to;
}

__device__ __forceinline__ void product_lines_f16(float* c, const void* a, const void* b) {
  const unsigned *rows = static_cast<const unsigned*>(a), *columns = static_cast<const unsigned*>(b);
  product_f16(c, rows, columns);
  product_f16(c + 4, rows, columns + 2);
}
__device__ __forceinline__ void product_lines_bf16(float* c, const void* a, const void* b) {
  const unsigned *rows = static_cast<const unsigned*>(a), *columns = static_cast<const unsigned*>(b);
  product_bf16(c, rows, columns);
  product_bf16(c + 4, rows, columns + 2);
}
__device__ __forceinline__ void product_lines_s8(int* c, const void* a, const void* b) {
  const unsigned *rows = static_cast<const unsigned*>(a), *columns = static_cast<const unsigned*>(b);
  product_s8(c, rows, columns);
  product_s8(c + 4, rows, columns + 2);
}

}  // namespace im2win
