"""Schedules that papers describe, which only studies measure."""
