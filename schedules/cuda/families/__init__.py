"""Families of CUDA schedules: each combines tiles, legality, space, model and kernels under one protocol."""
