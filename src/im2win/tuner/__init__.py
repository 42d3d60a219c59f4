"""Tuning: propose, build, verify, time, record, learn."""

from im2win.tuner.layers import tune_layers
from im2win.tuner.pool import Pool, pools
from im2win.tuner.session import Progress
from im2win.tuner.tuning import TuneError, tune

__all__ = ["Pool", "Progress", "TuneError", "pools", "tune", "tune_layers"]
