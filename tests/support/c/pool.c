/* The pool of threads alone, many more tasks than CPUs, several callers: every task runs once, results come back, nothing races. */
#include "pool.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>

#include "im2win.h"
#include "threads.h"

#define CALLERS 3
#define ROUNDS 500
#define MOST 12

/* times: how often each task ran, each counted by its own thread alone; failing: the task that fails, or -1. */
struct work {
  int times[MOST], tasks, failing;
};

static atomic_int broken, together;

static int count(void *context, int task, int tasks) {
  struct work *work = context;
  work->times[task]++;
  if (task == 0) work->tasks = tasks;
  if (tasks > 1) atomic_store(&together, 1);
  return task == work->failing ? 77 : 0;
}

static void *call(void *unused) {
  for (int round = 0; round < ROUNDS; round++) {
    struct work work = {.failing = round % 3 ? -1 : round % 5};
    int status = im2win_pool_1_run(count, &work, round % MOST + 1);
    for (int i = 0; i < MOST; i++)
      if (work.times[i] != (i < work.tasks)) atomic_store(&broken, 1);
    if (status != (work.failing >= 0 && work.failing < work.tasks ? 77 : 0)) atomic_store(&broken, 2);
  }
  return unused;
}

int main(void) {
  pthread_t callers[CALLERS];
  if (im2win_set_threads(MOST) != IM2WIN_OK) return 3;
  for (int i = 0; i < CALLERS; i++) pthread_create(&callers[i], NULL, call, NULL);
  for (int i = 0; i < CALLERS; i++) pthread_join(callers[i], NULL);
  if (!atomic_load(&together)) return 4;
  return atomic_load(&broken);
}
