"""Tuning: propose, build, verify, time, record, learn."""
