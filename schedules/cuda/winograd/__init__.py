"""Winograd transforms in CUDA kernels."""
