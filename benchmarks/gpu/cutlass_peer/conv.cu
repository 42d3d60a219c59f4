// A convolution of CUTLASS for sm_90 as a shared library: float16 tensors in NHWC, filters [K, R, S, C], float32 sums, tiles of the input by TMA
// in im2col mode. One tile and one cluster for each library; nvcc defines TILE_M, TILE_N, TILE_K, CLUSTER_M and CLUSTER_N.
//
// Written against CUTLASS 4.7, whose collective builder has a single schedule for convolutions on sm_90: one producer and one consumer warp
// group, not persistent. So a thread block's accumulators, TILE_M * TILE_N float32, lie in the registers of 128 threads.

#include <cuda_runtime.h>

#include "cutlass/cutlass.h"
#include "cutlass/kernel_hardware_info.hpp"  // before the collectives, which use it without including it

#include "cute/tensor.hpp"
#include "cutlass/conv/convnd_problem_shape.hpp"
#include "cutlass/conv/device/conv_universal_adapter.hpp"
#include "cutlass/conv/kernel/conv_universal.hpp"

#include "cutlass/conv/collective/collective_builder.hpp"
#include "cutlass/epilogue/collective/collective_builder.hpp"

namespace {

using cute::_1;
using cute::Int;
using cute::Shape;
using Half = cutlass::half_t;
using Nhwc = cutlass::layout::TensorNHWC;

using Tile = Shape<Int<TILE_M>, Int<TILE_N>, Shape<Int<TILE_K>>>;
using Cluster = Shape<Int<CLUSTER_M>, Int<CLUSTER_N>, _1>;
constexpr int kAligned = 8;  // elements of 16 bytes

using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Tile, Cluster, cutlass::epilogue::collective::EpilogueTileAuto, float, float, void, Nhwc,
    kAligned, Half, Nhwc, kAligned, cutlass::epilogue::TmaWarpSpecialized>::CollectiveOp;

using Mainloop = typename cutlass::conv::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, cutlass::conv::Operator::kFprop, Half, Nhwc, kAligned, Half, Nhwc, kAligned, float, Tile,
    Cluster, cutlass::conv::collective::StageCountAutoCarveout<static_cast<int>(sizeof(typename Epilogue::SharedStorage))>,
    cutlass::conv::collective::KernelScheduleAuto>::CollectiveOp;

using Problem = cutlass::conv::ConvProblemShape<Mainloop::DispatchPolicy::ConvOp, Mainloop::DispatchPolicy::NumSpatialDimensions>;
using Kernel = cutlass::conv::kernel::ConvUniversal<Problem, Mainloop, Epilogue>;
using Conv = cutlass::conv::device::ConvUniversalAdapter<Kernel>;

}  // namespace

extern "C" {

// The sizes of a layer, in the order of the fields of `Sizes` in cutlass_peer.py.
struct Sizes {
  int batch, height, width, in_channels, out_channels, kernel_h, kernel_w;
  int pad_top, pad_left, pad_bottom, pad_right, stride_h, stride_w, dilation_h, dilation_w;
};

// Prepares a layer whose tensors are at these device addresses. Returns its handle, or null with the reason in `why`.
void *cutlass_conv_prepare(Sizes const *sizes, void const *x, void const *w, void *y, char const **why) {
  Sizes const &s = *sizes;
  Problem problem(
      cutlass::conv::Mode::kCrossCorrelation, {s.batch, s.height, s.width, s.in_channels},
      {s.out_channels, s.kernel_h, s.kernel_w, s.in_channels}, {s.pad_top, s.pad_left}, {s.pad_bottom, s.pad_right}, {s.stride_h, s.stride_w},
      {s.dilation_h, s.dilation_w}, 1);
  cutlass::KernelHardwareInfo hardware;
  cudaGetDevice(&hardware.device_id);
  hardware.sm_count = cutlass::KernelHardwareInfo::query_device_multiprocessor_count(hardware.device_id);

  typename Kernel::StrideD stride{};
  cute::for_each(cute::make_seq<cute::rank<0>(typename Kernel::StrideD{})>{}, [&](auto i) {
    cute::get<0, i>(stride) = problem.stride_C[Problem::RankT - 2 - i];
  });
  typename Conv::Arguments arguments{
      problem,
      {static_cast<Half const *>(x), static_cast<Half const *>(w)},
      {{}, nullptr, stride, static_cast<Half *>(y), stride},
      hardware,
  };
  arguments.epilogue.thread.alpha = 1.0f;
  arguments.epilogue.thread.beta = 0.0f;
  if (Conv::can_implement(arguments) != cutlass::Status::kSuccess) {
    *why = "CUTLASS cannot implement it: channels must be multiples of 8, and windows within the limits of TMA's im2col mode";
    return nullptr;
  }
  if (Conv::get_workspace_size(arguments) != 0) {
    *why = "it needs a workspace";
    return nullptr;
  }
  auto *conv = new Conv;
  if (auto status = conv->initialize(arguments); status != cutlass::Status::kSuccess) {
    *why = cutlass::cutlassGetStatusString(status);
    delete conv;
    return nullptr;
  }
  return conv;
}

// Enqueues one call on a stream. Returns null, or why it could not.
char const *cutlass_conv_run(void *conv, void *stream) {
  auto status = static_cast<Conv *>(conv)->run(static_cast<cudaStream_t>(stream));
  return status == cutlass::Status::kSuccess ? nullptr : cutlass::cutlassGetStatusString(status);
}

void cutlass_conv_free(void *conv) { delete static_cast<Conv *>(conv); }

}  // extern "C"
