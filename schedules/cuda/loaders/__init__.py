"""Loaders: copies of windows and filters from global to shared memory."""
