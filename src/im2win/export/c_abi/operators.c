/* Convolutions as operators of ONNX Runtime in the domain im2win. Conv is Y = activation(conv(X, W) + B + Z), with B and Z where the
   kernel has them. Conv_uint8_int8 and so on, named after the types of X and Y, sum integers in int32 and convert the sums:
   Y = convert(activation(S * (conv(X, W) + B) + Z)), without S where Y holds the sums. Zeros are the kernel's own. W is packed for the
   kernel that the attribute `kernel` names. X may hold any multiple of the kernel's images, which it then computes in as many calls.
   Threads are ONNX Runtime's. */
#include "operators.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "im2win.h"
#include "onnxruntime.h"
#include "pool.h"

#define ALIGNMENT 64
#define RANK 4
#define NAME_BYTES 256

enum { DLPACK_UINT = 1, DLPACK_FLOAT = 2 };

enum { X, W, B, Z, S, INPUTS }; /* S is last, and no input of Conv */

static const char *const names[INPUTS] = {"X", "W", "B", "Z", "S"};
static const ort_api *ort;

static ort_status *failed(const ort_api *api, int code, const char *format, ...) {
  char message[768] = "im2win: ";
  size_t begin = strlen(message);
  va_list words;
  va_start(words, format);
  vsnprintf(message + begin, sizeof message - begin, format, words);
  va_end(words);
  return api->create_status(code, message);
}

/* --- threads: the functions of pool.h on ONNX Runtime's threads, for the run of a node */

typedef struct {
  im2win_pool_task task;
  void *context;
  int tasks;
  atomic_int failure;
} job;

static _Thread_local const ort_context *lender;

static void run_one(void *data, size_t task) {
  job *own = data;
  int none = 0, status = own->task(own->context, (int)task, own->tasks);
  if (status) atomic_compare_exchange_strong(&own->failure, &none, status);
}

int im2win_pool_1_run(im2win_pool_task task, void *context, int most) {
  job own = {task, context, most, 0};
  if (most < 2 || lender == NULL) return task(context, 0, 1);
  ort_status *status = ort->parallel_for(lender, run_one, (size_t)most, 0, &own);
  if (status == NULL) return atomic_load(&own.failure);
  ort->release_status(status);
  return IM2WIN_DEFECT;
}

/* --- workspaces: one for each concurrent call, kept until the last kernel is destroyed */

typedef struct workspace {
  struct workspace *next;
} workspace;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static workspace *idle;
static int kernels;

static void *take_workspace(void) {
  pthread_mutex_lock(&lock);
  workspace *one = idle;
  if (one) idle = one->next;
  pthread_mutex_unlock(&lock);
  return one ? one : aligned_alloc(ALIGNMENT, (im2win_operator_workspace + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT);
}

static void give_back(workspace *one) {
  pthread_mutex_lock(&lock);
  one->next = idle;
  idle = one;
  pthread_mutex_unlock(&lock);
}

static void destroy(void *kernel) {
  (void)kernel;
  pthread_mutex_lock(&lock);
  if (--kernels == 0)
    while (idle) {
      workspace *one = idle;
      idle = one->next;
      free(one);
    }
  pthread_mutex_unlock(&lock);
}

/* --- creating a kernel */

/* The index of the kernel's tensor for an input; -1 if it has no such input. */
static int place_of(const im2win_operator *own, int input) {
  switch (input) {
    case B: return own->layer->bias;
    case Z: return own->residual;
    case S: return own->scale;
    default: return input;
  }
}

static ort_status *check_constant(const im2win_operator *own, const ort_info *info, int input) {
  int place = place_of(own, input), is_constant = 0;
  const ort_value *value = NULL;
  ort_shape *shape = NULL;
  size_t elements = 0;
  if (place < 0) return NULL;
  ort_status *status = ort->constant(info, (size_t)input, &is_constant, &value);
  if (status != NULL) return status;
  if (!is_constant || value == NULL)
    return failed(ort, ORT_INVALID_ARGUMENT, "%s of kernel '%s' must be an initializer.", names[input], own->name);
  status = ort->shape(value, &shape);
  if (status == NULL) {
    status = ort->elements(shape, &elements);
    ort->release_shape(shape);
  }
  if (status != NULL || elements == (size_t)own->layer->tensors[place].elements) return status;
  return failed(ort, ORT_INVALID_ARGUMENT, "%s of kernel '%s' has %zu elements; it must have %lld.", names[input], own->name, elements,
                (long long)own->layer->tensors[place].elements);
}

/* An operator with the types of X and Y. */
typedef struct {
  ort_operator base;
  const char *name;
  int data, output;
} typed;

static const typed *typed_of(const ort_operator *self) { return (const typed *)(const void *)self; }

/* ONNX Runtime's code for a tensor's type. */
static int code_of(const im2win_tensor *tensor) {
  if (tensor->bits == 8) return tensor->type == DLPACK_UINT ? ORT_UINT8 : ORT_INT8;
  return tensor->type == DLPACK_FLOAT ? ORT_FLOAT : ORT_INT32;
}

static ort_status *create(const ort_operator *self, const ort_api *api, const ort_info *info, void **kernel) {
  char name[NAME_BYTES];
  size_t size = sizeof name;
  const im2win_operator *own = NULL;
  const typed *kind = typed_of(self);
  (void)api;
  ort_status *status = ort->string(info, "kernel", name, &size);
  if (status != NULL) return status;
  for (size_t i = 0; i < im2win_operator_count && own == NULL; i++)
    if (strcmp(im2win_operators[i].name, name) == 0) own = &im2win_operators[i];
  if (own == NULL)
    return failed(ort, ORT_INVALID_ARGUMENT, "kernel '%s' is not in this library; register the one that was written with the model.", name);
  if (!own->layer->instructions())
    return failed(ort, ORT_FAIL, "kernel '%s' was made for instructions that this CPU lacks; make it on this machine.", name);
  if (code_of(&own->layer->tensors[X]) != kind->data || code_of(&own->layer->tensors[own->layer->count - 1]) != kind->output)
    return failed(ort, ORT_INVALID_ARGUMENT, "kernel '%s' has other types than the operator %s.", name, kind->name);
  status = check_constant(own, info, W);
  if (status == NULL) status = check_constant(own, info, B);
  if (status == NULL) status = check_constant(own, info, S);
  if (status != NULL) return status;
  pthread_mutex_lock(&lock);
  kernels++;
  pthread_mutex_unlock(&lock);
  *kernel = (void *)(uintptr_t)own;
  return NULL;
}

/* --- running it */

static ort_status *wrong_shape(const im2win_operator *own, int input, const int64_t *sizes, size_t rank) {
  const int64_t *wanted = own->layer->tensors[place_of(own, input)].shape;
  char shape[128] = "";
  for (size_t i = 0, used = 0; i < rank && used < sizeof shape; i++)
    used += (size_t)snprintf(shape + used, sizeof shape - used, i ? ", %lld" : "%lld", (long long)sizes[i]);
  return failed(ort, ORT_INVALID_ARGUMENT,
                "%s has the shape [%s]; kernel '%s' takes [%lld, %lld, %lld, %lld] or a multiple of these images%s.", names[input], shape,
                own->name, (long long)wanted[0], (long long)wanted[1], (long long)wanted[2], (long long)wanted[3],
                input == Z ? ", as many as X has" : "");
}

/* Whether a shape is that of the kernel's tensor but for the images. Lines [N, C, L] are images of one row. */
static int fits(const int64_t *sizes, size_t rank, const int64_t *wanted) {
  if (rank == RANK - 1) return wanted[2] == 1 && sizes[1] == wanted[1] && sizes[2] == wanted[3];
  return rank == RANK && sizes[1] == wanted[1] && sizes[2] == wanted[2] && sizes[3] == wanted[3];
}

/* Checks the number of images of an input, and its rank. X sets them (`images` is -1 before), and the others must have the same. */
static ort_status *check_images(const im2win_operator *own, int input, const ort_value *value, int64_t *images, size_t *ranks) {
  const int64_t *wanted = own->layer->tensors[place_of(own, input)].shape;
  int64_t sizes[8];
  size_t rank = 0;
  ort_shape *shape = NULL;
  ort_status *status = ort->shape(value, &shape);
  if (status != NULL) return status;
  status = ort->rank(shape, &rank);
  if (rank > 8) rank = 8;
  if (status == NULL) status = ort->sizes(shape, sizes, rank);
  ort->release_shape(shape);
  if (status != NULL) return status;
  int same = *images < 0 || (sizes[0] == *images && rank == *ranks);
  if (!fits(sizes, rank, wanted) || sizes[0] % wanted[0] != 0 || !same) return wrong_shape(own, input, sizes, rank);
  *images = sizes[0], *ranks = rank;
  return NULL;
}

static const char *const reasons[] = {
    "", "a tensor is missing", "a tensor is misaligned", "the output overlaps an input", "the CPU lacks its instructions",
};

static ort_status *call(const im2win_operator *own, const void **tensors, int64_t times) {
  const im2win_layer *layer = own->layer;
  void *memory = im2win_operator_workspace ? take_workspace() : NULL;
  int status = IM2WIN_OK, images[] = {X, own->residual, layer->count - 1};
  if (im2win_operator_workspace && memory == NULL)
    return failed(ort, ORT_FAIL, "no memory for a workspace of %zu bytes.", im2win_operator_workspace);
  for (int64_t i = 0; i < times && status == IM2WIN_OK; i++) {
    status = im2win_layer_1_call(layer, tensors, memory);
    for (size_t j = 0; j < sizeof images / sizeof *images; j++)
      if (images[j] >= 0) {
        const im2win_tensor *one = &layer->tensors[images[j]];
        tensors[images[j]] = (const char *)tensors[images[j]] + one->elements * (one->bits / 8);
      }
  }
  if (memory) give_back(memory);
  if (status == IM2WIN_OK) return NULL;
  size_t known = sizeof reasons / sizeof *reasons;
  return failed(ort, ORT_FAIL, "kernel '%s': %s.", own->name, (size_t)status < known ? reasons[status] : "a defect of im2win");
}

static ort_status *compute(void *kernel, ort_context *context) {
  const im2win_operator *own = kernel;
  const im2win_layer *layer = own->layer;
  const im2win_tensor *made = &layer->tensors[layer->count - 1];
  const void *tensors[IM2WIN_MOST_TENSORS];
  int64_t images = -1;
  size_t rank = RANK;
  ort_status *status = NULL;
  for (int input = X; input < INPUTS; input++) {
    int place = place_of(own, input);
    const ort_value *value = NULL;
    void *data = NULL;
    if (place < 0) continue;
    status = ort->input(context, (size_t)input, &value);
    if (status == NULL && value == NULL) status = failed(ort, ORT_INVALID_ARGUMENT, "kernel '%s' needs %s.", own->name, names[input]);
    if (status == NULL && (input == X || input == Z)) status = check_images(own, input, value, &images, &rank);
    if (status == NULL) status = ort->data((ort_value *)(uintptr_t)value, &data);
    if (status != NULL) return status;
    tensors[place] = data;
  }
  int64_t sizes[RANK] = {images, made->shape[1], made->shape[2], made->shape[3]};
  if (rank < RANK) sizes[2] = made->shape[3];
  ort_value *output = NULL;
  void *data = NULL;
  status = ort->output(context, 0, sizes, rank, &output);
  if (status == NULL) status = ort->data(output, &data);
  if (status != NULL) return status;
  tensors[layer->count - 1] = data;
  const ort_context *before = lender;
  lender = context;
  status = call(own, tensors, images / made->shape[0]);
  lender = before;
  return status;
}

/* --- the operators */

static const char *name(const ort_operator *self) { return typed_of(self)->name; }
static const char *provider(const ort_operator *self) { return (void)self, NULL; }
static int output_type(const ort_operator *self, size_t index) { return (void)index, typed_of(self)->output; }
static int input_type(const ort_operator *self, size_t index) {
  const typed *kind = typed_of(self);
  int integers = kind->data != ORT_FLOAT;
  switch (index) {
    case X: return kind->data;
    case W: return integers ? ORT_INT8 : ORT_FLOAT;
    case B: return integers ? ORT_INT32 : ORT_FLOAT;
    case Z: return kind->output;
    default: return ORT_FLOAT;
  }
}
static size_t inputs(const ort_operator *self) { return typed_of(self)->data == ORT_FLOAT ? S : INPUTS; }
static size_t outputs(const ort_operator *self) { return (void)self, 1; }
static int input_characteristic(const ort_operator *self, size_t index) { return (void)self, index < B ? ORT_REQUIRED : ORT_OPTIONAL; }
static int output_characteristic(const ort_operator *self, size_t index) { return (void)self, (void)index, ORT_REQUIRED; }
static int memory(const ort_operator *self, size_t index) { return (void)self, (void)index, ORT_MEMORY_DEFAULT; }

/* clang-format off */
#define CONVOLUTION(called, of_data, of_output)                                                                                  \
  {{.version = ORT_VERSION, .name = name, .provider = provider, .input_type = input_type, .inputs = inputs, .outputs = outputs,   \
    .output_type = output_type, .destroy = destroy, .input_characteristic = input_characteristic,                                 \
    .output_characteristic = output_characteristic, .input_memory = memory, .create = create, .compute = compute},                \
   called, of_data, of_output}

static const typed convolutions[] = {
    CONVOLUTION("Conv", ORT_FLOAT, ORT_FLOAT),
    CONVOLUTION("Conv_uint8_uint8", ORT_UINT8, ORT_UINT8),
    CONVOLUTION("Conv_uint8_int8", ORT_UINT8, ORT_INT8),
    CONVOLUTION("Conv_uint8_float32", ORT_UINT8, ORT_FLOAT),
    CONVOLUTION("Conv_uint8_int32", ORT_UINT8, ORT_INT32),
    CONVOLUTION("Conv_int8_uint8", ORT_INT8, ORT_UINT8),
    CONVOLUTION("Conv_int8_int8", ORT_INT8, ORT_INT8),
    CONVOLUTION("Conv_int8_float32", ORT_INT8, ORT_FLOAT),
    CONVOLUTION("Conv_int8_int32", ORT_INT8, ORT_INT32),
};
/* clang-format on */

/* ONNX Runtime calls this function when the library is registered with the options of a session. */
ort_status *RegisterCustomOps(ort_options *options, const ort_base *base) {
  static ort_domain *domain; /* one for all sessions; it lives as long as the library */
  ort_domain *made = NULL;
  ort_status *status = NULL;
  const ort_api *api = base->api(ORT_VERSION);
  if (api == NULL)
    return failed(base->api(ORT_FIRST_VERSION), ORT_FAIL, "needs ONNX Runtime %s or newer; this is %s.", ORT_NEEDED, base->release());
  pthread_mutex_lock(&lock);
  if (ort == NULL) ort = api;
  if (domain == NULL) {
    status = ort->create_domain("im2win", &made);
    for (size_t i = 0; i < sizeof convolutions / sizeof *convolutions && status == NULL; i++)
      status = ort->add_operator(made, &convolutions[i].base);
    if (status == NULL) domain = made;
  }
  pthread_mutex_unlock(&lock);
  return status != NULL ? status : ort->add_domain(options, domain);
}
