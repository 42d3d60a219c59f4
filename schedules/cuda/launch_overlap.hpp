// What kernels execute that may begin before the kernel before them in the stream has completed.

namespace im2win {

#ifndef IM2WIN_EMULATOR
// Fetches a TMA descriptor ahead of its first use. It is a parameter of the kernel, which no other kernel writes.
template <typename Map>
__device__ __forceinline__ void prefetch_map(const Map* map) {
  if (threadIdx.x == 0) asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
// Waits until every kernel before this one in the stream has completed and its writes are visible, then lets the next one begin to launch.
__device__ __forceinline__ void after_predecessors() {
  asm volatile("griddepcontrol.wait;\ngriddepcontrol.launch_dependents;" ::: "memory");
}
#else
template <typename Map>
void prefetch_map(const Map*) {}
inline void after_predecessors() {}  // launches of the emulator follow one another
#endif

}  // namespace im2win
