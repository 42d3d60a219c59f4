// A call of the operator: its tensors, and the key under which equal calls are remembered.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <string>
#include <vector>

namespace im2win {

using at::Tensor;
using c10::DispatchKey;
using c10::DispatchKeySet;
using Numbers = std::vector<int64_t>;

// The tensors of a call; missing ones are null.
struct Call {
  const Tensor* x = nullptr;
  const Tensor* residual = nullptr;
  c10::SmallVector<const Tensor*, 7> parameters;  // the filters first

  bool needs_grad() const {
    if (!c10::GradMode::is_enabled()) return false;
    if (x->requires_grad() || (residual && residual->requires_grad())) return true;
    for (const Tensor* one : parameters)
      if (one && one->requires_grad()) return true;
    return false;
  }

  DispatchKeySet keys() const {
    DispatchKeySet all = x->key_set();
    if (residual) all = all | residual->key_set();
    for (const Tensor* one : parameters)
      if (one) all = all | one->key_set();
    const auto local = c10::impl::tls_local_dispatch_key_set();
    return (all | local.included_) - local.excluded_;
  }
};

// A key that is equal for calls of one operator with the same layouts of inputs and the same addresses of parameters.
using Key = std::string;

template <class Value>
void append(Key& key, Value value) {
  key.append(reinterpret_cast<const char*>(&value), sizeof value);
}

inline void append_layout(Key& key, const Tensor* tensor) {
  append(key, tensor ? tensor->dim() : -1);
  if (!tensor) return;
  for (int64_t size : tensor->sizes()) append(key, size);
  for (int64_t stride : tensor->strides()) append(key, stride);
  append(key, tensor->scalar_type());
  append(key, tensor->device().type());
  append(key, tensor->device().index());
}

inline void append_tensors(Key& key, const Call& call) {
  append_layout(key, call.x);
  append_layout(key, call.residual);
  append_layout(key, call.parameters[0]);
  for (const Tensor* one : call.parameters) append(key, one ? one->const_data_ptr() : nullptr);
}

// Like the function in plain.py.
inline bool is_channels_last(const Tensor& tensor) {
  const auto size = tensor.sizes(), stride = tensor.strides();
  if (stride[1] < 1 || stride[3] < stride[1] * size[1] || (size[1] == 1 && size[2] == 1 && size[3] == 1)) return false;
  return stride[2] >= stride[3] * size[3] && stride[0] >= stride[2] * size[2];
}

// Like `Bound` in bound.py: tensors made under inference_mode have no version.
inline int64_t version_of(const Tensor& tensor) {
  return tensor.is_inference() ? -1 : static_cast<int64_t>(tensor._version());
}

}  // namespace im2win
