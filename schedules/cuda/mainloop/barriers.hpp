// Full and empty barriers of pipeline stages in shared memory, multicast TMA boxes, and other device functions of warp-specialized kernels.

namespace im2win {

#ifndef IM2WIN_EMULATOR

// Initialises an empty barrier that counts `arrivals` in a phase.
template <int arrivals>
__device__ __forceinline__ void init_empty_barrier(void* barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\nfence.mbarrier_init.release.cluster;" ::"r"(shared_address(barrier)), "n"(arrivals)
               : "memory");
}
// A warp arrives at an empty barrier, in every block of a cluster of `blocks`. Its products have read the stage by then and nothing was
// written, so the scope of the block is enough: with the scope of the cluster the arrival would be a fence for the whole GPU
// (MEMBAR.ALL.GPU).
template <int blocks>
__device__ __forceinline__ void arrive_empty_barrier(void* barrier) {
  const unsigned lane = threadIdx.x % 32;
  if constexpr (blocks == 1) {
    if (lane == 0) asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
  } else {
    if (lane < blocks)
      asm volatile("{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\nmbarrier.arrive.shared::cluster.b64 _, [there];\n}" ::"r"(
                       shared_address(barrier)), "r"(lane) : "memory");
  }
}
// Waits until all have arrived in the phase before this one. The first phase has none before it and does not wait.
__device__ __forceinline__ void wait_empty_barrier(void* barrier, int phase) {
  unsigned done;
  do {
    asm volatile("{\n.reg .pred done;\nmbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\nselp.u32 %0, 1, 0, done;\n}"
                 : "=r"(done) : "r"(shared_address(barrier)), "r"(phase) : "memory");
  } while (!done);
}

// Copies a TMA box, see `copy_box`, to the same address in every block of a cluster. The full barrier at the same address counts it there.
template <int blocks>
__device__ __forceinline__ void copy_shared(void* to, unsigned long long map, int a, int b, int c, int d, void* phases) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(shared_address(to)), "l"(map), "r"(a), "r"(b), "r"(c), "r"(d),
      "r"(shared_address(phases)), "h"(static_cast<unsigned short>((1 << blocks) - 1)) : "memory");
}

__device__ __forceinline__ unsigned bits(float value) { return __float_as_uint(value); }
__device__ __forceinline__ unsigned bits(int value) { return value; }
// Sends a thread's four accumulators to the same address in block `rank` of a cluster. The full barrier at the same address counts them
// there.
template <int blocks, typename Sum>
__device__ __forceinline__ void send_four(Sum* to, const Sum* sums, int rank, void* phases) {
  asm volatile(
      "{\n.reg .b32 there, landed;\nmapa.shared::cluster.u32 there, %0, %2;\nmapa.shared::cluster.u32 landed, %1, %2;\n"
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [there], {%3, %4, %5, %6}, [landed];\n}" ::"r"(shared_address(to)),
      "r"(shared_address(phases)), "r"(rank), "r"(bits(sums[0])), "r"(bits(sums[1])), "r"(bits(sums[2])), "r"(bits(sums[3])) : "memory");
}

// Waits for all `wgmma`, on every path: otherwise the assembler, which analyses the loops around it, inserts a wait behind each of them.
// The condition behind the wait always holds and begins another basic block: see `finish_products`.
__device__ __forceinline__ void end_products() {
  wait_products<0>();
  unsigned depth;
  do {
    asm volatile("mov.u32 %0, %%nctaid.z;" : "=r"(depth));
  } while (!depth);
}

// Where TMA boxes with a swizzle of 128 bytes have the 16 bytes of an address; see `copy_box`.
__device__ __forceinline__ unsigned swizzled(const void* at) {
  const unsigned address = shared_address(at);
  return address ^ (address >> 3 & 0x70);
}

// The same for a swizzle of 64 bytes.
__device__ __forceinline__ unsigned swizzled_short(const void* at) {
  const unsigned address = shared_address(at);
  return address ^ (address >> 3 & 0x30);
}

// Four matrices of eight rows of eight two-byte elements; lane 8 * m + r gives the address of row r of matrix m.
struct Matrices {
  unsigned words[4];
  __device__ __forceinline__ void load_transposed(const void* row) { load_transposed(shared_address(row)); }
  __device__ __forceinline__ void load_transposed(unsigned row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]),
                 "=r"(words[3]) : "r"(row) : "memory");
  }
  __device__ __forceinline__ void store(void* row) const {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(row)), "r"(words[0]), "r"(words[1]),
                 "r"(words[2]), "r"(words[3]) : "memory");
  }
};

// Sets the registers of a warpgroup's threads: producers give registers back, consumers take them.
template <int registers>
__device__ __forceinline__ void give_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers)); }
template <int registers>
__device__ __forceinline__ void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers)); }

#else

inline const void* swizzled(const void* at) {
  const auto address = reinterpret_cast<uintptr_t>(at);
  return reinterpret_cast<const void*>(address ^ (address >> 3 & 0x70));
}

inline const void* swizzled_short(const void* at) {
  const auto address = reinterpret_cast<uintptr_t>(at);
  return reinterpret_cast<const void*>(address ^ (address >> 3 & 0x30));
}

struct Matrices {
  unsigned short column[8];  // of the lane's matrix, the elements at the position of the lane among eight
  void load_transposed(const void* row) {
    struct Argument {
      const unsigned short* row;
      unsigned short* column;
    } argument{static_cast<const unsigned short*>(row), column};
    if (reinterpret_cast<uintptr_t>(row) % 16) emulator::fail("a row of a matrix that is not aligned to 16 bytes");
    emulator::warp_operation(-1, 0xffffffffu, &argument, [](void* lanes[32]) {
      for (int lane = 0; lane < 32; ++lane)
        for (int i = 0; i < 8; ++i)
          static_cast<Argument*>(lanes[lane])->column[i] = static_cast<Argument*>(lanes[lane / 8 * 8 + i])->row[lane % 8];
    });
  }
  void store(void* row) const {
    if (reinterpret_cast<uintptr_t>(row) % 16) emulator::fail("a row of a matrix that is not aligned to 16 bytes");
    for (int i = 0; i < 8; ++i) static_cast<unsigned short*>(row)[i] = column[i];
    emulator::stored(row);
  }
};

template <int registers>
void give_registers() {}
template <int registers>
void take_registers() {}
template <int arrivals>
void init_empty_barrier(void* barrier) { emulator::init_empty_barrier(barrier, arrivals); }
template <int blocks>
void arrive_empty_barrier(void* barrier) {
  if (threadIdx.x % 32 == 0) blocks == 1 ? emulator::arrive(barrier) : emulator::arrive_cluster(barrier);
}
inline void end_products() { emulator::wait_products(0); }
inline void wait_empty_barrier(void* barrier, int phase) { emulator::wait_empty_barrier(barrier, phase); }
template <int blocks>
void copy_shared(void* to, unsigned long long map, int a, int b, int c, int d, void* phases) {
  emulator::copy_box_shared(to, *reinterpret_cast<const CUtensorMap*>(map), {a, b, c, d}, phases);
}

template <int blocks, typename Sum>
void send_four(Sum* to, const Sum* sums, int rank, void* phases) {
  emulator::send_shared(to, sums, 4 * sizeof(Sum), size_t(rank), phases);
}

#endif

// Adds four accumulators that another block sent.
template <typename Sum>
__device__ __forceinline__ void add_four(Sum* sums, const Sum* sent) {
  struct alignas(16) Four {
    Sum of[4];
  };
  const Four four = *reinterpret_cast<const Four*>(sent);
  for (int i = 0; i < 4; ++i) sums[i] += four.of[i];
}

__device__ __forceinline__ void warp_barrier() { __syncwarp(); }

// Marks a kernel of which `blocks` share a multiprocessor; `with_residents` writes the number into its launch bounds.
template <int blocks>
__device__ __forceinline__ void share_multiprocessor() {}

// Rearranges a step with channels first, or this warp's part of it where several `warps` do. Eight pixels of eight channels are a matrix,
// which is transposed on its way through registers (`ldmatrix`, `stmatrix`), four at once; a warp takes eight such fours at a time, of 32
// channels each.
//
// stage: 16 bytes of every pixel side by side, those of the next channels `unit` bytes behind them.
// raw: lines of 64 pixels of each channel. quads: runs of 32 channels. count: eights of pixels.
// places: for each pixel where its eight lies in the raw boxes, and where it goes in the stage; see `RawBoxes.table`.
template <int warps, int quads, int count>
__device__ __forceinline__ void rearrange_lines(void* stage, const void* raw, const int* places, int unit, int warp) {
  const int lane = threadIdx.x % 32;  // reads the line of this channel; eight lanes for each matrix
  char* const to = static_cast<char*>(stage) + lane / 8 * unit;
  const char* const from = static_cast<const char*>(raw) + lane * 128;
  constexpr int many = 8 / quads;
#pragma unroll 1
  for (int first = warp * many; first < count; first += warps * many) {
    int place[many];
    Matrices matrices[8];
    for (int i = 0; i < many; ++i) place[i] = places[(first + i) * 8 + lane % 8];
    for (int i = 0; i < 8; ++i) matrices[i].load_transposed(swizzled(from + (place[i / quads] >> 16) * 16 + i % quads * 4096));
    for (int i = 0; i < 8; ++i) matrices[i].store(to + (place[i / quads] & 0xffff) * 16 + i % quads * 4 * unit);
  }
}
// The same from lines of 32 pixels of each channel.
template <int warps, int quads, int count>
__device__ __forceinline__ void rearrange_short_lines(void* stage, const void* raw, const int* places, int unit, int warp) {
  const int lane = threadIdx.x % 32;
  char* const to = static_cast<char*>(stage) + lane / 8 * unit;
  const char* const from = static_cast<const char*>(raw) + lane * 64;
  constexpr int many = 8 / quads;
#pragma unroll 1
  for (int first = warp * many; first < count; first += warps * many) {
    int place[many];
    Matrices matrices[8];
    for (int i = 0; i < many; ++i) place[i] = places[(first + i) * 8 + lane % 8];
    for (int i = 0; i < 8; ++i) matrices[i].load_transposed(swizzled_short(from + (place[i / quads] >> 16) * 16 + i % quads * 2048));
    for (int i = 0; i < 8; ++i) matrices[i].store(to + (place[i / quads] & 0xffff) * 16 + i % quads * 4 * unit);
  }
}
// The same from whole images of `pixels` in each channel, without gaps between channels. The channels of a matrix are `phases` apart, so
// that their eights are aligned alike; the first matrix has channel 0, the second one channel 1, and so on. Each phase has a table of `count`
// eights.
template <int warps, int quads, int phases, int count>
__device__ __forceinline__ void rearrange_images(void* stage, const void* raw, const int* places, int unit, int warp, int pixels) {
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int quad = 0; quad < quads; ++quad) {
    const int matrix = quad * 4 + lane / 8, phase = matrix % phases, channel = matrix / phases * 8 * phases + lane % 8 * phases + phase;
    char* const to = static_cast<char*>(stage) + matrix * unit;
    const char* const from = static_cast<const char*>(raw) + (channel * pixels - phase * pixels % 8) * 2;
    const int* const table = places + phase * count * 8 + lane % 8;
#pragma unroll 1
    for (int first = warp * 8; first < count; first += warps * 8) {
      int place[8];
      Matrices matrices[8];
      for (int i = 0; i < 8; ++i) place[i] = table[(first + i) * 8];
      for (int i = 0; i < 8; ++i) matrices[i].load_transposed(from + (place[i] >> 16) * 16);
      for (int i = 0; i < 8; ++i) matrices[i].store(to + (place[i] & 0xffff) * 16);
    }
  }
}

// Writes 16 bytes of zeros.
__device__ __forceinline__ void clear_chunk(void* to) {
  *static_cast<uint4*>(to) = {0, 0, 0, 0};
#ifdef IM2WIN_EMULATOR
  emulator::stored(to);
#endif
}

}  // namespace im2win
