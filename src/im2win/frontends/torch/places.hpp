// Kernels bound to packed parameters, and the table that finds them by a call's key.
#pragma once

#include "calls.hpp"
#include "functions.hpp"

#include <ATen/ops/empty_strided_ops.h>
#include <c10/core/DeviceGuard.h>

#include <memory>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <unordered_map>
#include <utility>

namespace im2win {

// As at::empty_strided, whose header includes much more, on the device of `like`.
inline Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType type, const Tensor& like) {
  return at::_ops::empty_strided::call(c10::fromIntArrayRefSlow(sizes), c10::fromIntArrayRefSlow(strides), type,
                                       like.layout(), like.device(), std::nullopt);
}

// DLPack's code of the element types that kernels compute with; bits are counted beside it.
inline uint8_t code_of(at::ScalarType type) {
  switch (type) {
    case at::ScalarType::BFloat16: return kDLBfloat;
    case at::ScalarType::Char:
    case at::ScalarType::Int: return kDLInt;
    case at::ScalarType::Byte: return kDLUInt;
    default: return kDLFloat;
  }
}

// A contiguous tensor's sizes and strides, in memory order.
struct Shape {
  explicit Shape(Numbers given) : sizes(std::move(given)), strides(sizes.size(), 1) {
    for (size_t i = sizes.size() - 1; i > 0; --i) strides[i - 1] = strides[i] * sizes[i];
  }
  Numbers sizes, strides;
};

// A kernel with the packed parameters of one conv call site, valid while the parameters are unchanged.
class Place : public std::enable_shared_from_this<Place> {
 public:
  // product, transform, packed: handles of TVM's objects, 0 for no transform. made: elements of the workspace. input, output: shapes in
  // memory order. type: of output's elements. alignment: of inputs, in bytes. held: keeps the parameters alive, so that their addresses
  // stay unique.
  Place(int64_t product, int64_t transform, int64_t made, const Numbers& packed, Numbers input, Numbers output, at::ScalarType type,
        bool channels_last, uintptr_t alignment, std::vector<Tensor> held, Numbers versions)
      : product_(object_of(product)), transform_(object_of(transform)), made_({made}), input_(std::move(input)), output_(std::move(output)),
        type_(type), channels_last_(channels_last), alignment_(alignment), held_(std::move(held)), versions_(std::move(versions)),
        sizes_(logical(output_.sizes)), strides_(logical(output_.strides)) {
    for (int64_t handle : packed) packed_.push_back(object_of(handle));
    device_ = TVMFFITensorGetDLTensorPtr(packed_[0].get())->device;
  }
  ~Place();
  Place(const Place&) = delete;
  Place& operator=(const Place&) = delete;

  // Whether these are the bound parameters, unchanged.
  bool is_fresh(const Call& call) const {
    size_t i = 0;
    for (const Tensor* one : call.parameters) {
      if (!one) continue;
      if (i == held_.size() || one->const_data_ptr() != held_[i].const_data_ptr() || version_of(*one) != versions_[i]) return false;
      ++i;
    }
    return i == held_.size();
  }

  Tensor run(const Call& call) const {
    const c10::DeviceGuard guard(call.x->device());
    const Tensor x = laid_out(*call.x), residual = call.residual ? laid_out(*call.residual) : Tensor();
    const Tensor y = empty_strided(sizes_, strides_, type_, x);
    const Tensor scratch = made_.sizes[0] ? empty_strided(made_.sizes, made_.strides, x.scalar_type(), x) : Tensor();
    const CurrentStream stream(device_);
    launch(x, residual, scratch, y);
    return y;
  }

  void remember();

  bool channels_last() const { return channels_last_; }

 private:
  // The values as the kernel reads them: contiguous, and aligned for its vector copies.
  Tensor laid_out(const Tensor& tensor) const {
    const Tensor compact = tensor.contiguous(channels_last_ ? at::MemoryFormat::ChannelsLast : at::MemoryFormat::Contiguous);
    return reinterpret_cast<uintptr_t>(compact.const_data_ptr()) % alignment_ ? compact.clone() : compact;
  }

  // From memory order to batch, channels, height, width.
  Numbers logical(const Numbers& one) const {
    return channels_last_ ? Numbers{one[0], one[3], one[1], one[2]} : one;
  }

  DLTensor described(const Tensor& tensor, const Shape& shape) const {
    const DLDataType type{code_of(tensor.scalar_type()), static_cast<uint8_t>(8 * tensor.element_size()), 1};
    return {const_cast<void*>(tensor.const_data_ptr()), device_, static_cast<int32_t>(shape.sizes.size()), type,
            const_cast<int64_t*>(shape.sizes.data()), const_cast<int64_t*>(shape.strides.data()), 0};
  }

  void launch(const Tensor& x, const Tensor& residual, const Tensor& scratch, const Tensor& y) const {
    DLTensor data = described(x, input_), output = described(y, output_), made, added;
    Arguments arguments{argument(data)};
    if (scratch.defined()) {
      made = described(scratch, made_);
      arguments.push_back(argument(made));
    }
    if (transform_) {
      run_function(transform_, arguments);
      arguments = {argument(made)};
    }
    for (const Object& one : packed_) arguments.push_back(argument(*TVMFFITensorGetDLTensorPtr(one.get())));
    if (residual.defined()) {
      added = described(residual, output_);
      arguments.push_back(argument(added));
    }
    arguments.push_back(argument(output));
    run_function(product_, arguments);
  }

  Object product_, transform_;
  Shape made_, input_, output_;
  at::ScalarType type_;
  bool channels_last_;
  uintptr_t alignment_;
  std::vector<Object> packed_;
  DLDevice device_;
  std::vector<Tensor> held_;
  Numbers versions_;
  Numbers sizes_, strides_;  // of the output, in the order of PyTorch's dimensions
};

// The kernels by key. It does not keep them alive: a kernel ends with the `Bound` that created it.
class Table {
 public:
  std::shared_ptr<const Place> find(const Key& key, const Call& call) const {
    std::shared_ptr<const Place> place;
    {
      const std::shared_lock lock(mutex_);
      const auto found = places_.find(key);
      if (found != places_.end()) place = found->second.lock();
    }
    return place && place->is_fresh(call) ? place : nullptr;
  }

  void add(const Key& key, const std::shared_ptr<const Place>& place) {
    const std::unique_lock lock(mutex_);
    std::vector<Key>& keys = keys_[place.get()];
    if (keys.size() >= most_) drop(keys);
    places_[key] = place;
    keys.push_back(key);
  }

  void forget(const Place* place) {
    const std::unique_lock lock(mutex_);
    const auto found = keys_.find(place);
    if (found == keys_.end()) return;
    drop(found->second);
    keys_.erase(found);
  }

  size_t size() const {
    const std::shared_lock lock(mutex_);
    return places_.size();
  }

 private:
  void drop(std::vector<Key>& keys) {
    for (const Key& key : keys) places_.erase(key);
    keys.clear();
  }

  static constexpr size_t most_ = 1024;  // layouts of inputs that are remembered for a call site
  mutable std::shared_mutex mutex_;
  std::unordered_map<Key, std::weak_ptr<const Place>> places_;
  std::unordered_map<const Place*, std::vector<Key>> keys_;
};

inline Table& table() {
  static Table& one = *new Table;  // never destroyed, since places may outlive static objects
  return one;
}

// The call that this thread waits for Python to compute; null if equal calls must not be remembered.
inline thread_local const Key* asked = nullptr;

struct Asking {
  explicit Asking(const Key* key) : before(std::exchange(asked, key)) {}
  ~Asking() { asked = before; }
  Asking(const Asking&) = delete;
  Asking& operator=(const Asking&) = delete;
  const Key* before;
};

inline Place::~Place() { table().forget(this); }

inline void Place::remember() {
  if (asked) table().add(*asked, shared_from_this());
}

}  // namespace im2win
