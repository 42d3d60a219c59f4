"""The thesis' GPU ladder on the emulator: every rung, and Alg. 9 without each technique, gives exactly the convolution, and is what it says."""

from __future__ import annotations

import functools
import itertools
import re

import pytest
from emulated import Emulated, Made, differences, expected, typed
from oracle import exact_tensors

from im2win import cuda_ablation, cuda_codegen
from im2win.codegen import TileError
from im2win.gpu import H200
from im2win.problem import Conv2d
from im2win.schedules.cuda import ladder
from im2win.schedules.cuda.ladder import ALGORITHM_9, RUNGS, WITHOUT, CudaRung

THESIS = {name: rung for name, rung in {**RUNGS, **WITHOUT}.items() if not rung.production}
PROBLEMS = {
    "n2-c5x11x13-k70x3x3-p1": "primes: channels, windows and terms leave a rest; an image has an odd number of windows, so stores are single",
    "n1-c4x10x12-k66x3x3-p0.1.2.0-bias-relu": "four sides all different, stores of four",
    "n3-c3x23x27-k9x7x7-s4-p3-add": "a first layer; stores of two; blocks end inside an image",
    "n2-c8x9x10-k16x4x4": "an even kernel: a window's terms are loaded four at a time, and fill whole steps",
    "n1-c6x9x12-k12x2x3-s1x2-p1x2-d1x2": "horizontal dilation: a window is a run by columns only, which are loaded two at a time",
    "n1-c3x15x17-k4x3x3-p2-d2": "dilation, an odd kernel",
    "n1-c6x9x11-k80x3x3-p1-g2-bias-add-relu6": "groups, and the whole epilogue",
    "n1-c5x9x11-k5x3x3-s2-p1-g5": "depthwise",
    "n2-c6x7x9-k8x1x1-s2": "1x1: a sum shorter than a step",
    "n1-c1x1x1-k1x1x1": "one product",
}


@functools.cache
def made(conv: Conv2d, name: str) -> Made:
    """A rung's kernel for an H200."""
    rung = THESIS[name]
    source = cuda_codegen.generate_source(cuda_ablation.rung_module(conv, rung), H200)
    return Made(name, source, ladder.pack_of(rung), ladder.PLAN.transform_bytes(conv) // conv.itemsize)


@pytest.mark.parametrize("key", PROBLEMS)
def test_every_rung_is_exact(key: str) -> None:
    conv = Conv2d.parse(key)
    kernels = [made(conv, name) for name in THESIS]
    tensors = typed(conv, exact_tensors(conv))
    emulated = Emulated(conv, kernels)
    for seed in (0, 1):
        wrong = differences(conv, kernels, emulated(tensors, seed), expected(conv, tensors))
        assert not wrong, f"{conv}, seed {seed}:\n" + "\n".join(wrong)
