"""Tuning: propose, build, verify, time, record, learn."""

from im2win.tuner.pool import Crew, crews
from im2win.tuner.session import Progress, TuneError, tune

__all__ = ["Crew", "Progress", "TuneError", "crews", "tune"]
