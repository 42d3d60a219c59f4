"""Tiles worth a trial, by family."""
