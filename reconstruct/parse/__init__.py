"""The model of generated CUDA: expressions, statements, kernels and launches."""
