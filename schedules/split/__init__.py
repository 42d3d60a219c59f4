"""CUDA schedules that cut the sum itself: parts of the channels at the same time, and a kernel that adds them up (split-K)."""
