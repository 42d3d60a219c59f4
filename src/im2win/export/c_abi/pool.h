/* The pool of threads, between the parts of exported libraries. */
#ifndef IM2WIN_POOL_H
#define IM2WIN_POOL_H

typedef int (*im2win_pool_task)(void *context, int task, int tasks);

/* Runs task(context, i, n) for i = 0..n-1 at the same time, n at most `most` and the number of threads that is set; returns when all
   have returned, with the first result that is not 0. A caller that finds the pool at work for another one runs its task alone, n = 1.

   Exported under a name of its own version: of all libraries in a program the first one's pool serves all. */
int im2win_pool_1_run(im2win_pool_task task, void *context, int most);

#endif
