"""Schedules and their spaces: how a definition runs on a target."""
