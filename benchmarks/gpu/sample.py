"""Runs one small kernel of every kind once, for compute-sanitizer: every way to take windows, arithmetic and layout, and the studies."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path

import im2win
from im2win import Conv2d, cuda_ablation, cuda_builds, cuda_sliding
from im2win.algorithms import ALGORITHMS
from im2win.backends import backend_for
from im2win.gpu import device_gpu
from im2win.reference import tolerance
from im2win.schedules.cuda import ladder, sliding
from im2win.tuner.cuda_runner import device_tensors, reference

KEYS = ("n2-c40x13x14-k48x3x3-p1", "n1-c3x31x33-k32x5x5-s2-p2")
LADDER, SLIDING = "n2-c5x13x14-k70x3x3-p1", "n1-c3x31x33-k3x3x3-s2-p1"


def studies() -> None:
    """Every rung of the ladder, and both sliding windows."""
    gpu, rungs = device_gpu(), {**ladder.RUNGS, **ladder.WITHOUT}
    recipes = {(LADDER, name): cuda_ablation.recipe(Conv2d.parse(LADDER), rung, gpu) for name, rung in rungs.items()}
    for form in sliding.FORMS:
        recipes[SLIDING, form] = cuda_sliding.SlidingRecipe(Conv2d.parse(SLIDING), form, 8, gpu)
    with tempfile.TemporaryDirectory() as folder:
        for (key, name), recipe in recipes.items():
            conv, path = Conv2d.parse(key), Path(folder) / f"{name}.so"
            tensors = device_tensors(conv, 0)
            want, scale = reference(conv, tensors)
            op = cuda_builds.load(cuda_builds.Library(path, recipe.compile(path)))
            error = float((op(tensors["data"], tensors["filter"]).double() - want).abs().max()) / scale
            print(f"{conv} {name}: error {error:.1e}", flush=True)
            assert error < 1e-5


def main() -> None:
    studies()
    backend, rng = backend_for(device_gpu(), "winograd"), random.Random(0)
    for key in KEYS:
        for dtype in ("float32", "float16", "int8"):
            for layout in ("NCHW", "NHWC"):
                conv = Conv2d.parse(key).with_(dtype=dtype, layout=layout)
                tensors = device_tensors(conv, 0)
                want, scale = reference(conv, tensors)
                for name in ("direct", "im2win_fused", "im2win", "mcfa", "implicit_gemm", "winograd"):
                    if ALGORITHMS[name].supports(conv, "cuda", "winograd") is not None:
                        continue
                    tiles = [tile for _, tile in backend.ranked(conv, ALGORITHMS[name])]
                    for product in sorted({tile.product for tile in tiles}):
                        tile = rng.choice([tile for tile in tiles if tile.product == product])
                        op = im2win.build(conv, "cuda", algorithm=name, tile=tile, accuracy="winograd")
                        error = float((op(tensors["data"], tensors["filter"]).double() - want).abs().max()) / scale
                        print(f"{conv} {name} {product}: error {error:.1e}", flush=True)
                        assert error < max(2e-3, tolerance(conv, backend.accuracy(tile)))


if __name__ == "__main__":
    main()
