"""Tuning: propose, build, verify, time, record, learn."""

from im2win.tuner.session import Crew, Progress, TuneError, crews, tune

__all__ = ["Crew", "Progress", "TuneError", "crews", "tune"]
