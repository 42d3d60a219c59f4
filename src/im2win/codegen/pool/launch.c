/* Parallel loops of a kernel in a process with TVM's runtime, on the pool instead of TVM's threads.

   TVM binds its threads to CPUs and gives each thread one equal part of a loop. A part then waits where another program, or the spinning
   threads of another library, use its CPU. Here threads are not bound, and a loop has many parts, which threads take one after the other. */
#include "pool.c"

#define PARTS 32 /* of a loop for each thread; parts beyond a loop's length cost some nanoseconds */

struct group { /* the argument of a loop's body in TVM's kernels */
  void *handle;
  int32_t parts;
};

typedef int (*loop)(int part, struct group *group, void *data);

struct job {
  loop body;
  void *data;
  int parts;
  atomic_int next;
};

static int share(void *given, int task, int tasks) {
  (void)task, (void)tasks;
  struct job *job = given;
  struct group group = {NULL, job->parts};
  for (int part; (part = atomic_fetch_add_explicit(&job->next, 1, memory_order_relaxed)) < job->parts;) {
    int status = job->body(part, &group, job->data);
    if (status) return status;
  }
  return 0;
}

/* Replaces TVMBackendParallelLaunch: runs a loop in so many parts, or in as many as are worth while if 0. Returns 0, or a failed part's
   result. */
int im2win_launch(loop body, void *data, int parts) {
  int threads = im2win_threads();
  struct job job = {body, data, parts > 0 ? parts : threads > 1 ? threads * PARTS : 1, 0};
  return im2win_pool_1_run(share, &job, threads);
}
