"""CUDA schedules whose thread blocks stay: filters in shared memory for good, patches of the input through it, products that read both there."""
