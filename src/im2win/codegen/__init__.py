"""From scheduled modules to machine code: LLVM, CUDA, the reconstructor, compilers."""
