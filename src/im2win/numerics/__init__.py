"""Winograd's transforms and their errors, and the float64 reference that kernels are checked against."""
