"""From accumulators to the output."""
