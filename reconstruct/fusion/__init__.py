"""Partial kernel fusion: one kernel replaces the kernel that writes a tensor and the kernel that reads it."""
