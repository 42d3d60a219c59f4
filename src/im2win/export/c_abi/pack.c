#include "pack.h"

#include <stdint.h>
#include <string.h>

#include "im2win.h"

static int check_all(const void *w, size_t filters, const void *packed, size_t elements, size_t bytes) {
  uintptr_t from = (uintptr_t)w, to = (uintptr_t)packed;
  if (w == NULL || packed == NULL) return IM2WIN_NULL_POINTER;
  if (from % bytes || to % bytes) return IM2WIN_MISALIGNED;
  if (from < to + elements * bytes && to < from + filters * bytes) return IM2WIN_OVERLAP;
  return IM2WIN_OK;
}

static int check(const float *w, size_t filters, const float *packed, size_t elements) {
  return check_all(w, filters, packed, elements, sizeof(float));
}

int im2win_pack_1_windows(const im2win_windows *layer, const float *w, float *packed) {
  int rows = layer->rows, columns = layer->columns, per_group = layer->out_channels / layer->groups;
  size_t taps = (size_t)rows * columns, depth = taps * layer->in_channels, block = layer->block;
  size_t blocks = (per_group + block - 1) / block; /* of a group */
  int status = check(w, layer->out_channels * depth, packed, layer->packed);
  if (status != IM2WIN_OK) return status;
  memset(packed, 0, layer->packed * sizeof(float));
  for (int k = 0; k < layer->out_channels; k++) {
    size_t inside = k % per_group, own = k / per_group * blocks + inside / block;
    float *to = packed + own * depth * block + inside % block;
    for (int c = 0; c < layer->in_channels; c++)
      for (int u = 0; u < rows; u++)
        for (int v = 0; v < columns; v++) {
          size_t k_step = c * layer->steps[0] + u * layer->steps[1] + v * layer->steps[2];
          to[k_step * block] = w[(k * (size_t)layer->in_channels + c) * taps + (size_t)u * columns + v];
        }
  }
  return IM2WIN_OK;
}

int im2win_pack_1_transformed(const im2win_transformed *layer, const float *w, float *packed) {
  int rows = layer->rows, columns = layer->columns, per_group = layer->out_channels / layer->groups;
  size_t taps = (size_t)rows * columns, block = layer->block, blocks = (per_group + block - 1) / block;
  int status = check(w, layer->out_channels * layer->in_channels * taps, packed, layer->packed);
  if (status != IM2WIN_OK) return status;
  memset(packed, 0, layer->packed * sizeof(float));
  for (int k = 0; k < layer->out_channels; k++) {
    size_t inside = k % per_group, own = k / per_group * blocks + inside / block;
    for (int c = 0; c < layer->in_channels; c++, w += taps) {
      float *to = packed + own * layer->strides[0] + inside % block * layer->strides[1] + c * layer->strides[2];
      for (int i = 0; i < layer->tile_rows; i++) {
        double half[IM2WIN_MOST_TILE] = {0}; /* a row of G g */
        for (int u = 0; u < rows; u++)
          for (int v = 0; v < columns; v++) half[v] += layer->down[i * rows + u] * w[u * columns + v];
        for (int j = 0; j < layer->tile_columns; j++) {
          double sum = 0;
          for (int v = 0; v < columns; v++) sum += half[v] * layer->across[j * columns + v];
          to[i * layer->strides[3] + j * layer->strides[4]] = (float)sum;
        }
      }
    }
  }
  return IM2WIN_OK;
}

/* The bits of a float16 as those of a float32. */
static uint32_t widened(uint16_t bits) {
  uint32_t sign = (uint32_t)(bits & 0x8000) << 16, rest = (uint32_t)(bits & 0x7FFF) << 13, exponent = bits & 0x7C00;
  if (exponent == 0x7C00) return sign | 0x7F800000 | rest; /* infinite, or not a number */
  if (exponent) return sign | (rest + (112u << 23));
  float small = (float)(bits & 0x3FF) * 0x1p-24f; /* zero, or below the normal numbers */
  memcpy(&rest, &small, sizeof rest);
  return sign | rest;
}

/* Stores a filter element as the element of a word that the kernel's instruction multiplies. */
static void store(const im2win_dot *layer, const void *w, size_t from, unsigned char *to) {
  if (!layer->integers) {
    uint16_t bits = ((const uint16_t *)w)[from];
    uint32_t wide = layer->halves ? widened(bits) : (uint32_t)bits << 16; /* a float32 */
    if (layer->group == 2)
      memcpy(to, &bits, sizeof bits);
    else
      memcpy(to, &wide, sizeof wide);
    return;
  }
  int8_t byte = ((const int8_t *)w)[from];
  int16_t half = byte;
  int32_t whole = byte;
  if (layer->group == 4)
    memcpy(to, &byte, sizeof byte);
  else if (layer->group == 2)
    memcpy(to, &half, sizeof half);
  else
    memcpy(to, &whole, sizeof whole);
}

int im2win_pack_2_dot(const im2win_dot *layer, const void *w, void *packed) {
  size_t taps = (size_t)layer->rows * layer->columns, depth = taps * layer->in_channels, block = layer->block;
  size_t group = layer->group, chunk = layer->chunk, pitch = layer->pitch, element = 4 / group;
  size_t channels = layer->in_channels, columns = layer->columns;
  size_t words = ((layer->columns_first ? columns : channels) + group - 1) / group; /* of a kernel row and channel, or of a tap */
  size_t steps = words * layer->rows * (layer->columns_first ? channels : columns);
  size_t stored = steps / chunk * pitch; /* words of a channel */
  size_t per_group = layer->out_channels / layer->groups, blocks = (per_group + block - 1) / block;
  size_t bytes = layer->integers ? 1 : 2;
  int status = check_all(w, layer->out_channels * depth, packed, layer->packed, bytes);
  if (status != IM2WIN_OK) return status;
  memset(packed, 0, layer->packed * bytes);
  for (size_t own = 0; own < layer->groups * blocks; own++) {
    size_t inside = own % blocks * block, first = own / blocks * per_group + (inside + block > per_group ? per_group - block : inside);
    unsigned char *start = (unsigned char *)packed + own * (stored + (layer->integers != 0)) * block * 4;
    for (size_t j = 0; j < block; j++) {
      size_t from = (first + j) * depth;
      uint32_t sum = 0;
      for (size_t c = 0; c < channels; c++)
        for (size_t tap = 0; tap < taps; tap++, from++) {
          size_t step = tap * words + c / group, place = c % group;
          if (layer->columns_first) {
            step = (tap / columns * channels + c) * words + tap % columns / group;
            place = tap % columns % group;
          }
          store(layer, w, from, start + ((step / chunk * block + j) * pitch + step % chunk) * 4 + place * element);
          if (layer->integers) sum += (uint32_t)((const int8_t *)w)[from];
        }
      uint32_t offset = (uint32_t)-layer->shift * sum;
      if (layer->integers) memcpy(start + (stored * block + j) * 4, &offset, sizeof offset);
    }
  }
  return IM2WIN_OK;
}
