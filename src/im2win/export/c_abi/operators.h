/* The kernels of a library of operators for ONNX Runtime. */
#ifndef IM2WIN_OPERATORS_H
#define IM2WIN_OPERATORS_H

#include <stddef.h>

#include "layer.h"

/* name: value of the attribute `kernel` of the nodes that it computes.
   scale, residual: indices of these tensors of the layer, or -1. */
typedef struct {
  const char *name;
  const im2win_layer *layer;
  int scale, residual;
} im2win_operator;

/* All operators, their number, and the bytes of a workspace that is large enough for each of them. */
extern const im2win_operator im2win_operators[];
extern const size_t im2win_operator_count, im2win_operator_workspace;

#endif
