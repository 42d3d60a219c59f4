"""Copies of inputs and filters from global to shared memory."""
