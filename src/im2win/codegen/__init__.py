"""Generates machine code from scheduled modules: LLVM, CUDA, the reconstructor, compilers."""
