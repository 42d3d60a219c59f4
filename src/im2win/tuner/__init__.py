"""Tuning: propose, build, verify, time, record, learn."""

from im2win.tuner.session import Progress, TuneError, tune

__all__ = ["Progress", "TuneError", "tune"]
