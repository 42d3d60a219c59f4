"""Helpers for all rooms: files, locks, messages, Markdown tables, TVM's hooks, worker processes."""
