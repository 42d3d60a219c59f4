/* Definitions that all exported convolutions share. Several headers of one program may contain them. */
#ifndef IM2WIN_H
#define IM2WIN_H

/* Status codes of calls. Nothing is computed unless the code is IM2WIN_OK. */
enum im2win_status {
  IM2WIN_OK = 0,
  IM2WIN_NULL_POINTER = 1, /* an argument is NULL; only `workspace` may be NULL, if its size is 0 */
  IM2WIN_MISALIGNED = 2,   /* a tensor is not aligned to the kernel's vector loads (CPU: to an element) */
  IM2WIN_OVERLAP = 3,      /* `y` or `packed` overlaps another argument */
  IM2WIN_WRONG_CPU = 4,    /* this CPU lacks instructions that the kernel uses */
  IM2WIN_BAD_THREADS = 5,  /* the number of threads is not between 1 and 1024 */
  IM2WIN_NO_MEMORY = 6,    /* packing could not allocate */
  IM2WIN_CUDA_ERROR = 7,   /* an error of the CUDA runtime, which cudaPeekAtLastError() returns */
  IM2WIN_DEFECT = 8        /* a defect of im2win: the kernel refused its arguments */
};

#endif
