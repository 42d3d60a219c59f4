// Runs an exported layer and checks it against a plain loop: layer LIBRARY FILTERS.
//
// FILTERS are the filters and the bias as Python had them, for the check alone: the layer brings its own, packed.
#include <im2win/layer.hpp>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>

namespace {

// The layer of export.py.
constexpr int kernel = 3, padding = 1;

// relu(conv(x, w) + bias) of one image, straight from the formula.
std::vector<double> convolution(const float* x, const im2win::Shape& in, const float* w, const float* bias, const im2win::Shape& out) {
  const int64_t channels = in[1], height = in[2], width = in[3];
  std::vector<double> y;
  for (int64_t k = 0; k < out[1]; ++k)
    for (int64_t m = 0; m < out[2]; ++m)
      for (int64_t n = 0; n < out[3]; ++n) {
        double sum = bias[k];
        for (int64_t c = 0; c < channels; ++c)
          for (int64_t u = 0; u < kernel; ++u)
            for (int64_t v = 0; v < kernel; ++v) {
              const int64_t row = m + u - padding, col = n + v - padding;
              if (row < 0 || row >= height || col < 0 || col >= width) continue;
              sum += double(x[(c * height + row) * width + col]) * w[((k * channels + c) * kernel + u) * kernel + v];
            }
        y.push_back(std::max(sum, 0.0));
      }
  return y;
}

std::vector<float> floats(const char* path, size_t count) {
  std::vector<float> values(count);
  std::ifstream file(path, std::ios::binary);
  file.read(reinterpret_cast<char*>(values.data()), static_cast<std::streamsize>(count * sizeof(float)));
  if (!file) throw std::runtime_error(std::string(path) + ": too short.");
  return values;
}

// Runs the layer; how many outputs are wrong.
size_t check(const char* library, const char* filters_file) {
  const im2win::Layer layer(library);
  const tvm::ffi::Tensor x = im2win::empty(layer.input_shape()), y = im2win::empty(layer.output_shape());
  float* input = static_cast<float*>(x.data_ptr());
  for (int64_t i = 0; i < x.numel(); ++i) input[i] = std::sin(static_cast<float>(i));

  layer(x, y);

  const size_t filters = layer.output_shape()[1] * layer.input_shape()[1] * kernel * kernel;
  const std::vector<float> w = floats(filters_file, filters + layer.output_shape()[1]);
  const std::vector<double> expected = convolution(input, layer.input_shape(), w.data(), w.data() + filters, layer.output_shape());
  const float* output = static_cast<const float*>(y.data_ptr());
  size_t wrong = 0;
  for (size_t i = 0; i < expected.size(); ++i) wrong += !(std::fabs(output[i] - expected[i]) < 1e-4);  // NaN is wrong, too
  std::printf("%zu outputs, %zu wrong\n", expected.size(), wrong);
  return wrong;
}

}  // namespace

int main(int count, char** words) {
  if (count != 3) {
    std::fprintf(stderr, "usage: layer LIBRARY FILTERS\n");
    return 2;
  }
  try {
    return check(words[1], words[2]) ? 1 : 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "layer: %s\n", error.what());
    return 2;
  }
}
