"""Schedules that papers describe and studies measure."""
