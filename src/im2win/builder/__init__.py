"""Building operators: one, many at once, or from the cache."""
