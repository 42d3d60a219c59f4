"""Measurements for the papers: one study a module."""
