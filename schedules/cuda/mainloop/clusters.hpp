// Thread-block clusters, whose blocks can access each other's shared memory.

namespace im2win {

#ifndef IM2WIN_EMULATOR

__device__ __forceinline__ unsigned cluster_rank() {
  unsigned rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
// Waits for all threads of the cluster, and makes their initialised barriers visible. It orders no other stores.
__device__ __forceinline__ void cluster_barrier() {
  asm volatile("barrier.cluster.arrive.relaxed;\nbarrier.cluster.wait.acquire;" ::: "memory");
}
// Expects `bytes` in this phase, and copies this block's part of them to the same address in every block of the cluster. The full barrier
// at the same address counts it there.
template <int blocks>
__device__ __forceinline__ void copy_shared(void* to, const void* from, int bytes, void* phases) {
  const int part = bytes / blocks, first = static_cast<int>(cluster_rank()) * part;
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(phases)), "r"(bytes) : "memory");
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], %4;" ::"r"(
                   shared_address(to) + first),
               "l"(static_cast<const char*>(from) + first), "r"(part), "r"(shared_address(phases)),
               "h"(static_cast<unsigned short>((1 << blocks) - 1)) : "memory");
}

#else

inline void cluster_barrier() { emulator::cluster_barrier(); }
template <int blocks>
void copy_shared(void* to, const void* from, int bytes, void* phases) {
  const int part = bytes / blocks, first = int(emulator::cluster_rank()) * part;
  if (bytes % (16 * blocks) || reinterpret_cast<uintptr_t>(to) % 16 || reinterpret_cast<uintptr_t>(from) % 16)
    emulator::fail("a shared copy whose parts are not aligned to 16 bytes");
  emulator::copy_shared(static_cast<char*>(to) + first, static_cast<const char*>(from) + first, size_t(part), size_t(bytes), phases);
}

#endif

}  // namespace im2win
