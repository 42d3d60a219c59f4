/* An exported convolution as data, and what calls it; names carry the version, since a program may hold layers of several. */
#ifndef IM2WIN_LAYER_H
#define IM2WIN_LAYER_H

#include <stddef.h>
#include <stdint.h>

#define IM2WIN_MOST_TENSORS 5

/* An argument as TVM's compiled functions take it: here always a pointer to a tensor of DLPack. */
typedef struct {
  int32_t type;
  uint32_t padding;
  void *pointer;
} im2win_any;

typedef int (*im2win_kernel)(void *self, const im2win_any *arguments, int32_t count, im2win_any *result);

/* rank, shape: as the kernel takes it; elements: of them all. */
typedef struct {
  int rank;
  int64_t shape[5], elements;
} im2win_tensor;

/* tensors: of the kernel, in order: data, filter, bias and residual where the layer has them, output; all float32.
   bias: place of the bias, -1 without; filled up with zeros from `channels` to `padded_channels` a group where these differ.
   serial_bytes, task_bytes: of the workspace, for the whole call and for each of at most `threads` tasks; multiples of 64.
   instructions: whether this CPU has them. */
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
