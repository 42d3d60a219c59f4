"""Winograd's transforms of tiles in CUDA kernels."""
