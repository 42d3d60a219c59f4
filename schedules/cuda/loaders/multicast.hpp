// Thread blocks of a cluster, which reach each other's shared memory: a copy of filters that all of them need is read once.

namespace im2win {

#ifndef IM2WIN_EMULATOR

__device__ __forceinline__ unsigned cluster_rank() {
  unsigned rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
// Waits for all threads of the cluster, and for the barriers that they started; for nothing else that they wrote.
__device__ __forceinline__ void cluster_barrier() {
  asm volatile("barrier.cluster.arrive.relaxed;\nbarrier.cluster.wait.acquire;" ::: "memory");
}
// A barrier in shared memory that every block of the cluster arrives at once a phase.
template <int blocks>
__device__ __forceinline__ void start_releases(void* releases) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\nfence.mbarrier_init.release.cluster;" ::"r"(shared_address(releases)), "n"(blocks)
               : "memory");
}
// Arrives there in every block. What was read is in registers by then, and nothing was written: so no fence for the whole GPU, which a release
// to the cluster would be, and which would wait for all copies under way.
template <int blocks>
__device__ __forceinline__ void release(void* releases) {
  for (int rank = 0; rank < blocks; ++rank)
    asm volatile("{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\nmbarrier.arrive.shared::cluster.b64 _, [there];\n}" ::"r"(
                     shared_address(releases)),
                 "r"(rank)
                 : "memory");
}
__device__ __forceinline__ void wait_releases(void* releases, int phase) {
  unsigned done;
  do {
    asm volatile("{\n.reg .pred done;\nmbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\nselp.u32 %0, 1, 0, done;\n}"
                 : "=r"(done) : "r"(shared_address(releases)), "r"(phase) : "memory");
  } while (!done);
}
// Expects `bytes`, and copies this block's part of them to the same place in every block; what counts it there lies at the same place, too.
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
void start_releases(void* releases) { emulator::start_releases(releases, blocks); }
template <int blocks>
void release(void* releases) { emulator::release(releases); }
inline void wait_releases(void* releases, int phase) { emulator::wait_releases(releases, phase); }
template <int blocks>
void copy_shared(void* to, const void* from, int bytes, void* phases) {
  const int part = bytes / blocks, first = int(emulator::cluster_rank()) * part;
  if (bytes % (16 * blocks) || reinterpret_cast<uintptr_t>(to) % 16 || reinterpret_cast<uintptr_t>(from) % 16)
    emulator::fail("a shared copy whose parts are not aligned to 16 bytes");
  emulator::copy_shared(static_cast<char*>(to) + first, static_cast<const char*>(from) + first, size_t(part), size_t(bytes), phases);
}

#endif

}  // namespace im2win
