"""What tuning found out: records, the logs that hold them, and the look-up that finds the one that applies."""
