"""CPU schedules of Winograd: blocks of tile rows are transformed, multiplied and transformed back within a core's caches."""
