/* An exported convolution as data, and the function that calls it. Names carry a version, since a program may link layers of several. */
#ifndef IM2WIN_LAYER_H
#define IM2WIN_LAYER_H

#include <stddef.h>
#include <stdint.h>

#define IM2WIN_MOST_TENSORS 6

/* An argument of TVM's compiled functions: here always a pointer to a DLPack tensor. */
typedef struct {
  int32_t type;
  uint32_t padding;
  void *pointer;
} im2win_any;

typedef int (*im2win_kernel)(void *self, const im2win_any *arguments, int32_t count, im2win_any *result);

/* rank, shape: as the kernel expects them; elements: number of elements; type, bits: DLPack's code and the width of an element. */
typedef struct {
  int rank;
  int64_t shape[5], elements;
  uint8_t type, bits;
} im2win_tensor;

/* tensors: of the kernel, in order: data, filter, bias, scale and residual if the layer has them, output.
   bias: index of the bias, or -1; each group of a float32 one is padded with zeros from `channels` to `padded_channels`.
   serial_bytes, task_bytes: of the workspace, for the whole call and for each of at most `threads` tasks; multiples of 64.
   instructions: returns whether this CPU has the kernel's instructions. */
typedef struct {
  im2win_kernel kernel;
  int count, bias, groups, channels, padded_channels, threads;
  size_t serial_bytes, task_bytes;
  im2win_tensor tensors[IM2WIN_MOST_TENSORS];
  int (*instructions)(void);
} im2win_layer;

/* Calls the kernel on tensors in its order. */
int im2win_layer_1_call(const im2win_layer *layer, const void *const *tensors, void *workspace);

#endif
