"""CUDA schedules whose thread blocks stay, while filters and patches of the input pass through shared memory in steps."""
