"""CUDA schedules of Winograd's form on tensor cores, with partial kernel fusion: the kernels of the second source document."""
