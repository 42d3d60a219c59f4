// Calls of torch.ops.im2win.conv2d and of optimised modules without Python: what a call was bound to is looked up, and its kernel launched.
// Every other call goes to Python, which decides who computes it, and may have calls like it remembered.

#include <tvm/ffi/extra/c_env_api.h>

#include <torch/csrc/autograd/python_variable.h>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/GradMode.h>

#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace {

using at::Tensor;
using c10::DispatchKey;
using c10::DispatchKeySet;
using torch::jit::Stack;
using Numbers = std::vector<int64_t>;

// --- calls

// The tensors of a call; what it has not is null.
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

// Bytes that are the same for calls of one operator whose inputs have the same layouts and whose parameters have the same addresses.
using Key = std::string;

template <class Value>
void append(Key& key, Value value) {
  key.append(reinterpret_cast<const char*>(&value), sizeof value);
}

void append_layout(Key& key, const Tensor* tensor) {
  append(key, tensor ? tensor->dim() : -1);
  if (!tensor) return;
  for (int64_t size : tensor->sizes()) append(key, size);
  for (int64_t stride : tensor->strides()) append(key, stride);
  append(key, tensor->scalar_type());
  append(key, tensor->device().type());
  append(key, tensor->device().index());
}

void append_tensors(Key& key, const Call& call) {
  append_layout(key, call.x);
  append_layout(key, call.residual);
  append_layout(key, call.parameters[0]);
  for (const Tensor* one : call.parameters) append(key, one ? one->const_data_ptr() : nullptr);
}

// As `Bound` counts: tensors made under inference_mode have no version.
int64_t version_of(const Tensor& tensor) {
  return tensor.is_inference() ? -1 : static_cast<int64_t>(tensor._version());
}

// --- TVM's functions

using Object = std::shared_ptr<void>;

Object object_of(int64_t handle) {
  auto* object = reinterpret_cast<TVMFFIObjectHandle>(handle);
  if (!object) return nullptr;
  TVMFFIObjectIncRef(object);
  return Object(object, [](void* one) { TVMFFIObjectDecRef(one); });
}

using Arguments = c10::SmallVector<TVMFFIAny, 8>;

TVMFFIAny argument(DLTensor& tensor) {
  TVMFFIAny any{};
  any.type_index = kTVMFFIDLTensorPtr;
  any.v_ptr = &tensor;
  return any;
}

[[noreturn]] void raise_error() {
  TVMFFIObjectHandle raised = nullptr;
  TVMFFIErrorMoveFromRaised(&raised);
  TORCH_CHECK(raised, "a kernel failed and did not say why");
  const Object error(raised, [](void* one) { TVMFFIObjectDecRef(one); });
  const TVMFFIByteArray message = TVMFFIErrorGetCellPtr(raised)->message;
  TORCH_CHECK(false, std::string(message.data, message.size));
}

void run_function(const Object& function, Arguments& arguments) {
  TVMFFIAny result{};
  if (TVMFFIFunctionCall(function.get(), arguments.data(), static_cast<int32_t>(arguments.size()), &result)) raise_error();
}

const DLPackExchangeAPI* exchange = nullptr;  // PyTorch's, which knows its current streams

// While it lives, what this thread launches through TVM goes to PyTorch's current stream of the device.
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

// --- what calls are bound to

// A compact tensor's sizes and strides, in the order of memory.
struct Shape {
  explicit Shape(Numbers given) : sizes(std::move(given)), strides(sizes.size(), 1) {
    for (size_t i = sizes.size() - 1; i > 0; --i) strides[i - 1] = strides[i] * sizes[i];
  }
  Numbers sizes, strides;
};

// A kernel with the packed parameters of one place in a network, as long as these are what they were.
class Place : public std::enable_shared_from_this<Place> {
 public:
  // product, transform, packed: handles of TVM's objects, 0 for no transform. made: elements of scratch. input, output: shapes in the order
  // of memory. alignment: of inputs, in bytes. held: the parameters, so that addresses stay their own.
  Place(int64_t product, int64_t transform, int64_t made, const Numbers& packed, Numbers input, Numbers output, bool channels_last,
        uintptr_t alignment, std::vector<Tensor> held, Numbers versions)
      : product_(object_of(product)), transform_(object_of(transform)), made_({made}), input_(std::move(input)), output_(std::move(output)),
        channels_last_(channels_last), alignment_(alignment), held_(std::move(held)), versions_(std::move(versions)),
        sizes_(logical(output_.sizes)), strides_(logical(output_.strides)) {
    for (int64_t handle : packed) packed_.push_back(object_of(handle));
    device_ = TVMFFITensorGetDLTensorPtr(packed_[0].get())->device;
  }
  ~Place();
  Place(const Place&) = delete;
  Place& operator=(const Place&) = delete;

  // Whether these are the parameters that it was bound with, unchanged.
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
    const Tensor y = at::empty_strided(sizes_, strides_, x.options());
    const Tensor scratch = made_.sizes[0] ? at::empty_strided(made_.sizes, made_.strides, x.options()) : Tensor();
    const CurrentStream stream(device_);
    launch(x, residual, scratch, y);
    return y;
  }

  void remember();

 private:
  // The same values as the kernel reads them: one after another, from where its widest copies may begin.
  Tensor laid_out(const Tensor& tensor) const {
    const Tensor compact = tensor.contiguous(channels_last_ ? at::MemoryFormat::ChannelsLast : at::MemoryFormat::Contiguous);
    return reinterpret_cast<uintptr_t>(compact.const_data_ptr()) % alignment_ ? compact.clone() : compact;
  }

  // From the order of memory to batch, channels, height, width.
  Numbers logical(const Numbers& one) const {
    return channels_last_ ? Numbers{one[0], one[3], one[1], one[2]} : one;
  }

  DLTensor described(const Tensor& tensor, const Shape& shape) const {
    const DLDataType type{kDLFloat, static_cast<uint8_t>(8 * tensor.element_size()), 1};
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
  bool channels_last_;
  uintptr_t alignment_;
  std::vector<Object> packed_;
  DLDevice device_;
  std::vector<Tensor> held_;
  Numbers versions_;
  Numbers sizes_, strides_;  // of the output, in the order of PyTorch's dimensions
};

// What calls are bound to. It keeps no place alive: a place ends with the `Bound` that made it.
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

  static constexpr size_t most_ = 1024;  // inputs of so many layouts are remembered for a place
  mutable std::shared_mutex mutex_;
  std::unordered_map<Key, std::weak_ptr<const Place>> places_;
  std::unordered_map<const Place*, std::vector<Key>> keys_;
};

Table& table() {
  static Table& one = *new Table;  // places may outlive what ends with the process
  return one;
}

// The call that this thread waits for Python to compute; null if calls like it must not be remembered.
thread_local const Key* asked = nullptr;

struct Asking {
  explicit Asking(const Key* key) : before(std::exchange(asked, key)) {}
  ~Asking() { asked = before; }
  Asking(const Asking&) = delete;
  Asking& operator=(const Asking&) = delete;
  const Key* before;
};

Place::~Place() { table().forget(this); }

void Place::remember() {
  if (asked) table().add(*asked, shared_from_this());
}

// --- the operator; its arguments are those of SCHEMA in conv_op.py

constexpr size_t arguments_in_all = 16, tensors_in_all = 9, residual_at = 3;

Call call_of(const c10::IValue* arguments) {
  Call call;
  for (size_t i = 0; i < tensors_in_all; ++i) {
    const Tensor* tensor = arguments[i].isTensor() ? &arguments[i].toTensor() : nullptr;
    if (i == 0) call.x = tensor;
    else if (i == residual_at) call.residual = tensor;
    else call.parameters.push_back(tensor);
  }
  return call;
}

void append_value(Key& key, const c10::IValue& value) {
  if (value.isString()) {
    append(key, value.toStringRef().size());
    key += value.toStringRef();
  } else if (value.isList()) {
    append(key, value.toListRef().size());
    for (const c10::IValue& one : value.toListRef()) append_value(key, one);
  } else if (value.isDouble()) {
    append(key, value.toDouble());
  } else {
    append(key, value.toInt());
  }
}

Key key_of(const c10::IValue* arguments, const Call& call) {
  Key key;
  key.reserve(512);
  append_tensors(key, call);
  for (size_t i = tensors_in_all; i < arguments_in_all; ++i) append_value(key, arguments[i]);
  return key;
}

const c10::OperatorHandle& in_python() {
  static const c10::OperatorHandle one = c10::Dispatcher::singleton().findSchemaOrThrow("im2win::conv2d_in_python", "");
  return one;
}

void compute(const c10::OperatorHandle&, DispatchKeySet keys, Stack* stack) {
  const c10::IValue* arguments = stack->data() + stack->size() - arguments_in_all;
  const Call call = call_of(arguments);
  const Key key = key_of(arguments, call);
  if (const auto place = table().find(key, call)) {
    Tensor y = place->run(call);
    torch::jit::drop(*stack, arguments_in_all);
    stack->emplace_back(std::move(y));
  } else {
    const Asking asking(&key);
    in_python().redispatchBoxed(keys, stack);
  }
}

// Calls without gradients go straight on where nothing stands between: no tracer, dispatch mode, subclass or function transform.
void autograd(const c10::OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  const DispatchKeySet below = keys & c10::after_autograd_keyset;
  if (call_of(stack->data() + stack->size() - arguments_in_all).needs_grad()) {
    in_python().redispatchBoxed(keys, stack);
  } else if (below == DispatchKeySet(DispatchKey::CPU) || below == DispatchKeySet(DispatchKey::CUDA)) {
    compute(op, below, stack);
  } else {
    const at::AutoDispatchBelowAutograd guard;
    op.redispatchBoxed(below, stack);
  }
}

std::vector<c10::RegistrationHandleRAII>& registrations() {
  static auto& all = *new std::vector<c10::RegistrationHandleRAII>;
  return all;
}

struct Silence : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

// Puts the operator's kernels before those of Python.
void enter() {
  if (!registrations().empty()) return;
  Silence silence;  // PyTorch warns of kernels that take another's place
  const c10::WarningUtils::WarningHandlerGuard guard(&silence);
  auto add = [](DispatchKey key, c10::KernelFunction kernel) {
    const c10::OperatorName name("im2win::conv2d", "");
    auto& dispatcher = c10::Dispatcher::singleton();
    registrations().push_back(dispatcher.registerImpl(name, key, std::move(kernel), std::nullopt, nullptr, "im2win's operator.cpp"));
  };
  for (DispatchKey key : {DispatchKey::CPU, DispatchKey::CUDA}) add(key, c10::KernelFunction::makeFromBoxedFunction<&compute>());
  add(DispatchKey::Autograd, c10::KernelFunction::makeFromBoxedFunction<&autograd>());
}

void leave() { registrations().clear(); }

// --- sites

bool is_training(PyObject* module) {
  static PyObject* const name = PyUnicode_InternFromString("training");
  if (module == Py_None) return false;
  PyObject* const value = PyObject_GetAttr(module, name);
  if (!value) throw python_error();
  Py_DECREF(value);
  return value != Py_False;
}

// Reads a site's call into `call`. Whether it may go past the dispatcher: PyTorch's own tensors, no training, and nothing that must see it:
// no gradients, tracer, dispatch mode, function transform or autocast.
bool read_plain(Call& call, PyObject* given, PyObject* x, PyObject* residual) {
  constexpr DispatchKeySet usual({DispatchKey::CPU, DispatchKey::CUDA, DispatchKey::AutogradCPU, DispatchKey::AutogradCUDA,
                                  DispatchKey::ADInplaceOrView, DispatchKey::BackendSelect});
  const bool adds = residual != Py_None;
  if (!Py_IS_TYPE(x, reinterpret_cast<PyTypeObject*>(THPVariableClass)) || (adds && !THPVariable_CheckExact(residual))) return false;
  if (is_training(PyTuple_GET_ITEM(given, 1))) return false;
  call.x = &THPVariable_Unpack(x);
  if (adds) call.residual = &THPVariable_Unpack(residual);
  for (Py_ssize_t i = 2; i < PyTuple_GET_SIZE(given); i += 2) {
    PyObject* const one = PyDict_GetItem(PyTuple_GET_ITEM(given, i), PyTuple_GET_ITEM(given, i + 1));
    if (!one || !THPVariable_CheckExact(one)) return false;
    call.parameters.push_back(&THPVariable_Unpack(one));
  }
  return usual.has_all(call.keys()) && !call.needs_grad();
}

// site(place, given, x, residual or None). `given` is the place's number, its normalisation's module or None, and of each parameter the
// dictionary that holds it and its name there, the filters first.
PyObject* site(PyObject*, PyObject* const* arguments, Py_ssize_t) {
  HANDLE_TH_ERRORS
  static PyObject* const general = PyUnicode_InternFromString("general");
  PyObject *const place = arguments[0], *const given = arguments[1], *const x = arguments[2], *const residual = arguments[3];
  Call call;
  Key key;
  const bool plain = read_plain(call, given, x, residual);
  if (plain) {
    key.reserve(512);
    append(key, PyLong_AsLongLong(PyTuple_GET_ITEM(given, 0)));
    append_tensors(key, call);
    if (const auto found = table().find(key, call)) {
      Tensor y;
      {
        const pybind11::gil_scoped_release released;
        y = found->run(call);
      }
      return THPVariable_Wrap(std::move(y));
    }
  }
  const Asking asking(plain ? &key : nullptr);
  return PyObject_CallMethodObjArgs(place, general, x, residual, nullptr);
  END_HANDLE_TH_ERRORS
}

PyMethodDef functions[] = {
    {"site", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(site)), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

const DLPackExchangeAPI* exchange_of_pytorch() {
  const auto capsule = pybind11::getattr(pybind11::handle(THPVariableClass), "__dlpack_c_exchange_api__", pybind11::none());
  if (!PyCapsule_IsValid(capsule.ptr(), "dlpack_exchange_api")) return nullptr;
  const auto* api = static_cast<const DLPackExchangeAPI*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
  return api->header.version.major == DLPACK_MAJOR_VERSION && api->current_work_stream ? api : nullptr;
}

}  // namespace

PYBIND11_MODULE(im2win_operator, module) {
  exchange = exchange_of_pytorch();
  module.attr("has_streams") = exchange != nullptr;
  module.def("enter", &enter);
  module.def("leave", &leave);
  module.def("remembered", [] { return table().size(); });
  PyModule_AddFunctions(module.ptr(), functions);
  using namespace pybind11::literals;
  pybind11::class_<Place, std::shared_ptr<Place>>(module, "Place")
      .def(pybind11::init<int64_t, int64_t, int64_t, const Numbers&, Numbers, Numbers, bool, uintptr_t, std::vector<Tensor>, Numbers>(),
           pybind11::kw_only(), "product"_a, "transform"_a, "made"_a, "packed"_a, "input"_a, "output"_a, "channels_last"_a, "alignment"_a,
           "held"_a, "versions"_a)
      .def("remember", &Place::remember);
}
