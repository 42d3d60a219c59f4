/* Threads of CPU kernels: all convolutions of a program share one pool. */
#ifndef IM2WIN_THREADS_H
#define IM2WIN_THREADS_H

/* Sets the number of threads that later calls use at most, the calling thread included; a kernel never uses more than its THREADS.
   The default is the number of CPUs that the process may use. Returns IM2WIN_OK or IM2WIN_BAD_THREADS. */
int im2win_set_threads(int threads);

/* Returns the number of threads that is set. */
int im2win_threads(void);

#endif
