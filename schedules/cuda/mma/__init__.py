"""Micro-kernels: products on CUDA cores, by `mma.sync` of a warp, and by `wgmma` of a warpgroup."""
