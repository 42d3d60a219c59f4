"""Analytic estimates of a tile's time, by family."""
