"""Families of CUDA schedules: tiles, legality, space, model and kernels of each under one protocol."""
