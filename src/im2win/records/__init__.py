"""Tuning records: the records themselves, the logs that hold them, and the look-up that finds the one that applies."""
