/* Two exported layers in one program, with everything their headers promise: exact sums, status codes, threads, no allocation, fork.
   Built with first.h and second.h; prints a line for each promise that does not hold. */
#define _GNU_SOURCE
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "first.h"
#include "second.h"

#define GUARD 1024 /* bytes behind the workspace */
#define CALLERS 4
#define ROUNDS 200

static int broken;

static void expect(int holds, const char *promise) {
  if (!holds) printf("broken: %s\n", promise), broken = 1;
}

#ifdef COUNT_ALLOCATIONS
static atomic_int allocations;
extern void *__libc_malloc(size_t bytes);
void *malloc(size_t bytes) {
  atomic_fetch_add(&allocations, 1);
  return __libc_malloc(bytes);
}
#endif

/* Integers from -3 to 3, the same ones for the same seed. */
static float *integers(size_t count, unsigned seed) {
  float *values = malloc((count + 1) * sizeof *values);
  for (size_t i = 0; i < count; i++) {
    seed = seed * 1664525u + 1013904223u;
    values[i] = (float)((int)(seed >> 24) % 7 - 3);
  }
  return values;
}

/* A layer's tensors, y as a plain loop says it. */
struct layer {
  float *x, *w, *bias, *residual, *packed, *right, *y;
  size_t outputs, workspace;
  char *memory;
};

#define LAYER(NAME, name)                                                                                                    \
  static void make_##name(struct layer *to, unsigned seed) {                                                                 \
    enum { C = IM2WIN_CONV_##NAME##_IN_CHANNELS, H = IM2WIN_CONV_##NAME##_HEIGHT, W = IM2WIN_CONV_##NAME##_WIDTH,             \
           K = IM2WIN_CONV_##NAME##_OUT_CHANNELS, M = IM2WIN_CONV_##NAME##_OUT_HEIGHT, N = IM2WIN_CONV_##NAME##_OUT_WIDTH,    \
           U = IM2WIN_CONV_##NAME##_KERNEL_HEIGHT, V = IM2WIN_CONV_##NAME##_KERNEL_WIDTH };                                   \
    to->outputs = IM2WIN_CONV_##NAME##_OUTPUT_ELEMENTS;                                                                      \
    to->workspace = IM2WIN_CONV_##NAME##_WORKSPACE_BYTES;                                                                    \
    to->x = integers(IM2WIN_CONV_##NAME##_INPUT_ELEMENTS, seed), to->w = integers(IM2WIN_CONV_##NAME##_FILTER_ELEMENTS, 7);   \
    to->bias = integers(K, 11), to->residual = integers(to->outputs, seed + 1), to->y = integers(to->outputs, 0);            \
    to->packed = integers(IM2WIN_CONV_##NAME##_PACKED_ELEMENTS, 0), to->right = integers(to->outputs, 0);                    \
    to->memory = malloc(to->workspace + GUARD + 1);                                                                          \
    memset(to->memory, 0x5A, to->workspace + GUARD + 1);                                                                     \
    expect(im2win_conv_##name##_pack(to->w, to->packed) == IM2WIN_OK, #name " packs");                                       \
    for (int b = 0, i = 0; b < IM2WIN_CONV_##NAME##_BATCH; b++)                                                              \
      for (int k = 0; k < K; k++)                                                                                            \
        for (int m = 0; m < M; m++)                                                                                          \
          for (int n = 0; n < N; n++, i++) {                                                                                 \
            float sum = to->bias[k] + to->residual[i];                                                                       \
            for (int c = 0; c < C; c++)                                                                                      \
              for (int u = 0; u < U; u++)                                                                                    \
                for (int v = 0; v < V; v++) {                                                                                \
                  int row = m * IM2WIN_CONV_##NAME##_STRIDE_DOWN + u - IM2WIN_CONV_##NAME##_PADDING_TOP;                      \
                  int column = n * IM2WIN_CONV_##NAME##_STRIDE_ACROSS + v - IM2WIN_CONV_##NAME##_PADDING_LEFT;                \
                  if (row >= 0 && row < H && column >= 0 && column < W)                                                      \
                    sum += to->x[((b * C + c) * H + row) * W + column] * to->w[((k * C + c) * U + u) * V + v];               \
                }                                                                                                            \
            to->right[i] = sum > 0 ? sum : 0;                                                                                \
          }                                                                                                                  \
  }                                                                                                                          \
  static int run_##name(struct layer *on) {                                                                                  \
    for (size_t i = 0; i < on->outputs; i++) on->y[i] = NAN;                                                                 \
    int status = im2win_conv_##name(on->x, on->packed, on->bias, on->residual, on->y, on->memory + 1);                       \
    return status == IM2WIN_OK && memcmp(on->y, on->right, on->outputs * sizeof(float)) == 0;                                \
  }

LAYER(FIRST, first)
LAYER(SECOND, second)

/* memcmp tells -0 from 0: a relu of -0 would show. So do writes behind the workspace. */
static int intact(const struct layer *layer) {
  for (int i = 1; i < GUARD; i++)
    if (layer->memory[layer->workspace + i] != 0x5A) return 0;
  return 1;
}

static atomic_int right;

static void *caller(void *number) {
  struct layer first, second;
  unsigned seed = (unsigned)(size_t)number;
  make_first(&first, seed);
  make_second(&second, seed);
  for (int round = 0; round < ROUNDS; round++) {
    if (seed == 0 && round % 10 == 0) im2win_set_threads(round / 10 % 5 + 1);
    atomic_fetch_add(&right, run_first(&first) + run_second(&second));
  }
  expect(intact(&first) && intact(&second), "nothing is written behind the workspace");
  return NULL;
}

static void status_codes(struct layer *on) {
#define CALL(x, packed, bias, residual, y, memory) im2win_conv_first(x, packed, bias, residual, y, memory)
  expect(CALL(NULL, on->packed, on->bias, on->residual, on->y, on->memory) == IM2WIN_NULL_POINTER, "x may not be NULL");
  expect(CALL(on->x, NULL, on->bias, on->residual, on->y, on->memory) == IM2WIN_NULL_POINTER, "packed_w may not be NULL");
  expect(CALL(on->x, on->packed, NULL, on->residual, on->y, on->memory) == IM2WIN_NULL_POINTER, "bias may not be NULL");
  expect(CALL(on->x, on->packed, on->bias, NULL, on->y, on->memory) == IM2WIN_NULL_POINTER, "residual may not be NULL");
  expect(CALL(on->x, on->packed, on->bias, on->residual, NULL, on->memory) == IM2WIN_NULL_POINTER, "y may not be NULL");
  expect(CALL(on->x, on->packed, on->bias, on->residual, on->y, NULL) == IM2WIN_NULL_POINTER, "workspace may not be NULL");
  const float *odd = (const float *)((const char *)on->x + 1);
  expect(CALL(odd, on->packed, on->bias, on->residual, on->y, on->memory) == IM2WIN_MISALIGNED, "x lies at a multiple of 4 bytes");
  expect(CALL(on->x, on->packed, on->bias, on->residual, on->x + 4, on->memory) == IM2WIN_OVERLAP, "y does not overlap x");
  expect(im2win_conv_first_pack(NULL, on->packed) == IM2WIN_NULL_POINTER, "w may not be NULL");
  expect(im2win_conv_first_pack(on->w, on->w) == IM2WIN_OVERLAP, "packed does not overlap w");
  expect(im2win_conv_first_pack(odd, on->packed) == IM2WIN_MISALIGNED, "w lies at a multiple of 4 bytes");
  expect(im2win_set_threads(0) == IM2WIN_BAD_THREADS && im2win_set_threads(1025) == IM2WIN_BAD_THREADS, "threads have bounds");
}

int main(void) {
  struct layer first, second;
  make_first(&first, 1);
  make_second(&second, 2);
  expect(im2win_threads() >= 1, "the number of threads is that of the CPUs at first");
  status_codes(&first);
  for (int threads = 1; threads < 8; threads++) {
    expect(im2win_set_threads(threads) == IM2WIN_OK && im2win_threads() == threads, "the number of threads can be set");
    expect(run_first(&first) && run_second(&second), "sums are exact with any number of threads");
  }
#ifdef COUNT_ALLOCATIONS
  int before = atomic_load(&allocations);
  for (int round = 0; round < 10; round++) run_first(&first), run_second(&second);
  expect(atomic_load(&allocations) == before, "a call allocates nothing");
#endif
  pthread_t threads[CALLERS];
  for (size_t i = 0; i < CALLERS; i++) pthread_create(&threads[i], NULL, caller, (void *)i);
  for (int i = 0; i < CALLERS; i++) pthread_join(threads[i], NULL);
  expect(atomic_load(&right) == 2 * CALLERS * ROUNDS, "several threads may call at the same time");

  im2win_set_threads(2);
  int status = 1;
  pid_t child = fork();
  if (child == 0) exit(run_first(&first) && run_second(&second) ? 0 : 1);
  waitpid(child, &status, 0);
  expect(WIFEXITED(status) && WEXITSTATUS(status) == 0, "a process made by fork may call");
  expect(run_first(&first) && run_second(&second), "and its parent afterwards");
  return broken;
}
