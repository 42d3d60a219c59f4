"""CUDA schedules: thread-block tiles, shared memory, register tiles, tensor cores and software pipelines."""
