/* Calls a kernel that TVM compiled, in place of TVM's runtime: no tensor objects, no heap, threads from the pool. */
#include "layer.h"

#include <string.h>

#include "im2win.h"
#include "pool.h"

#define ALIGNMENT 64
#define ROUNDED(bytes) (((bytes) + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT)

enum { DLPACK_CPU = 1, TVM_DLTENSOR = 7 };

/* DLPack's tensor. */
typedef struct {
  void *data;
  struct {
    int32_t type, id;
  } device;
  int32_t rank;
  struct {
    uint8_t code, bits;
    uint16_t lanes;
  } dtype;
  const int64_t *shape, *strides;
  uint64_t byte_offset;
} dlpack_tensor;

/* The argument of a parallel loop's body: the number of threads that share the loop. */
typedef struct {
  void *unused;
  int32_t tasks;
} parallel_group;

typedef int (*parallel_body)(int task, parallel_group *group, void *captured);

/* A call: the address of the tasks' parts of the workspace. */
typedef struct {
  const im2win_layer *layer;
  char *tasks;
} call;

typedef struct {
  parallel_body body;
  void *captured;
  const call *call;
} parallel_loop;

/* The part of the workspace that this thread may still allocate, as a stack. */
static _Thread_local struct {
  char *top, *end;
  const call *call;
} arena;

static void *allocate(int device_type, int device, uint64_t bytes, int code, int bits) {
  (void)device_type, (void)device, (void)code, (void)bits;
  if (ROUNDED(bytes) > (size_t)(arena.end - arena.top)) return NULL;
  char *start = arena.top;
  arena.top += ROUNDED(bytes);
  return start;
}

static int release(int device_type, int device, void *start) {
  (void)device_type, (void)device;
  arena.top = start;
  return 0;
}

static int run_task(void *context, int task, int tasks) {
  const parallel_loop *loop = context;
  parallel_group group = {NULL, tasks};
  arena.call = loop->call;
  arena.top = loop->call->tasks + (size_t)task * loop->call->layer->task_bytes;
  arena.end = arena.top + loop->call->layer->task_bytes;
  return loop->body(task, &group, loop->captured);
}

static int launch(parallel_body body, void *captured, int tasks) {
  parallel_loop loop = {body, captured, arena.call};
  char *top = arena.top, *end = arena.end;
  int threads = arena.call->layer->threads;
  int status = im2win_pool_1_run(run_task, &loop, tasks > 0 && tasks < threads ? tasks : threads);
  arena.top = top;
  arena.end = end;
  return status;
}

/* The functions that compiled kernels call, and the one to which they report a refused argument. */
void *(*__TVMBackendAllocWorkspace)(int, int, uint64_t, int, int) = allocate;
int (*__TVMBackendFreeWorkspace)(int, int, void *) = release;
int (*__TVMBackendParallelLaunch)(parallel_body, void *, int) = launch;

void TVMFFIErrorSetRaisedFromCStrParts(const char *kind, const char **parts, int32_t count) {
  (void)kind, (void)parts, (void)count;
}

static size_t element_bytes(const im2win_tensor *one) { return one->bits / 8; }

static int overlap(const void *one, const im2win_tensor *of_one, const void *other, const im2win_tensor *of_other) {
  uintptr_t a = (uintptr_t)one, b = (uintptr_t)other;
  return a < b + (uintptr_t)of_other->elements * element_bytes(of_other) && b < a + (uintptr_t)of_one->elements * element_bytes(of_one);
}

static int check(const im2win_layer *layer, const void *const *tensors, size_t needed, const void *workspace) {
  int output = layer->count - 1;
  for (int i = 0; i < layer->count; i++)
    if (tensors[i] == NULL) return IM2WIN_NULL_POINTER;
  if (needed && workspace == NULL) return IM2WIN_NULL_POINTER;
  for (int i = 0; i < layer->count; i++)
    if ((uintptr_t)tensors[i] % element_bytes(&layer->tensors[i])) return IM2WIN_MISALIGNED;
  for (int i = 0; i < output; i++)
    if (overlap(tensors[i], &layer->tensors[i], tensors[output], &layer->tensors[output])) return IM2WIN_OVERLAP;
  return layer->instructions() ? IM2WIN_OK : IM2WIN_WRONG_CPU;
}

static void pad_bias(const im2win_layer *layer, const float *bias, float *padded) {
  for (int group = 0; group < layer->groups; group++) {
    float *start = padded + (size_t)group * layer->padded_channels;
    memcpy(start, bias + (size_t)group * layer->channels, (size_t)layer->channels * sizeof(float));
    memset(start + layer->channels, 0, (size_t)(layer->padded_channels - layer->channels) * sizeof(float));
  }
}

int im2win_layer_1_call(const im2win_layer *layer, const void *const *tensors, void *workspace) {
  int pads = layer->bias >= 0 && layer->channels != layer->padded_channels;
  size_t bias_bytes = pads ? ROUNDED((size_t)layer->groups * layer->padded_channels * sizeof(float)) : 0;
  int status = check(layer, tensors, bias_bytes + layer->serial_bytes + layer->task_bytes, workspace);
  if (status != IM2WIN_OK) return status;

  char *start = (char *)ROUNDED((uintptr_t)workspace);
  char *serial = start + bias_bytes;
  call this_call = {layer, serial + layer->serial_bytes};
  dlpack_tensor views[IM2WIN_MOST_TENSORS];
  im2win_any arguments[IM2WIN_MOST_TENSORS], result = {0, 0, NULL};
  for (int i = 0; i < layer->count; i++) {
    const im2win_tensor *one = &layer->tensors[i];
    void *data = (void *)(uintptr_t)tensors[i];
    if (pads && i == layer->bias) {
      pad_bias(layer, tensors[i], (float *)start);
      data = start;
    }
    views[i] = (dlpack_tensor){data, {DLPACK_CPU, 0}, one->rank, {one->type, one->bits, 1}, one->shape, NULL, 0};
    arguments[i] = (im2win_any){TVM_DLTENSOR, 0, &views[i]};
  }
  arena.call = &this_call;
  arena.top = serial;
  arena.end = this_call.tasks;
  return layer->kernel(NULL, arguments, layer->count, &result) == 0 ? IM2WIN_OK : IM2WIN_DEFECT;
}
