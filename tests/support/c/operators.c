/* The operator with a stand-in for ONNX Runtime and for a kernel: kernels made, run and destroyed by several threads; nothing races. */
#include "operators.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "im2win.h"
#include "onnxruntime.h"

#define CALLERS 4
#define ROUNDS 200
#define TASKS 3
#define IMAGE 6   /* elements: 2 channels of 1 x 3 */
#define IMAGES 5

/* --- a kernel: y = x + w[0] + residual, in tasks that each write what they add into their own workspace first */

typedef struct {
  void *unused;
  int32_t tasks;
} group;

extern void *(*__TVMBackendAllocWorkspace)(int, int, uint64_t, int, int);
extern int (*__TVMBackendFreeWorkspace)(int, int, void *);
extern int (*__TVMBackendParallelLaunch)(int (*)(int, group *, void *), void *, int);

static const float *data_of(const im2win_any *argument) { return *(const float *const *)argument->pointer; }

static int add(int task, group *all, void *captured) {
  const im2win_any *arguments = captured;
  float *own = __TVMBackendAllocWorkspace(1, 0, sizeof(float) * IMAGE, 2, 32), *y = (float *)(uintptr_t)data_of(&arguments[3]);
  if (own == NULL) return 1;
  for (int i = task; i < IMAGE; i += all->tasks) own[i] = data_of(&arguments[1])[0] + data_of(&arguments[2])[i];
  for (int i = task; i < IMAGE; i += all->tasks) y[i] = data_of(&arguments[0])[i] + own[i];
  return __TVMBackendFreeWorkspace(1, 0, own);
}

static int kernel(void *self, const im2win_any *arguments, int32_t count, im2win_any *result) {
  (void)self, (void)count, (void)result;
  return __TVMBackendParallelLaunch(add, (void *)(uintptr_t)arguments, 0);
}

static atomic_int instructions_lack;
static int instructions(void) { return !atomic_load(&instructions_lack); }

static const im2win_layer layer = {
    kernel, 4, -1, 1, 2, 2, TASKS, 0, 64,
    {{4, {1, 2, 1, 3}, IMAGE, 2, 32}, {3, {1, 1, 2}, 2, 2, 32}, {4, {1, 2, 1, 3}, IMAGE, 2, 32}, {4, {1, 2, 1, 3}, IMAGE, 2, 32}},
    instructions,
};
const im2win_operator im2win_operators[] = {{"other", &layer, -1, 2}, {"one", &layer, -1, 2}};
const size_t im2win_operator_count = 2, im2win_operator_workspace = TASKS * 64 + 63;

/* --- ONNX Runtime */

struct ort_value {
  float *data;
  size_t rank;
  int64_t sizes[4];
};
struct ort_context {
  struct ort_value *inputs[4], *output;
  int refuses;
};
struct ort_status {
  char message[256];
};
struct ort_info {
  const char *kernel;
  struct ort_value *filter;
};

static const ort_operator *registered, *of_integers; /* Conv, and the last one */
static atomic_int domains, together;

static ort_status *create_status(int code, const char *message) {
  ort_status *made = calloc(1, sizeof *made);
  (void)code;
  strncpy(made->message, message, sizeof made->message - 1);
  return made;
}
static void release_status(ort_status *status) { free(status); }
static ort_status *create_domain(const char *name, ort_domain **made) {
  atomic_fetch_add(&domains, 1);
  *made = (ort_domain *)(uintptr_t)name;
  return NULL;
}
static ort_status *add_operator(ort_domain *domain, const ort_operator *one) {
  (void)domain;
  if (strcmp(one->name(one), "Conv") == 0) registered = one;
  of_integers = one;
  return NULL;
}
static ort_status *add_domain(ort_options *options, ort_domain *domain) { return (void)options, (void)domain, NULL; }
static ort_status *data(ort_value *value, void **out) { return *out = value->data, NULL; }
static ort_status *rank(const ort_shape *shape, size_t *out) { return *out = ((const ort_value *)shape)->rank, NULL; }
static ort_status *sizes(const ort_shape *shape, int64_t *out, size_t count) {
  return memcpy(out, ((const ort_value *)shape)->sizes, count * sizeof *out), NULL;
}
static ort_status *elements(const ort_shape *shape, size_t *count) { return *count = (size_t)((const ort_value *)shape)->sizes[0], NULL; }
static ort_status *shape(const ort_value *value, ort_shape **out) { return *out = (ort_shape *)(uintptr_t)value, NULL; }
static void release_shape(ort_shape *shape) { (void)shape; }
static ort_status *string(const ort_info *info, const char *attribute, char *text, size_t *size) {
  (void)attribute;
  return strncpy(text, info->kernel, *size), NULL;
}
static ort_status *input(const ort_context *context, size_t index, const ort_value **value) {
  return *value = context->inputs[index], NULL;
}
static ort_status *output(ort_context *context, size_t index, const int64_t *wanted, size_t count, ort_value **value) {
  (void)index, (void)wanted, (void)count;
  return *value = context->output, NULL;
}
static ort_status *constant(const ort_info *info, size_t index, int *is_constant, const ort_value **value) {
  (void)index;
  return *is_constant = info->filter != NULL, *value = info->filter, NULL;
}

struct share {
  void (*task)(void *, size_t);
  void *data;
  size_t index;
};
static void *run_share(void *own) {
  struct share *share = own;
  return share->task(share->data, share->index), NULL;
}
static ort_status *parallel_for(const ort_context *context, void (*task)(void *, size_t), size_t count, size_t batches, void *given) {
  pthread_t threads[TASKS];
  struct share shares[TASKS];
  (void)batches;
  if (context->refuses || count > TASKS) return create_status(1, "refused");
  for (size_t i = 0; i < count; i++) {
    shares[i] = (struct share){task, given, i};
    if (i) pthread_create(&threads[i], NULL, run_share, &shares[i]);
  }
  run_share(&shares[0]);
  for (size_t i = 1; i < count; i++) pthread_join(threads[i], NULL);
  if (count > 1) atomic_store(&together, 1);
  return NULL;
}

static const ort_api table = {
    .create_status = create_status, .create_domain = create_domain, .add_operator = add_operator, .add_domain = add_domain, .data = data,
    .rank = rank, .sizes = sizes, .elements = elements, .shape = shape, .string = string, .input = input, .output = output,
    .release_status = release_status, .release_shape = release_shape, .constant = constant, .parallel_for = parallel_for,
};
static const ort_api *api(uint32_t version) { return version == ORT_VERSION ? &table : NULL; }
static const char *release(void) { return "0.0"; }

ort_status *RegisterCustomOps(ort_options *options, const ort_base *base);

/* --- what is tested */

static float filter_data[2] = {10, 0};
static struct ort_value filter = {filter_data, 1, {2}};

static int says(ort_status *status, const char *words) {
  int said = status != NULL && strstr(status->message, words) != NULL;
  if (status != NULL && !said) fprintf(stderr, "%s\n", status->message);
  free(status);
  return said;
}

static void *call(void *failures) {
  const ort_base base = {api, release};
  const ort_info info = {"one", &filter};
  for (int round = 0; round < ROUNDS; round++) {
    float x[IMAGES * IMAGE], z[IMAGES * IMAGE], y[IMAGES * IMAGE];
    int64_t images = round % (IMAGES + 1);
    struct ort_value values[] = {{x, 4, {images, 2, 1, 3}}, {z, 4, {images, 2, 1, 3}}, {y, 4, {images, 2, 1, 3}}};
    ort_context context = {{&values[0], &filter, NULL, &values[1]}, &values[2], 0};
    void *made = NULL;
    for (int i = 0; i < IMAGES * IMAGE; i++) x[i] = (float)(i + round), z[i] = (float)(i % 7), y[i] = -1;
    ort_status *status = RegisterCustomOps(NULL, &base);
    if (status == NULL) status = registered->create(registered, &table, &info, &made);
    if (status == NULL) status = registered->compute(made, &context);
    for (int i = 0; i < IMAGES * IMAGE; i++)
      if (y[i] != (i < images * IMAGE ? x[i] + z[i] + 10 : -1)) atomic_fetch_add((atomic_int *)failures, 1);
    if (status != NULL) atomic_fetch_add((atomic_int *)failures, 1);
    registered->destroy(made);
  }
  return NULL;
}

static int refusals(void) {
  float x[2 * IMAGE] = {0}, y[2 * IMAGE];
  struct ort_value one = {x, 4, {1, 2, 1, 3}}, two = {x, 4, {2, 2, 1, 3}}, turned = {x, 4, {1, 2, 3, 1}}, out = {y, 4, {1, 2, 1, 3}};
  ort_context apart = {{&one, &filter, NULL, &two}, &out, 0}, other = {{&turned, &filter, NULL, &one}, &out, 0};
  ort_context without = {{&one, &filter, NULL, NULL}, &out, 0}, over = {{&one, &filter, NULL, &one}, &one, 0};
  ort_context refused = {{&one, &filter, NULL, &one}, &out, 1};
  const ort_info unknown = {"none", &filter}, fed = {"one", NULL}, known = {"one", &filter};
  void *made = NULL;
  if (!says(registered->create(registered, &table, &unknown, &made), "'none' is not in this library")) return 1;
  if (!says(registered->create(registered, &table, &fed, &made), "W of kernel 'one' must be an initializer")) return 2;
  atomic_store(&instructions_lack, 1);
  if (!says(registered->create(registered, &table, &known, &made), "instructions that this CPU lacks")) return 3;
  atomic_store(&instructions_lack, 0);
  if (registered->create(registered, &table, &known, &made) != NULL) return 4;
  if (!says(registered->compute(made, &apart), "Z has the shape [2, 2, 1, 3]")) return 5;
  if (!says(registered->compute(made, &other), "X has the shape [1, 2, 3, 1]; kernel 'one' takes [1, 2, 1, 3] or a multiple")) return 6;
  if (!says(registered->compute(made, &without), "kernel 'one' needs Z")) return 7;
  if (!says(registered->compute(made, &over), "the output overlaps an input")) return 8;
  if (!says(registered->compute(made, &refused), "a defect of im2win")) return 9;
  registered->destroy(made);
  if (registered->inputs(registered) != 4 || of_integers->inputs(of_integers) != 5) return 10;
  if (!says(of_integers->create(of_integers, &table, &known, &made), "other types than the operator Conv_int8_int32")) return 11;
  return 0;
}

int main(void) {
  pthread_t callers[CALLERS];
  atomic_int failures = 0;
  for (int i = 0; i < CALLERS; i++) pthread_create(&callers[i], NULL, call, &failures);
  for (int i = 0; i < CALLERS; i++) pthread_join(callers[i], NULL);
  if (atomic_load(&failures)) return 20;
  if (atomic_load(&domains) != 1 || !atomic_load(&together)) return 21;
  return refusals();
}
