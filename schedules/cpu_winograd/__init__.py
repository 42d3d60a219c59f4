"""CPU schedules for Winograd convolution: strips of tiles, transformed, multiplied and transformed back beside each other in the caches."""
