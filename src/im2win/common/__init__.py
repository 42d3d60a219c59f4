"""Helpers for all rooms: files, locks, messages, quantities, Markdown tables, progress, TVM's hooks, worker processes."""
