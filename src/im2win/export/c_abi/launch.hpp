// Launches on the caller's stream.
#include <atomic>

namespace {
namespace im2win_launching {

constexpr std::size_t asked_shared = 48 << 10;  // bytes of dynamic shared memory from which on a kernel needs an attribute

// Sets the attribute for a kernel's shared memory, once for each device.
template <typename Kernel>
cudaError_t prepare(Kernel* kernel, std::size_t shared, std::atomic<unsigned long long>& asked) {
  int device = 0;
  if (shared < asked_shared) return cudaSuccess;
  if (cudaError_t error = cudaGetDevice(&device)) return error;
  const unsigned long long own = device < 64 ? 1ull << device : 0;
  if (own & asked.load()) return cudaSuccess;
  if (cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared))) return error;
  asked.fetch_or(own);
  return cudaSuccess;
}

struct Tensor {
  const void* address;
  std::size_t bytes;
};

// The last one is the output.
template <std::size_t count>
int check(const Tensor (&tensors)[count], bool needed, const void* workspace) {
  const Tensor& output = tensors[count - 1];
  const auto start = [](const Tensor& tensor) { return reinterpret_cast<uintptr_t>(tensor.address); };
  for (const Tensor& tensor : tensors)
    if (!tensor.address) return IM2WIN_NULL_POINTER;
  if (needed && !workspace) return IM2WIN_NULL_POINTER;
  for (const Tensor& tensor : tensors)
    if (start(tensor) % 16) return IM2WIN_MISALIGNED;
  for (const Tensor& tensor : tensors)
    if (&tensor != &output && start(tensor) < start(output) + output.bytes && start(output) < start(tensor) + tensor.bytes)
      return IM2WIN_OVERLAP;
  return IM2WIN_OK;
}

inline void* aligned(void* workspace) { return reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(workspace) + 255) / 256 * 256); }

}  // namespace im2win_launching
}  // namespace
