"""Rewrites of single kernels: needless barriers, HIP."""
