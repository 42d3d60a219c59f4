"""CUDA schedules: block tiles, shared memory, register tiles and tensor cores, software pipelines."""
