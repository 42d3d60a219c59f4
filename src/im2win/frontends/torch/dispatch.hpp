// The operators' kernels in PyTorch's dispatcher, and the calls of conv call sites from Python: both look up a call's kernel and launch it.
// Every other call goes to Python, which selects the kernel or PyTorch, and may let equal calls be remembered.
#pragma once

#include "python.hpp"

#include "places.hpp"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace im2win {
namespace {

using torch::jit::Stack;

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

// Calls without gradients go directly to the kernel if no tracer, dispatch mode, subclass or function transform is active.
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

void at_site(const c10::OperatorHandle&, DispatchKeySet keys, Stack* stack);

// Registers the operators' kernels in place of those of Python.
void enter() {
  if (!registrations().empty()) return;
  Silence silence;  // PyTorch warns about kernels that replace others
  const c10::WarningUtils::WarningHandlerGuard guard(&silence);
  auto add = [](DispatchKey key, c10::KernelFunction kernel, const char* op = "im2win::conv2d") {
    const c10::OperatorName name(op, "");
    auto& dispatcher = c10::Dispatcher::singleton();
    registrations().push_back(dispatcher.registerImpl(name, key, std::move(kernel), std::nullopt, nullptr, "im2win's operator.cpp"));
  };
  for (DispatchKey key : {DispatchKey::CPU, DispatchKey::CUDA}) {
    add(key, c10::KernelFunction::makeFromBoxedFunction<&compute>());
    add(key, c10::KernelFunction::makeFromBoxedFunction<&at_site>(), "im2win::site");
  }
  add(DispatchKey::Autograd, c10::KernelFunction::makeFromBoxedFunction<&autograd>());
}

void leave() { registrations().clear(); }

// --- conv call sites

bool is_training(PyObject* module) {
  static PyObject* const name = PyUnicode_InternFromString("training");
  if (module == Py_None) return false;
  const Reference value(PyObject_GetAttr(module, name));
  if (!value) PyErr_Clear();  // the call in Python raises it again
  return value.get() != Py_False;
}

// Adds a site's parameters to `call`. Returns whether the call may bypass the dispatcher: plain PyTorch tensors, no training, and no
// gradients, tracer, dispatch mode, function transform or autocast.
bool read_parameters(Call& call, PyObject* given) {
  constexpr DispatchKeySet usual({DispatchKey::CPU, DispatchKey::CUDA, DispatchKey::AutogradCPU, DispatchKey::AutogradCUDA,
                                  DispatchKey::ADInplaceOrView, DispatchKey::BackendSelect});
  if (is_training(PyTuple_GET_ITEM(given, 1))) return false;
  for (Py_ssize_t i = 2; i < PyTuple_GET_SIZE(given); i += 2) {
    PyObject* const one = PyDict_GetItem(PyTuple_GET_ITEM(given, i), PyTuple_GET_ITEM(given, i + 1));
    if (!one || !is_plain(one)) return false;
    call.parameters.push_back(&tensor_in(one));
  }
  return usual.has_all(call.keys()) && !call.needs_grad();
}

bool read_plain(Call& call, PyObject* given, PyObject* x, PyObject* residual) {
  const bool adds = residual != Py_None;
  if (!Py_IS_TYPE(x, reinterpret_cast<PyTypeObject*>(classes().tensor)) || (adds && !is_plain(residual))) return false;
  call.x = &tensor_in(x);
  if (adds) call.residual = &tensor_in(residual);
  return read_parameters(call, given);
}

Key key_of(const Call& call, PyObject* given) {
  Key key;
  key.reserve(512);
  append(key, PyLong_AsLongLong(PyTuple_GET_ITEM(given, 0)));
  append_tensors(key, call);
  return key;
}

// site(place, given, x, residual or None). `given` holds the site's number, the module of its normalisation or None, and for each
// parameter the dictionary that contains it and its name there, the filters first.
PyObject* called(PyObject* const* arguments) {
  static PyObject* const general = PyUnicode_InternFromString("general");
  PyObject *const place = arguments[0], *const given = arguments[1], *const x = arguments[2], *const residual = arguments[3];
  Call call;
  Key key;
  const bool plain = read_plain(call, given, x, residual);
  if (plain) {
    key = key_of(call, given);
    if (const auto found = table().find(key, call)) {
      Tensor y;
      {
        const Unlocked unlocked;
        y = found->run(call);
      }
      return wrapped(std::move(y));
    }
  }
  const Asking asking(plain ? &key : nullptr);
  return PyObject_CallMethodObjArgs(place, general, x, residual, nullptr);
}

PyObject* site(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 4) return PyErr_Format(PyExc_TypeError, "site takes 4 arguments, not %zd", count);
  return guarded([&] { return called(arguments); });
}

// --- the same sites, named in compiled programs; arguments as in SITE_SCHEMA in conv_op.py

struct Named {
  Reference given;             // as above
  bool channels_last = false;  // whether the filters were channels-last when the site was named
};

std::unordered_map<std::string, Named>& all_named() {  // read and written while Python waits
  static auto& all = *new std::unordered_map<std::string, Named>;
  return all;
}

void at_site(const c10::OperatorHandle&, DispatchKeySet keys, Stack* stack) {
  static const c10::OperatorHandle in_python = c10::Dispatcher::singleton().findSchemaOrThrow("im2win::site_in_python", "");
  constexpr size_t count = 3;
  const c10::IValue* arguments = stack->data() + stack->size() - count;
  Call call;
  call.x = &arguments[0].toTensor();
  if (arguments[1].isTensor()) call.residual = &arguments[1].toTensor();
  std::shared_ptr<const Place> place;
  {
    const Locked python_waits;
    const auto found = all_named().find(arguments[2].toStringRef());
    const Named named = found == all_named().end() ? Named() : found->second;  // a copy, since reading parameters may run Python
    if (named.given && read_parameters(call, named.given.get())) {
      place = table().find(key_of(call, named.given.get()), call);
      // compiled programs assume the output's layout; an operator bound after the module's layout changed may have another
      if (place && place->channels_last() != (named.channels_last || is_channels_last(*call.x))) place = nullptr;
    }
  }
  if (!place) return in_python.redispatchBoxed(keys, stack);
  Tensor y = place->run(call);
  torch::jit::drop(*stack, count);
  stack->emplace_back(std::move(y));
}

}  // namespace
}  // namespace im2win
