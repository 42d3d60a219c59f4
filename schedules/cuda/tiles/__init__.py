"""The numbers of CUDA schedules, and where the pixels of their tiles lie."""
