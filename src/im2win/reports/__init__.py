"""Turns committed results into tables and plots."""
