// Packs filters on the host for CUDA kernels; the layouts are those of im2win/packing/mma_fragments.py, im2win/packing/winograd.py and
// im2win/packing/winograd_int8.py.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace {
namespace im2win_packing {

inline uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float of_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// Elements as stored in memory: float16 as its bits.
inline double value_of(float element) { return element; }

inline double value_of(uint16_t bits) {
  const unsigned exponent = bits >> 10 & 31, fraction = bits & 1023;
  double value = exponent ? 1024 + fraction : fraction;  // units of 2^(exponent - 25), of 2^-24 where it is 0
  if (exponent == 31) value = fraction ? NAN : INFINITY;
  for (int i = exponent == 31 ? 25 : exponent ? int(exponent) : 1; i < 25; ++i) value /= 2;
  for (int i = 25; i < int(exponent) && exponent != 31; ++i) value *= 2;
  return bits >> 15 ? -value : value;
}

inline void store(double value, float* element) { *element = static_cast<float>(value); }

inline void store(double value, uint16_t* element) {  // to the nearest, ties to even
  const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  const double size = std::fabs(value);
  if (!(size < 65520)) {
    *element = sign | (size != size ? 0x7E00 : 0x7C00);
    return;
  }
  int exponent = 0;
  std::frexp(size, &exponent);  // size < 2^exponent
  const int unit = exponent - 11 < -24 ? -24 : exponent - 11;
  const double units = std::nearbyint(std::ldexp(size, -unit));  // at most 2^11
  *element = sign | static_cast<uint16_t>(units == 0 ? 0 : (unit + 24) * 1024 + units);
}

// bfloat16 as its bits, the upper half of a float; uint16_t alone is float16.
struct Bfloat16 {
  uint16_t bits;
};

inline double value_of(Bfloat16 element) { return of_bits(static_cast<uint32_t>(element.bits) << 16); }

inline void store(double value, Bfloat16* element) {  // as float, then to the nearest, ties to even
  const uint32_t bits = bits_of(static_cast<float>(value));
  element->bits = static_cast<uint16_t>((value != value ? bits | 0x400000 : bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

inline void store(double value, int8_t* element) { *element = static_cast<int8_t>(value); }
inline double value_of(int8_t element) { return element; }

// Parts of a float32: the TF32 value that tensor cores read (2), the rest (3), the nearest TF32 (1), or the value itself (0).
inline float part_of(float value, int part) {
  const uint32_t bits = bits_of(value);
  const float high = of_bits(bits & 0xFFFFE000u);
  if (part == 1) return std::isfinite(value) ? of_bits((bits + 0x1000u) & 0xFFFFE000u) : value;
  return part == 2 ? high : part == 3 ? value - high : value;
}

template <typename Element>
Element part_of(Element value, int) { return value; }

enum Order { cuv, cvu, uvc, Cuvc };  // of the sum's elements, the last axis innermost; Cuvc: `step` channels at a time

// slab: elements of the sum in a slab; places: of a slab's elements in turn, channel of the block * slab + element of the sum, and
// 32768 for what is left of it (part 3).
struct Slabs {
  int out_channels, in_channels, rows, columns, groups, block, slabs, slab, step, part, inside;
  Order order;
  const uint16_t* places;
  long long per_group, per_filter;  // elements of w from a group's first filter to the next group's, and from a filter to the next
  int together, filters, channels;  // groups of a block; where there are several: filters and input channels of one, and `groups` is 1
  int pixel, depth, taps;  // where channels are those of the taps of a kernel row: elements of a tap, its channels, taps of a row; else 0
};

// The index of element k of a channel's sum among its filters; -1 for padding.
inline long long tap_of(const Slabs& to, long long k) {
  const long long taps = static_cast<long long>(to.rows) * to.columns;
  long long channel = k / taps, tap = k % taps;
  if (to.order == cvu) tap = tap % to.rows * to.columns + tap / to.rows;
  if (to.order == uvc) {
    channel = k % to.in_channels;
    tap = k / to.in_channels;
  }
  if (to.order == Cuvc) {
    channel = k / (taps * to.step) * to.step + k % to.step;
    tap = k % (taps * to.step) / to.step;
  }
  if (to.pixel) {
    const long long across = channel / to.pixel;
    channel %= to.pixel;
    return channel < to.depth && across < to.taps && tap < taps ? (channel * to.rows + tap) * to.taps + across : -1;
  }
  return channel < to.in_channels && tap < taps ? channel * taps + tap : -1;
}

// The same where a block holds several groups, and `k` counts the channels of all of them; -1 for those of other groups than the filter's.
inline long long own_tap_of(const Slabs& to, long long k, int filter) {
  const long long tap = tap_of(to, k), depth = static_cast<long long>(to.channels) * to.rows * to.columns;
  return tap >= 0 && tap / depth == filter / to.filters % to.together ? tap % depth : -1;
}

template <typename Element>
void pack(const Slabs& to, const Element* w, Element* packed) {
  const int per_group = to.out_channels / to.groups, blocks = (per_group + to.block - 1) / to.block;
  for (int block = 0; block < blocks * to.groups; ++block)
    for (int slab = 0; slab < to.slabs; ++slab)
      for (int i = 0; i < to.inside; ++i) {
        const int place = to.places[i] & 32767, channel = block % blocks * to.block + place / to.slab;
        const long long k = static_cast<long long>(slab) * to.slab + place % to.slab;
        const long long tap = to.together > 1 ? own_tap_of(to, k, channel) : tap_of(to, k);
        const int part = to.part == 2 ? 2 + (to.places[i] >> 15) : to.part;
        const long long filter = block / blocks * to.per_group + channel * to.per_filter;
        *packed++ = channel < per_group && tap >= 0 ? part_of(w[filter + tap], part) : Element();
      }
}

// Filters in Winograd's form. down, across: the matrices G of kernel columns and rows, [tile][kernel]; without `down` rows stay as they
// are. strides: in the result, of the output channel, the input channel, row and column of the tile; of blocks of `block` output channels
// of a group first, where these are not one after the other.
struct Form {
  int out_channels, in_channels, rows, columns, groups, block, tile_rows, tile_columns;
  std::size_t strides[5];
  const double *down, *across;
};

template <typename Element>
void transform(const Form& form, const Element* w, Element* result) {
  const int per_group = form.out_channels / form.groups, blocks = (per_group + form.block - 1) / form.block;
  for (int k = 0; k < form.out_channels; ++k) {
    const int inside = k % per_group, block = k / per_group * blocks + inside / form.block;
    for (int c = 0; c < form.in_channels; ++c, w += form.rows * form.columns) {
      Element* to = result + block * form.strides[0] + inside % form.block * form.strides[1] + c * form.strides[2];
      for (int i = 0; i < form.tile_rows; ++i)
        for (int j = 0; j < form.tile_columns; ++j) {
          double sum = 0;
          for (int v = 0; v < form.columns; ++v) {
            double half = form.down ? 0 : value_of(w[i * form.columns + v]);
            if (form.down)
              for (int u = 0; u < form.rows; ++u) half += form.down[i * form.rows + u] * value_of(w[u * form.columns + v]);
            sum += half * form.across[j * form.columns + v];
          }
          store(sum, to + i * form.strides[3] + j * form.strides[4]);
        }
    }
  }
}

// Filters of int8 in Winograd's form, rounded to int8 again, with what products are multiplied by behind each block. g: [side][taps]; depth:
// channels, filled up; scales: 0 one for all filters, 1 for an output channel.
struct Quantised {
  int out_channels, in_channels, block, depth, side, taps, scales, largest, step;
  const double* g;
};

inline double element_of(const Quantised& form, const int8_t* w, int k, int c, int position) {
  const int8_t* from = w + (static_cast<std::size_t>(k) * form.in_channels + c) * form.taps * form.taps;
  const double *down = form.g + position / form.side * form.taps, *across = form.g + position % form.side * form.taps;
  double sum = 0;
  for (int u = 0; u < form.taps; ++u)
    for (int v = 0; v < form.taps; ++v) sum += down[u] * across[v] * from[u * form.taps + v];
  return sum;
}

inline float scale_of(const Quantised& form, const int8_t* w, int k, int end) {
  double most = 0;
  for (; k < end; ++k)
    for (int c = 0; c < form.in_channels; ++c)
      for (int at = 0; at < form.side * form.side; ++at) most = std::fmax(most, std::fabs(element_of(form, w, k, c, at)));
  return static_cast<float>(most / form.largest);
}

inline void quantise(const Quantised& form, const int8_t* w, int8_t* packed) {
  const int positions = form.side * form.side;
  const std::size_t values = static_cast<std::size_t>(positions) * form.block * form.depth, bytes = values + sizeof(float) * form.block;
  float scale = form.scales == 0 ? scale_of(form, w, 0, form.out_channels) : 0;
  for (int k = 0; k < form.out_channels; ++k) {
    int8_t* block = packed + k / form.block * bytes;
    if (form.scales == 1) scale = scale_of(form, w, k, k + 1);
    for (int position = 0; position < positions; ++position) {
      const std::size_t row = static_cast<std::size_t>(position) * form.block + k % form.block;
      for (int c = 0; c < form.in_channels; ++c) {
        const double whole = std::nearbyint(element_of(form, w, k, c, position) / (scale == 0 ? 1.0 : static_cast<double>(scale)));
        block[row * form.depth + c] = static_cast<int8_t>(std::fmax(std::fmin(whole, form.largest), -form.largest));
      }
    }
    const float factor = form.step * scale;
    std::memcpy(block + values + k % form.block * sizeof factor, &factor, sizeof factor);
  }
}

template <typename Element>
int check(const Element* w, std::size_t filters, const Element* packed, std::size_t elements) {
  const uintptr_t from = reinterpret_cast<uintptr_t>(w), to = reinterpret_cast<uintptr_t>(packed);
  if (!w || !packed) return IM2WIN_NULL_POINTER;
  if (from % sizeof(Element) || to % sizeof(Element)) return IM2WIN_MISALIGNED;
  return from < to + elements * sizeof(Element) && to < from + filters * sizeof(Element) ? IM2WIN_OVERLAP : IM2WIN_OK;
}

}  // namespace im2win_packing
}  // namespace
