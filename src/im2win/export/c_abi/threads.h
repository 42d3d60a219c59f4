/* Threads of kernels on CPUs: one pool for all convolutions that a program is linked with. */
#ifndef IM2WIN_THREADS_H
#define IM2WIN_THREADS_H

/* Lets every later call use at most so many threads, the calling one among them; a kernel never takes more than its THREADS.
   At first: the CPUs that the process may use. Returns IM2WIN_OK or IM2WIN_BAD_THREADS. */
int im2win_set_threads(int threads);

/* The number that is set. */
int im2win_threads(void);

#endif
