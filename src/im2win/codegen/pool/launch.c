/* Parallel loops of a kernel in a process with TVM's runtime, on the pool instead of TVM's threads.

   TVM binds its threads to CPUs and gives each thread one equal part of a loop. A part then waits where another program, or the spinning
   threads of another library, use its CPU. Here threads are not bound, and a loop has many parts. Each thread takes those of its own range
   in order, then others' from the end on. So a thread computes the same part of a tensor in each call, and mostly reads what it wrote in
   the layer before, which its level-2 cache may still hold. */
#include "pool.c"

#define PARTS 32 /* of a loop for each thread; parts beyond a loop's length cost some nanoseconds */

struct group { /* the argument of a loop's body in TVM's kernels */
  void *handle;
  int32_t parts;
};

typedef int (*loop)(int part, struct group *group, void *data);

struct range { /* the first part and the one behind the last that nobody has taken, in one word; on a cache line of its own */
  _Alignas(64) _Atomic uint64_t left;
};

struct job {
  loop body;
  void *data;
  int parts, ranges;
  struct range *range;
};

/* Takes the first part of a range, or the last one. Returns -1 if none is left. */
static int taken(struct range *range, int last) {
  uint64_t left = atomic_load_explicit(&range->left, memory_order_relaxed);
  for (;;) {
    uint32_t begin = (uint32_t)left, end = (uint32_t)(left >> 32);
    if (begin >= end) return -1;
    uint64_t rest = last ? (uint64_t)(end - 1) << 32 | begin : (uint64_t)end << 32 | (begin + 1);
    if (atomic_compare_exchange_weak_explicit(&range->left, &left, rest, memory_order_relaxed, memory_order_relaxed))
      return (int)(last ? end - 1 : begin);
  }
}

static int share(void *given, int task, int tasks) {
  (void)tasks;
  struct job *job = given;
  struct group group = {NULL, job->parts};
  for (int i = 0; i < job->ranges; i++)
    for (int part; (part = taken(&job->range[(task + i) % job->ranges], i > 0)) >= 0;) {
      int status = job->body(part, &group, job->data);
      if (status) return status;
    }
  return 0;
}

/* Replaces TVMBackendParallelLaunch: runs a loop in so many parts, or in as many as are worth while if 0. Returns 0, or a failed part's
   result. */
int im2win_launch(loop body, void *data, int parts) {
  int threads = im2win_threads();
  if (parts <= 0) parts = threads > 1 ? threads * PARTS : 1;
  struct range range[threads];
  for (int i = 0; i < threads; i++) {
    uint64_t begin = (uint64_t)parts * i / threads, end = (uint64_t)parts * (i + 1) / threads;
    atomic_init(&range[i].left, end << 32 | begin);
  }
  struct job job = {body, data, parts, threads, range};
  return im2win_pool_1_run(share, &job, threads);
}
