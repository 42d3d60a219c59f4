"""Runs one small kernel of every kind once, for compute-sanitizer: every way to take windows, every arithmetic, both layouts."""

from __future__ import annotations

import random

import im2win
from im2win import Conv2d
from im2win.algorithms import ALGORITHMS
from im2win.backends import backend_for
from im2win.gpu import device_gpu
from im2win.tuner.cuda_runner import device_tensors, reference

KEYS = ("n2-c40x13x14-k48x3x3-p1", "n1-c3x31x33-k32x5x5-s2-p2")


def main() -> None:
    backend, rng = backend_for(device_gpu(), "tf32"), random.Random(0)
    for key in KEYS:
        for dtype in ("float32", "float16", "int8"):
            for layout in ("NCHW", "NHWC"):
                conv = Conv2d.parse(key).with_(dtype=dtype, layout=layout)
                tensors = device_tensors(conv, 0)
                want, scale = reference(conv, tensors)
                for name in ("direct", "im2win_fused", "im2win", "mcfa", "implicit_gemm"):
                    tiles = [tile for _, tile in backend.ranked(conv, ALGORITHMS[name])]
                    for product in sorted({tile.product for tile in tiles}):
                        tile = rng.choice([tile for tile in tiles if tile.product == product])
                        op = im2win.build(conv, "cuda", algorithm=name, tile=tile)
                        error = float((op(tensors["data"], tensors["filter"]).double() - want).abs().max()) / scale
                        print(f"{conv} {name} {product}: error {error:.1e}", flush=True)
                        assert error < 2e-3


if __name__ == "__main__":
    main()
