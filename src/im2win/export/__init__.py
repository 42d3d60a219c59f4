"""Exports built convolutions to programs without Python."""
