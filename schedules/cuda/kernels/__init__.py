"""Kernels: a tile scheduler, loaders, a mainloop and an epilogue put together."""
