"""Tensor-expression definitions of the algorithms, one a file, without target or schedule."""
