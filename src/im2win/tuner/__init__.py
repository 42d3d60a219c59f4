"""Tuning: propose, build, verify, time, record, learn."""

from im2win.tuner.pool import Crew, crews
from im2win.tuner.session import Progress
from im2win.tuner.tuning import TuneError, tune

__all__ = ["Crew", "Progress", "TuneError", "crews", "tune"]
