// A convolution that Python exported with its filters: op.bind(w, bias).export("conv.so"), then im2win::Layer layer("conv.so").
//
// Needs tvm-ffi (headers and library of the package apache-tvm-ffi) and, linked or loaded before, libtvm_runtime of apache-tvm. Layers run on
// the threads of the first library that was loaded, as many as there are CPUs or as the environment variable TVM_NUM_THREADS says.
#pragma once

#include <dlfcn.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/extra/module.h>
#include <tvm/ffi/function.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <new>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace im2win {

using Shape = std::vector<int64_t>;

// Allocates CPU tensors at multiples of 64 bytes, so that no vector load crosses a cache line.
struct Aligned {
  void AllocData(DLTensor* tensor) {
    const size_t bytes = (tvm::ffi::GetDataSize(*tensor) + 63) / 64 * 64;
    tensor->data = std::aligned_alloc(64, bytes ? bytes : 64);
    if (!tensor->data) throw std::bad_alloc();
  }
  void FreeData(DLTensor* tensor) { std::free(tensor->data); }
};

constexpr DLDataType kFloat32{kDLFloat, 32, 1};

// An uninitialised tensor on the CPU.
inline tvm::ffi::Tensor empty(const Shape& shape, DLDataType dtype = kFloat32) {
  return tvm::ffi::Tensor::FromNDAlloc(Aligned(), tvm::ffi::Shape(shape), dtype, DLDevice{kDLCPU, 0});
}

// The element type of that name.
inline DLDataType element_type(const std::string& name) {
  if (name == "bfloat16") return {kDLBfloat, 16, 1};
  if (name == "float16") return {kDLFloat, 16, 1};
  if (name == "int8") return {kDLInt, 8, 1};
  if (name == "uint8") return {kDLUInt, 8, 1};
  if (name == "int32") return {kDLInt, 32, 1};
  if (name == "float32") return kFloat32;
  throw std::runtime_error("im2win: `dtype` (=" + name + ") must be float32, float16, bfloat16, int8, uint8 or int32.");
}

// Thread-safe: calls share nothing but the code and the filters.
class Layer {
 public:
  // Loads a library and the file of packed filters beside it, which has .weights appended.
  //
  // Throws std::runtime_error if a file is missing or not of im2win, or if the filters were packed for another library;
  // tvm::ffi::Error if the library cannot be loaded.
  explicit Layer(const std::string& library) {
    const std::string path = library + ".weights";
    const std::string content = read(path);
    std::istringstream lines(content);
    std::string line, word;
    std::vector<size_t> packed;
    if (!std::getline(lines, line) || line != "im2win-weights 1") throw std::runtime_error(path + ": no weights of this im2win.");
    while (std::getline(lines, line) && line != "data") {
      std::istringstream words(line);
      words >> word;
      if (word == "library") {
        words >> word;
        if (word != checksum(read(library))) throw std::runtime_error(path + ": packed for another library.");
        continue;
      }
      Argument argument;
      if (word == "packed") packed.push_back(arguments_.size());
      words >> argument.name >> word;
      argument.dtype = element_type(word);
      for (int64_t extent; words >> extent;) argument.shape.push_back(extent);
      if (!words.eof() || !fits(argument.shape)) throw std::runtime_error(path + ": `shape` of " + argument.name + " is none of a tensor.");
      arguments_.push_back(argument);
    }
    if (arguments_.size() < 3 || !lines) throw std::runtime_error(path + ": truncated.");
    if (arguments_.size() > kMostArguments) throw std::runtime_error(path + ": more arguments than a kernel has.");
    size_t at = static_cast<size_t>(lines.tellg());
    for (size_t place : packed) {
      size_t bytes = arguments_[place].dtype.bits / 8;
      for (int64_t extent : arguments_[place].shape) bytes *= static_cast<size_t>(extent);
      at = (at + 63) / 64 * 64;
      if (content.size() < at || content.size() - at < bytes) throw std::runtime_error(path + ": truncated.");
      arguments_[place].packed = empty(arguments_[place].shape, arguments_[place].dtype);
      content.copy(static_cast<char*>(arguments_[place].packed.data_ptr()), bytes, at);
      at += bytes;
    }
    const std::string given = library.find('/') == std::string::npos ? "./" + library : library;
    module_ = tvm::ffi::Module::LoadFromFile(given);
    share_threads(given);
    kernel_ = module_.value()->GetFunction("conv2d").value();
  }

  const Shape& input_shape() const { return arguments_.front().shape; }
  const Shape& output_shape() const { return arguments_.back().shape; }
  DLDataType input_type() const { return arguments_.front().dtype; }
  DLDataType output_type() const { return arguments_.back().dtype; }
  bool adds_residual() const { return arguments_[arguments_.size() - 2].name == "residual"; }

  // y = the convolution of x. Tensors are of the layer's types, dense, on the CPU; y must not overlap x. Throws tvm::ffi::Error for other tensors.
  void operator()(const tvm::ffi::TensorView& x, const tvm::ffi::TensorView& y) const { call(x, nullptr, y); }

  // The same with a residual of y's shape, for layers that add one.
  void operator()(const tvm::ffi::TensorView& x, const tvm::ffi::TensorView& residual, const tvm::ffi::TensorView& y) const {
    call(x, &residual, y);
  }

 private:
  static constexpr size_t kMostArguments = 6;  // data, filter, bias, scale, residual, output

  struct Argument {
    std::string name;
    Shape shape;
    DLDataType dtype;
    tvm::ffi::Tensor packed;
  };

  void call(const tvm::ffi::TensorView& x, const tvm::ffi::TensorView* residual, const tvm::ffi::TensorView& y) const {
    tvm::ffi::AnyView given[kMostArguments];
    int count = 0;
    for (const Argument& argument : arguments_) {
      if (argument.packed.defined()) {
        given[count++] = argument.packed;
      } else if (argument.name == "residual" && residual) {
        given[count++] = *residual;
        residual = nullptr;
      } else if (argument.name != "residual") {
        given[count] = count ? y : x;
        ++count;
      }
    }
    if (residual) throw std::runtime_error("im2win: `residual` must be left out, the layer adds none.");
    tvm::ffi::Any result;
    kernel_.value().CallPacked(given, count, &result);
  }

  // Whether extents are positive, and their product that of a tensor that memory could hold.
  static bool fits(const Shape& shape) {
    int64_t left = int64_t{1} << 48;
    for (int64_t extent : shape) {
      if (extent < 1) return false;
      left /= extent;
    }
    return !shape.empty() && left > 0;
  }

  // Runs the parallel loops of a loaded library on the pool of the first one, which stays loaded, instead of TVM's threads.
  static void share_threads(const std::string& path) {
    void* library = dlopen(path.c_str(), RTLD_LAZY | RTLD_NOLOAD);
    if (!library) return;
    static void* const first = [library] {
      void* launch = dlsym(library, "im2win_launch");
      const char* threads = std::getenv("TVM_NUM_THREADS");
      auto set = reinterpret_cast<int (*)(int)>(dlsym(library, "im2win_set_threads"));
      if (launch && set && threads) set(std::atoi(threads));
      return launch;
    }();
    void* launch = dlsym(library, "__TVMBackendParallelLaunch");
    if (first && launch) *static_cast<void**>(launch) = first;
    if (dlsym(library, "im2win_launch") != first) dlclose(library);
  }

  static std::string read(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    if (!file) throw std::runtime_error(path + ": cannot read it.");
    return {std::istreambuf_iterator<char>(file), {}};
  }

  static std::string checksum(const std::string& content) {  // FNV-1a, 16 hexadecimal digits
    uint64_t value = 0xCBF29CE484222325u;
    for (unsigned char byte : content) value = (value ^ byte) * 0x100000001B3u;
    char digits[17];
    std::snprintf(digits, sizeof digits, "%016llx", static_cast<unsigned long long>(value));
    return digits;
  }

  std::vector<Argument> arguments_;
  tvm::ffi::Optional<tvm::ffi::Module> module_;
  tvm::ffi::Optional<tvm::ffi::Function> kernel_;
};

}  // namespace im2win
