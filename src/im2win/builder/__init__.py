"""Builds operators: one, a batch of them, or from the cache."""
