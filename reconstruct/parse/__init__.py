"""Parsing of generated CUDA into expressions, statements, kernels and launches."""
