"""Benchmarks: im2win and its peers on the same layers, in one run."""
