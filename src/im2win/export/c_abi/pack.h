/* Packs filters for CPU kernels; the layouts are those of im2win/packing/cpu_blocked.py, im2win/packing/winograd.py and
   im2win/packing/cpu_dot.py. */
#ifndef IM2WIN_PACK_H
#define IM2WIN_PACK_H

#include <stddef.h>

#define IM2WIN_MOST_TILE 16

/* block: output channels of a block; steps: elements of the sum from an input channel, kernel row and column to the next. */
typedef struct {
  int out_channels, in_channels, rows, columns, groups, block;
  size_t packed, steps[3];
} im2win_windows;

/* down, across: the matrices G of kernel columns and rows, [tile][kernel], of so many rows each; strides: in the packed tensor, of the
   channel block, the channel in it, the input channel, row and column of the tile. */
typedef struct {
  int out_channels, in_channels, rows, columns, groups, block, tile_rows, tile_columns;
  size_t packed, strides[5];
  const double *down, *across;
} im2win_transformed;

/* group: elements of a word of 32 bits; chunk, pitch: a block is [steps / chunk][block][pitch], of which the first `chunk` words are used;
   columns_first: whether words have neighbouring kernel columns instead of channels, and steps are [row][channel][word] instead of
   [row][column][word]; integers: whether filters are int8, with offsets behind them; halves: whether others are float16, else bfloat16;
   shift: what the offsets take off every input. */
typedef struct {
  int out_channels, in_channels, rows, columns, groups, block, group, chunk, pitch, columns_first, integers, halves, shift;
  size_t packed;
} im2win_dot;

/* All functions take w [out_channels, in_channels / groups, rows, columns], and return IM2WIN_OK, IM2WIN_NULL_POINTER,
   IM2WIN_MISALIGNED or IM2WIN_OVERLAP. The field in_channels counts those of a group. */
int im2win_pack_1_windows(const im2win_windows *layer, const float *w, float *packed);
int im2win_pack_1_transformed(const im2win_transformed *layer, const float *w, float *packed);
int im2win_pack_2_dot(const im2win_dot *layer, const void *w, void *packed);

#endif
