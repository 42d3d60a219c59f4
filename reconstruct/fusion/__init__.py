"""Partial kernel fusion: a kernel that writes a tensor and the one that reads it, as one."""
