"""Rewrites of single kernels: deletion of needless barriers, translation to HIP."""
