"""Legality: the rules that tiles must obey, by family."""
