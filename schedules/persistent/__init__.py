"""CUDA schedules whose thread blocks stay, with their filters in shared memory, while patches of the input pass through it."""
