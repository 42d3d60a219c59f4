"""Validators of rewritten sources, and the barrier search that asks them."""
