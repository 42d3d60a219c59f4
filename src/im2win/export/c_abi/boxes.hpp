// TMA descriptors of tensors with four axes. CUDA's runtime provides the driver's function, so that no other library is linked.
#ifndef IM2WIN_EMULATOR
#include <cuda.h>
#endif

namespace {
namespace im2win_launching {

// The innermost axis comes first. strides: in bytes, the first one is the size of an element. swizzle: bytes of its rows, or 0.
struct Boxes {
  long long sizes[4], strides[4];
  int box[4], steps[4], swizzle;
};

inline cudaError_t encode(CUtensorMap* map, const void* tensor, const Boxes& of) {
#ifdef IM2WIN_EMULATOR
  *map = {static_cast<const char*>(tensor), int(of.strides[0]), {}, {}, {}, {}, of.swizzle};
  for (int i = 0; i < 4; ++i) map->sizes[i] = of.sizes[i], map->strides[i] = of.strides[i], map->box[i] = of.box[i], map->steps[i] = of.steps[i];
  return cudaSuccess;
#else
  using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*, const cuuint32_t*,
                              const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
  static std::atomic<void*> known;
  void* function = known.load();
  if (!function) {
    cudaDriverEntryPointQueryResult found;
    if (cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found)) return error;
    if (found != cudaDriverEntryPointSuccess) return cudaErrorNotSupported;
    known.store(function);
  }
  cuuint64_t sizes[4], strides[3];
  cuuint32_t box[4], steps[4];
  for (int i = 0; i < 4; ++i) sizes[i] = of.sizes[i], box[i] = of.box[i], steps[i] = of.steps[i];
  for (int i = 0; i < 3; ++i) strides[i] = of.strides[i + 1];
  const auto type = of.strides[0] == 1 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  const auto swizzle = of.swizzle == 128  ? CU_TENSOR_MAP_SWIZZLE_128B
                       : of.swizzle == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                                          : CU_TENSOR_MAP_SWIZZLE_NONE;
  const CUresult result = reinterpret_cast<Encode>(function)(
      map, type, 4, const_cast<void*>(tensor), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
      CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
#endif
}

}  // namespace im2win_launching
}  // namespace
