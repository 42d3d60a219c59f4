/* What every exported convolution shares. It may stand in any number of headers of one program. */
#ifndef IM2WIN_H
#define IM2WIN_H

/* What calls return. Nothing is computed unless it is IM2WIN_OK. */
enum im2win_status {
  IM2WIN_OK = 0,
  IM2WIN_NULL_POINTER = 1, /* an argument is NULL; only `workspace` may be, where its size is 0 */
  IM2WIN_MISALIGNED = 2,   /* a tensor does not lie at a multiple of what its kernel loads at once (CPU: of an element) */
  IM2WIN_OVERLAP = 3,      /* `y` or `packed` overlaps another argument */
  IM2WIN_WRONG_CPU = 4,    /* this CPU lacks the instructions that the kernel was made for */
  IM2WIN_BAD_THREADS = 5,  /* the number of threads is not between 1 and 1024 */
  IM2WIN_NO_MEMORY = 6,    /* packing could not allocate */
  IM2WIN_CUDA_ERROR = 7,   /* the CUDA runtime refused; cudaPeekAtLastError() says why */
  IM2WIN_DEFECT = 8        /* a defect of im2win: the kernel refused what it was called with */
};

#endif
