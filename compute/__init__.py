"""Tensor-expression definitions, one algorithm a file; pure: no target, no schedule."""
