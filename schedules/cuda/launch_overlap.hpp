// Waits until every kernel before this one in the stream has completed and its writes are visible, then lets the next one begin to launch.

namespace im2win {

#ifndef IM2WIN_EMULATOR
__device__ __forceinline__ void after_predecessors() {
  asm volatile("griddepcontrol.wait;\ngriddepcontrol.launch_dependents;" ::: "memory");
}
#else
inline void after_predecessors() {}  // launches of the emulator follow one another
#endif

}  // namespace im2win
