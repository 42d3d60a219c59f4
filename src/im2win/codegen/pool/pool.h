/* The thread pool, as exported libraries use it internally. */
#ifndef IM2WIN_POOL_H
#define IM2WIN_POOL_H

typedef int (*im2win_pool_task)(void *context, int task, int tasks);

/* Runs task(context, i, n) for i = 0..n-1 in parallel. n is at most `most` and the number of threads that is set. Returns when all tasks
   have returned, with the first result that is not 0. If the pool is busy for another caller, the task runs alone, with n = 1.

   The exported name carries a version. All libraries of a program use the pool of the first one. */
int im2win_pool_1_run(im2win_pool_task task, void *context, int most);

#endif
