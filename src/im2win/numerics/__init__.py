"""Winograd's transforms and their rounding errors, and the float64 reference that kernels are checked against."""
