// Calls TVM's functions through its C interface, on PyTorch's current stream.
#pragma once

#include <tvm/ffi/extra/c_env_api.h>

#include <c10/util/Exception.h>
#include <c10/util/SmallVector.h>

#include <memory>
#include <string>

namespace im2win {

using Object = std::shared_ptr<void>;

inline Object object_of(int64_t handle) {
  auto* object = reinterpret_cast<TVMFFIObjectHandle>(handle);
  if (!object) return nullptr;
  TVMFFIObjectIncRef(object);
  return Object(object, [](void* one) { TVMFFIObjectDecRef(one); });
}

using Arguments = c10::SmallVector<TVMFFIAny, 8>;

inline TVMFFIAny argument(DLTensor& tensor) {
  TVMFFIAny any{};
  any.type_index = kTVMFFIDLTensorPtr;
  any.v_ptr = &tensor;
  return any;
}

[[noreturn]] inline void raise_error() {
  TVMFFIObjectHandle raised = nullptr;
  TVMFFIErrorMoveFromRaised(&raised);
  TORCH_CHECK(raised, "a kernel failed and did not say why");
  const Object error(raised, [](void* one) { TVMFFIObjectDecRef(one); });
  const TVMFFIByteArray message = TVMFFIErrorGetCellPtr(raised)->message;
  TORCH_CHECK(false, std::string(message.data, message.size));
}

inline void run_function(const Object& function, Arguments& arguments) {
  TVMFFIAny result{};
  if (TVMFFIFunctionCall(function.get(), arguments.data(), static_cast<int32_t>(arguments.size()), &result)) raise_error();
}

inline const DLPackExchangeAPI* exchange = nullptr;  // of PyTorch, which gives its current streams

// While it exists, TVM launches this thread's kernels on PyTorch's current stream of the device.
class CurrentStream {
 public:
  explicit CurrentStream(DLDevice device) : device_(device) {
    if (device_.device_type == kDLCPU) return;
    TORCH_CHECK(exchange && !exchange->current_work_stream(device_.device_type, device_.device_id, &stream_), "no current stream");
    if (TVMFFIEnvSetStream(device_.device_type, device_.device_id, stream_, &before_)) raise_error();
  }
  ~CurrentStream() {
    if (before_ != stream_) TVMFFIEnvSetStream(device_.device_type, device_.device_id, before_, nullptr);
  }
  CurrentStream(const CurrentStream&) = delete;
  CurrentStream& operator=(const CurrentStream&) = delete;

 private:
  DLDevice device_;
  void* stream_ = nullptr;
  void* before_ = nullptr;
};

}  // namespace im2win
