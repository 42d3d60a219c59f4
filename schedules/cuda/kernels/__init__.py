"""Kernels: each combines a tile scheduler, loaders, a mainloop and an epilogue."""
