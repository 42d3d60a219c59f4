// The Python module that runs calls of torch.ops.im2win.conv2d and of optimised modules without Python; see dispatch.hpp.

#include "dispatch.hpp"

#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace im2win {
namespace {

PyObject* none() { return Py_NewRef(Py_None); }

PyObject* enter_(PyObject*, PyObject*) {
  return guarded([] { return enter(), none(); });
}

PyObject* leave_(PyObject*, PyObject*) {
  return guarded([] { return leave(), none(); });
}

PyObject* remembered(PyObject*, PyObject*) {
  return guarded([] { return PyLong_FromSize_t(table().size()); });
}

// introduce(place, given, channels_last)
PyObject* introduce(PyObject*, PyObject* arguments) {
  return guarded([&]() -> PyObject* {
    const char* place;
    PyObject* given;
    int channels_last;
    if (!PyArg_ParseTuple(arguments, "sO!p", &place, &PyTuple_Type, &given, &channels_last)) return nullptr;
    all_named()[place] = {Reference::to(given), channels_last != 0};
    return none();
  });
}

// dismiss(place)
PyObject* dismiss(PyObject*, PyObject* name) {
  return guarded([&]() -> PyObject* {
    const char* place = PyUnicode_AsUTF8(name);
    if (!place) return nullptr;
    const auto gone = all_named().extract(place);  // dropped when the table is whole again, since that may run Python
    return none();
  });
}

// Reads a sequence item by item. Returns whether no item raised an error.
template <class Read>
bool read_each(PyObject* sequence, Read read) {
  const Reference items(PySequence_Fast(sequence, "a sequence is needed"));
  if (!items) return false;
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(items.get()); ++i)
    if (!read(PySequence_Fast_GET_ITEM(items.get(), i))) return false;
  return true;
}

bool read_numbers(Numbers& numbers, PyObject* sequence) {
  return read_each(sequence, [&](PyObject* item) {
    numbers.push_back(PyLong_AsLongLong(item));
    return !PyErr_Occurred();
  });
}

bool read_tensors(std::vector<Tensor>& tensors, PyObject* sequence) {
  return read_each(sequence, [&](PyObject* item) {
    if (!is_plain(item)) return PyErr_SetString(PyExc_TypeError, "a plain tensor is needed"), false;
    tensors.push_back(tensor_in(item));
    return true;
  });
}

struct PlaceObject {
  PyObject_HEAD
  std::shared_ptr<Place> place;
};

// Place(*, product, transform, made, packed, input, output, like, channels_last, alignment, held, versions), as the constructor in places.hpp;
// the output has the type of the one tensor in `like`
PyObject* new_place(PyTypeObject* type, PyObject* arguments, PyObject* named) {
  return guarded([&]() -> PyObject* {
    static const char* names[] = {"product", "transform",     "made",      "packed", "input",    "output",
                                  "like",    "channels_last", "alignment", "held",   "versions", nullptr};
    long long product, transform, made, alignment;
    PyObject *packed, *input, *output, *like, *held, *versions;
    int channels_last;
    if (!PyArg_ParseTupleAndKeywords(arguments, named, "$LLLOOOOpLOO", const_cast<char**>(names), &product, &transform, &made, &packed,
                                     &input, &output, &like, &channels_last, &alignment, &held, &versions))
      return nullptr;
    Numbers handles, sizes, out_sizes, counted;
    std::vector<Tensor> tensors, typed;
    if (!read_numbers(handles, packed) || !read_numbers(sizes, input) || !read_numbers(out_sizes, output) ||
        !read_tensors(tensors, held) || !read_tensors(typed, like) || !read_numbers(counted, versions))
      return nullptr;
    if (typed.size() != 1) return PyErr_SetString(PyExc_TypeError, "one tensor of the output's type is needed"), nullptr;
    auto place = std::make_shared<Place>(product, transform, made, handles, std::move(sizes), std::move(out_sizes),
                                         typed[0].scalar_type(), channels_last != 0, static_cast<uintptr_t>(alignment), std::move(tensors), std::move(counted));
    PyObject* const object = type->tp_alloc(type, 0);
    if (object) new (&reinterpret_cast<PlaceObject*>(object)->place) std::shared_ptr<Place>(std::move(place));
    return object;
  });
}

void drop_place(PyObject* object) {
  PyTypeObject* const type = Py_TYPE(object);
  std::destroy_at(&reinterpret_cast<PlaceObject*>(object)->place);
  type->tp_free(object);
  Py_DECREF(type);
}

PyObject* remember(PyObject* object, PyObject*) {
  return guarded([&] { return reinterpret_cast<PlaceObject*>(object)->place->remember(), none(); });
}

PyMethodDef place_methods[] = {
    {"remember", remember, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyType_Slot place_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(new_place)},
    {Py_tp_dealloc, reinterpret_cast<void*>(drop_place)},
    {Py_tp_methods, place_methods},
    {0, nullptr},
};

PyType_Spec place_type = {"im2win_operator.Place", sizeof(PlaceObject), 0, Py_TPFLAGS_DEFAULT, place_slots};

PyMethodDef functions[] = {
    {"enter", enter_, METH_NOARGS, nullptr},
    {"leave", leave_, METH_NOARGS, nullptr},
    {"remembered", remembered, METH_NOARGS, nullptr},
    {"introduce", introduce, METH_VARARGS, nullptr},
    {"dismiss", dismiss, METH_O, nullptr},
    {"site", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(site)), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "im2win_operator", nullptr, -1, functions, nullptr, nullptr, nullptr, nullptr};

const DLPackExchangeAPI* exchange_of_pytorch() {
  const Reference capsule(PyObject_GetAttrString(classes().tensor, "__dlpack_c_exchange_api__"));
  if (!capsule) return PyErr_Clear(), nullptr;
  if (!PyCapsule_IsValid(capsule.get(), "dlpack_exchange_api")) return nullptr;
  const auto* api = static_cast<const DLPackExchangeAPI*>(PyCapsule_GetPointer(capsule.get(), "dlpack_exchange_api"));
  return api->header.version.major == DLPACK_MAJOR_VERSION && api->current_work_stream ? api : nullptr;
}

// Reads PyTorch's classes and verifies what `python.hpp` assumes of its tensors. Returns whether it is so; else an ImportError is set.
bool know_pytorch() {
  const Reference torch(PyImport_ImportModule("torch"));
  if (!torch) return false;
  Classes& all = classes();
  all.tensor = PyObject_GetAttrString(torch.get(), "Tensor");
  const Reference nn(PyObject_GetAttrString(torch.get(), "nn"));
  if (nn) all.parameter = PyObject_GetAttrString(nn.get(), "Parameter");
  if (!all.tensor || !all.parameter) return false;
  all.out_of_memory = PyObject_GetAttrString(torch.get(), "OutOfMemoryError");
  if (!all.out_of_memory) PyErr_Clear();
  std::vector<Reference> tensors;
  std::vector<std::pair<PyObject*, const void*>> addresses;
  for (long size : {1, 2, 3}) {
    const Reference& one = tensors.emplace_back(PyObject_CallMethod(torch.get(), "empty", "l", size));
    if (!one) return false;
    const Reference address(PyObject_GetAttrString(one.get(), "_cdata"));
    if (!address) return false;
    addresses.emplace_back(one.get(), PyLong_AsVoidPtr(address.get()));
    if (PyErr_Occurred()) return false;
  }
  if (find_offset(addresses) && can_wrap()) return true;
  PyErr_SetString(PyExc_ImportError, "this version of PyTorch holds its tensors in Python in another way");
  return false;
}

}  // namespace
}  // namespace im2win

PyMODINIT_FUNC PyInit_im2win_operator() {
  using namespace im2win;
  return guarded([]() -> PyObject* {
    if (!know_pytorch()) return nullptr;
    exchange = exchange_of_pytorch();
    Reference module(PyModule_Create(&definition));
    const Reference type(PyType_FromSpec(&place_type));
    if (!module || !type || PyModule_AddObjectRef(module.get(), "Place", type.get()) ||
        PyModule_AddObjectRef(module.get(), "has_streams", exchange ? Py_True : Py_False))
      return nullptr;
    return Py_NewRef(module.get());
  });
}
