// Python's C interface for the library: who holds its lock, references to objects, and PyTorch's tensors in Python.
//
// PyTorch's own header for this takes longer to compile than all others together, since it includes pybind11. What is repeated of it here
// is verified when the library is loaded: where a Python tensor holds its C++ tensor, by tensors whose addresses Python tells, and the
// name and arguments of a function by the dynamic linker.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <exception>
#include <memory>
#include <utility>
#include <vector>

// In libtorch_python: newer versions have the first, older ones the second. The other one's address is null.
__attribute__((weak, visibility("default"))) PyObject* THPVariable_Wrap(at::TensorBase&& tensor);
__attribute__((weak, visibility("default"))) PyObject* THPVariable_Wrap(at::TensorBase tensor);

namespace im2win {

// Python's lock is released, or held, while they exist.
class Unlocked {
 public:
  Unlocked() : state_(PyEval_SaveThread()) {}
  ~Unlocked() { PyEval_RestoreThread(state_); }
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;

 private:
  PyThreadState* state_;
};

class Locked {
 public:
  Locked() : state_(PyGILState_Ensure()) {}
  ~Locked() { PyGILState_Release(state_); }
  Locked(const Locked&) = delete;
  Locked& operator=(const Locked&) = delete;

 private:
  PyGILState_STATE state_;
};

// A reference to a Python object; copied and dropped under Python's lock only.
class Reference {
 public:
  Reference() = default;
  explicit Reference(PyObject* owned) : one_(owned) {}
  Reference(const Reference& other) : one_(other.one_) { Py_XINCREF(one_); }
  Reference(Reference&& other) noexcept : one_(std::exchange(other.one_, nullptr)) {}
  Reference& operator=(Reference other) noexcept {
    std::swap(one_, other.one_);
    return *this;
  }
  ~Reference() { Py_XDECREF(one_); }
  static Reference to(PyObject* borrowed) {
    Py_XINCREF(borrowed);
    return Reference(borrowed);
  }
  PyObject* get() const { return one_; }
  explicit operator bool() const { return one_; }

 private:
  PyObject* one_ = nullptr;
};

// --- PyTorch's tensors in Python

struct Classes {
  PyObject *tensor = nullptr, *parameter = nullptr, *out_of_memory = nullptr;
  Py_ssize_t offset = 0;  // of the C++ tensor in the Python object
};

inline Classes& classes() {
  static Classes all;
  return all;
}

static_assert(sizeof(at::Tensor) == sizeof(void*), "a tensor is a pointer to its implementation");

inline const at::Tensor& tensor_in(PyObject* object) {
  return *reinterpret_cast<const at::Tensor*>(reinterpret_cast<const char*>(object) + classes().offset);
}

// Whether an object is a plain tensor or a parameter, and of no other class.
inline bool is_plain(PyObject* object) {
  return Py_IS_TYPE(object, reinterpret_cast<PyTypeObject*>(classes().tensor)) ||
         Py_IS_TYPE(object, reinterpret_cast<PyTypeObject*>(classes().parameter));
}

// The places behind an object's head where PyTorch's versions hold the C++ tensor: at once, or behind a flag.
constexpr Py_ssize_t first_offset = sizeof(PyObject), last_offset = first_offset + sizeof(void*);

inline bool holds(PyObject* tensor, Py_ssize_t offset, const void* address) {
  return *reinterpret_cast<void* const*>(reinterpret_cast<const char*>(tensor) + offset) == address;
}

// Finds the offset by different tensors and the addresses of their implementations. Returns whether there is one.
inline bool find_offset(const std::vector<std::pair<PyObject*, const void*>>& tensors) {
  for (Py_ssize_t offset = first_offset; offset <= last_offset; offset += sizeof(void*)) {
    bool all = !tensors.empty();
    for (const auto& [tensor, address] : tensors) all = all && holds(tensor, offset, address);
    if (all) {
      classes().offset = offset;
      return true;
    }
  }
  return false;
}

using WrapMoved = PyObject* (*)(at::TensorBase&&);
using WrapCopied = PyObject* (*)(at::TensorBase);

inline bool can_wrap() { return static_cast<WrapMoved>(&THPVariable_Wrap) || static_cast<WrapCopied>(&THPVariable_Wrap); }

// A tensor as a new Python object.
inline PyObject* wrapped(at::Tensor tensor) {
  const auto moved = static_cast<WrapMoved>(&THPVariable_Wrap);
  return moved ? moved(std::move(tensor)) : static_cast<WrapCopied>(&THPVariable_Wrap)(std::move(tensor));
}

// What a function for Python returns; an exception becomes Python's.
template <class Function>
PyObject* guarded(Function function) noexcept {
  try {
    return function();
  } catch (const c10::OutOfMemoryError& error) {
    PyErr_SetString(classes().out_of_memory ? classes().out_of_memory : PyExc_RuntimeError, error.what_without_backtrace());
  } catch (const c10::Error& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what_without_backtrace());
  } catch (const std::exception& error) {
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_RuntimeError, error.what());  // else one of PyTorch's functions has set it
  }
  return nullptr;
}

}  // namespace im2win
