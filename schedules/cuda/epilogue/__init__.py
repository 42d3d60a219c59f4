"""Epilogues: from accumulators to the output."""
