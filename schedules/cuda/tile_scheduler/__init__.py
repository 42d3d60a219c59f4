"""Tile schedulers: which thread block computes which tile of the output, or which part of its sum."""
