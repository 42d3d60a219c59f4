#include "pack.h"

#include <stdint.h>
#include <string.h>

#include "im2win.h"

static int check(const float *w, size_t filters, const float *packed, size_t elements) {
  uintptr_t from = (uintptr_t)w, to = (uintptr_t)packed;
  if (w == NULL || packed == NULL) return IM2WIN_NULL_POINTER;
  if (from % sizeof(float) || to % sizeof(float)) return IM2WIN_MISALIGNED;
  if (from < to + elements * sizeof(float) && to < from + filters * sizeof(float)) return IM2WIN_OVERLAP;
  return IM2WIN_OK;
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
