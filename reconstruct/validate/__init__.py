"""Checks of rewritten sources, and the search that asks them."""
