"""Benchmarks: us and our peers on the same layers, in one run."""
