// Launches kernels that may begin before the kernel before them in the stream has completed, for which they wait themselves.

namespace {
namespace im2win_launching {

template <typename Kernel>
cudaError_t launch_with_overlap(Kernel* kernel, dim3 grid, dim3 block, void** arguments, std::size_t shared, cudaStream_t stream) {
#ifdef IM2WIN_EMULATOR
  return cudaLaunchKernel(kernel, grid, block, arguments, shared, stream);
#else
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid, config.blockDim = block, config.dynamicSmemBytes = shared, config.stream = stream;
  config.attrs = &attribute, config.numAttrs = 1;
  return cudaLaunchKernelExC(&config, reinterpret_cast<const void*>(kernel), arguments);
#endif
}

}  // namespace im2win_launching
}  // namespace
