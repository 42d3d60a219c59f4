"""Cost models: analytic estimates of a tile's time, by family."""
